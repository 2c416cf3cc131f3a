"""Steps 1 to 3 of an update, for any stage that learns from its own episodes.

1. sample   responses of a fixed length for a batch of queries, cut after their first EOS
2. measure  their log-probabilities under policy and frozen ref_policy, the critic's values if any
3. score    each whole response with the reward model, read at EOS
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.learning.batches import global_sum, local_share
from stages.learning.passes import response_logprobs, response_values, score_responses
from stages.learning.sampling import Sampling, sample, sampling_noise
from stages.learning.sharding import gathered
from stages.learning.vocabulary import LogprobFormula
from stages.posts.ragged import pad_left
from stages.rl.episodes import Episodes, concatenate, trim_left
from stages.rl.networks import Models


@torch.no_grad()
def roll_out(
    accelerator: Accelerator,
    models: Models,
    queries: Sequence[Tensor],
    sampling: Sampling,
    formula: LogprobFormula = functional.token_logprobs,
    keep_sampled: bool = False,
) -> tuple[Episodes, dict[str, float]]:
    """Episodes of this process's share of a global batch of queries, and the sampler's mismatch.

    The policy's log-probabilities are recomputed by the training forward pass, so that the first
    ratio is 1. `val/sampler_mismatch` is the mean distance between these and the sampler's, in nats
    per token over all processes.
    differs: Huang et al. 2024 keeps the sampler's (`keep_sampled`).
    """
    models.trained.eval()
    eos_id, pad_id = models.eos_id, models.pad_id
    parts, gaps = [], []
    batch, uniforms = share_of_batch(accelerator, queries, sampling, pad_id)
    for some, uniform in forward_passes(batch, uniforms, sampling.forward_batch_size, pad_id):
        # A network's processes stop sampling at different tokens. Each autocast gives the bf16
        # copies of weights back when it ends, so sampling's do not stand beside the others'.
        with gathered(models.policy), accelerator.autocast():
            responses, sampled = sample(  # 1. sample
                models.policy, some, uniform, sampling.temperature, eos_id, pad_id, formula
            )
        responses = functional.truncate_after(responses, eos_id, pad_id)
        with accelerator.autocast():
            episodes = measure(models, some, responses, sampling.temperature, formula)
        real = responses != pad_id
        gaps.append(torch.where(real, (episodes.logprobs - sampled).abs(), 0.0).sum())
        parts.append(replace(episodes, logprobs=sampled) if keep_sampled else episodes)
    episodes = concatenate(parts, batch)
    gap, tokens = global_sum(accelerator, sum(gaps), (episodes.responses != pad_id).sum())
    return episodes, {"val/sampler_mismatch": gap / tokens}


def share_of_batch(
    accelerator: Accelerator, queries: Sequence[Tensor], sampling: Sampling, pad_id: int
) -> tuple[Tensor, Tensor]:
    """This process's queries [B, Q], shortest first, and the noise of their tokens [B, T].

    Neighbours in length share a forward pass, so that little of it is padding. The noise belongs
    to the place in the global batch: neither order nor process changes it.
    """
    noise = sampling_noise(
        sampling.seed, sampling.purpose, sampling.step, len(queries), sampling.length
    )
    places = local_share(range(len(queries)), accelerator)
    places.sort(key=lambda place: len(queries[place]))
    batch = pad_left([queries[place] for place in places], pad_id)
    return batch.to(accelerator.device), noise[places].to(accelerator.device)


def forward_passes(
    batch: Tensor, uniforms: Tensor, size: int, pad_id: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and noise of at most `size` episodes at a time, without columns of padding only."""
    for some, uniform in zip(torch.split(batch, size), torch.split(uniforms, size), strict=True):
        yield trim_left(some, pad_id), uniform


def measure(
    models: Models,
    queries: Tensor,
    responses: Tensor,
    temperature: float,
    formula: LogprobFormula = functional.token_logprobs,
) -> Episodes:
    """Steps 2 and 3 for postprocessed responses.

    Shapes: queries [B, Q] left-padded, responses [B, T].
    """
    query_responses = torch.cat([queries, responses], dim=1)
    mask, length = query_responses != models.pad_id, responses.shape[1]
    tokens = query_responses.masked_fill(~mask, 0)
    logprobs, ref_logprobs = (  # 2. measure
        response_logprobs(policy, tokens, mask, length, temperature, formula)
        for policy in (models.policy, models.ref_policy)
    )
    values = None
    if models.critic is not None:
        values = response_values(models.critic, tokens, mask, length)
    return Episodes(
        queries=queries,
        responses=responses,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=score_responses(models.reward_model, queries, responses, models.pad_id),  # 3. score
    )
