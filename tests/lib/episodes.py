"""Two scored episodes with random numbers: one ends with EOS, the other fills all places."""

from typing import Any

import torch

from stages.rl.episodes import Episodes

EOS = 0
PAD = 9
RESPONSES = torch.tensor([[4, 5, EOS, PAD], [6, 7, 8, 6]])


def two_episodes(seed: int = 1, **columns: Any) -> Episodes:
    """Episodes with random log-probabilities and values; `columns` replace some."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs, values = (torch.randn(2, 4, generator=generator) for _ in range(3))
    given: dict[str, Any] = {
        "queries": torch.ones(2, 2, dtype=torch.long),
        "responses": RESPONSES,
        "pad_id": PAD,
        "sampled_logprobs": logprobs,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "values": values,
        "sampler_gaps": torch.zeros(2),
        "scores": torch.tensor([2.0, 3.0]),
    }
    return Episodes(**given | columns)
