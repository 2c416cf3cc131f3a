"""What padding must not change, and the numbers of the paper's code."""

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPTNeoXConfig

from stages.models.forward import (
    ResponseBatch,
    model_inputs,
    response_logprobs,
    response_values,
    score_responses,
)
from stages.models.loading import load_policy, new_reward_model
from stages.models.policy import PolicyModel
from tests.lib import paper_numbers as paper
from tests.lib.asserts import close
from tests.lib.places import SHARED


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 250, (rows, length), generator=generator)


@pytest.mark.parametrize("pads", [0, 1, 7])
def test_padding_on_either_side_changes_no_log_probability_and_no_score(policy, reward_model, pads):
    pad = policy.config.vocab_size
    queries = random_tokens(2, 6, seed=1)
    responses = random_tokens(2, 5, seed=2)
    bare = ResponseBatch(queries=queries, responses=responses, pad_id=pad)
    padded = ResponseBatch(
        queries=torch.nn.functional.pad(queries, (pads, 0), value=pad),
        responses=torch.nn.functional.pad(responses, (0, pads), value=pad),
        pad_id=pad,
    )
    assert padded.mask.sum() == bare.tokens.numel()
    with torch.no_grad():
        close(score_responses(reward_model, padded), score_responses(reward_model, bare), 1e-4)
        logprobs, _ = response_logprobs(PolicyModel(policy), padded)
        expected, _ = response_logprobs(PolicyModel(policy), bare)
        close(logprobs[:, :5], expected, 1e-4)


def test_pad_ids_reach_no_embedding_and_positions_count_real_tokens():
    tokens = torch.tensor([[9, 9, 4, 5], [6, 7, 9, 9]])
    inputs = model_inputs(tokens, tokens != 9)
    assert inputs["input_ids"].tolist() == [[0, 0, 4, 5], [6, 7, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    positions = inputs["position_ids"]
    assert positions[0, 2:].tolist() == positions[1, :2].tolist() == [0, 1]


@pytest.fixture
def tiny_neox(source, tmp_path):
    """The folder of the model that the golden rewards are of."""
    if source == "shared":
        return SHARED / "golden" / "tiny_neox"
    GPTNeoXConfig(**paper.NEOX).save_pretrained(tmp_path)
    weights = {name: torch.from_numpy(x).float() for name, x in paper.tiny_neox().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_scores_values_and_logprobs_are_those_of_the_papers_code(golden, tiny_neox):
    case, folder = golden("reward_tiny"), tiny_neox
    policy = load_policy(folder).eval()
    reward_model = new_reward_model(folder, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        reward_model.classifier.weight.copy_(case["head_weight"])
        reward_model.classifier.bias.copy_(case["head_bias"] - case["reward_bias"])
    batch = ResponseBatch(
        queries=case["queries"], responses=case["responses"], pad_id=int(case["pad_token_id"])
    )
    real = batch.responses != batch.pad_id
    value_counts = torch.cat([torch.ones(len(real), 1).bool(), real[:, :-1]], dim=1)
    with torch.no_grad():
        scores = score_responses(reward_model, batch)
        values = response_values(reward_model, batch)
        logprobs, _ = response_logprobs(
            PolicyModel(policy), batch, temperature=case["temperature"].item()
        )
    close(scores, case["rewards"], 1e-5)
    close(values[value_counts], case["values"][value_counts], 1e-5)
    close(logprobs[real], case["logprobs"][real], 1e-5)
