"""Sampling by hand: what a policy draws, and where it stops."""

import math

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from stages.functional import truncate_after
from stages.models.policy import PolicyModel
from stages.models.sampling import SamplingParams, draw, sample


@pytest.fixture
def writer():
    """A policy over 7 tokens (0 is EOS, [PAD] would be 7), so that EOS comes by itself."""
    torch.manual_seed(3)
    config = GPTNeoXConfig(
        vocab_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    return PolicyModel(GPTNeoXForCausalLM(config)).eval()


def write(writer: PolicyModel, queries: Tensor, uniforms: Tensor, eos_id: int = 0) -> Tensor:
    params = SamplingParams(temperature=0.9, eos_id=eos_id, pad_id=7)
    responses, _ = sample(writer, queries, uniforms=uniforms, params=params)
    return responses


def queries_and_noise(rows: int = 6, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randint(1, 7, (rows, 7), generator=generator)
    for row in range(rows):
        queries[row, : row % 4] = 7  # left padding
    return queries, torch.rand(rows, length, generator=generator, dtype=torch.float64)


def test_sampling_stops_early_with_the_same_tokens_up_to_eos(writer):
    queries, uniforms = queries_and_noise()
    stopped = write(writer, queries, uniforms)
    endless = write(writer, queries, uniforms, eos_id=-1)
    assert ((endless >= 0) & (endless < 7)).all()
    assert torch.equal(truncate_after(stopped, 0, 7), truncate_after(endless, 0, 7))
    ends = [row.index(0) for row in endless.tolist()]
    assert max(ends) < 39, "this seed has to show an early stop"
    for row, end in zip(stopped, ends, strict=True):
        assert (row[end + 1 :] == 7).all()
        assert (row[: end + 1] != 7).all()


def test_cached_sampling_draws_what_whole_forward_passes_predict(writer):
    queries, uniforms = queries_and_noise(rows=3, length=8)
    responses = write(writer, queries, uniforms, eos_id=-1)
    for row, query in enumerate(queries):
        tokens = query[query != 7].tolist()
        for step in range(8):
            logits = writer.model(torch.tensor([tokens])).logits[0, -1, :7].double()
            cumulative = (logits / 0.9).softmax(0).cumsum(0)
            expected = sum(cumulative.lt(uniforms[row, step]).tolist())
            assert responses[row, step] == expected
            tokens.append(expected)


def test_random_uniforms_pass_a_chi_square_test():
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    count = 20_000
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(5))
    found = draw(logits.expand(count, -1), uniforms, 1.0).bincount(minlength=4)
    weights = [math.exp(logit) for logit in logits.tolist()]
    expected = torch.tensor([count * weight / sum(weights) for weight in weights])
    statistic = ((found - expected) ** 2 / expected).sum().item()
    assert statistic < 16.27  # 99.9 % of chi-square with 3 degrees of freedom


def test_impossible_tokens_are_never_drawn_even_at_the_ends():
    never = -math.inf
    logits = torch.tensor([[never, 0.0, never, 0.0, never]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniforms, 1.0).tolist() == [1, 1, 3, 3]
