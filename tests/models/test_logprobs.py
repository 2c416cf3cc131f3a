"""Logits read in chunks, against the formulas over whole logits."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.functional import entropy, token_logprobs
from stages.models import logprobs
from stages.models.forward import response_statistics
from stages.models.loading import load_policy
from stages.models.logprobs import (
    PLAIN_HEAD,
    LogitStatistics,
    ReadingHead,
    TokenStatistics,
    give_reading_head,
)
from stages.settings.sections import CHUNK
from tests.lib.asserts import close
from tests.lib.families import CONFIGS

POSITIONS, VOCABULARY, WIDTH = 7, 11, 5


@pytest.fixture(params=[1, 3, POSITIONS])
def few_positions(request, monkeypatch):
    """Chunks of one position, of three, and of all, each read two positions at a time."""
    monkeypatch.setitem(CHUNK, "cpu", request.param * VOCABULARY)
    monkeypatch.setattr(logprobs, "CACHED", 2 * VOCABULARY)


def inputs_of() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCABULARY, (POSITIONS,))


def test_statistics_are_those_of_whole_logits(few_positions):
    hidden, weight, targets = inputs_of()
    logprobs, entropies = TokenStatistics.apply(hidden, weight, targets, 0.7, True)
    logits = (hidden @ weight.T).unsqueeze(0)
    close(logprobs, token_logprobs(logits, targets.unsqueeze(0), 0.7)[0].detach(), 1e-12)
    close(entropies, entropy(logits / 0.7)[0].detach(), 1e-12)


def test_gradients_are_those_of_finite_differences(few_positions):
    hidden, weight, targets = inputs_of()

    def logprobs(hidden, weight):
        return TokenStatistics.apply(hidden, weight, targets, 0.7, True)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight))


@pytest.mark.parametrize("about", [False, True])
@pytest.mark.parametrize("family", sorted(PLAIN_HEAD))
def test_a_policy_reads_its_logits_as_one_that_holds_them_whole(family, about, few_positions):
    config = copy.deepcopy(CONFIGS[family])
    config.vocab_size = VOCABULARY
    torch.manual_seed(1)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    chunked = copy.deepcopy(whole)
    give_reading_head(chunked)
    assert isinstance(chunked.get_output_embeddings(), ReadingHead)
    assert not isinstance(whole.get_output_embeddings(), ReadingHead)
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    row = tokens, torch.ones_like(tokens).bool(), 4, LogitStatistics(temperature=0.7, entropy=about)
    weights = torch.randn(2, 4, dtype=torch.float64)
    found = {}
    for model in (whole, chunked):
        logprobs, entropies = response_statistics(model, *row)
        assert not entropies.requires_grad
        (weights * logprobs).sum().backward()
        found[model] = logprobs.detach(), entropies.detach()
    for ours, theirs in zip(found[chunked], found[whole], strict=True):
        close(ours, theirs, 1e-5)
    assert bool(found[chunked][1].any()) == about
    for ours, theirs in zip(chunked.parameters(), whole.parameters(), strict=True):
        if theirs.grad is not None:
            close(ours.grad, theirs.grad, 1e-5)


def test_under_bf16_logits_are_bf16_and_their_softmax_is_not(policy_folder):
    chunked = load_policy(policy_folder)
    whole = AutoModelForCausalLM.from_pretrained(policy_folder)
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    row = tokens, torch.ones_like(tokens).bool(), 3, LogitStatistics()
    grads = []
    for model in (chunked, whole):
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = response_statistics(model, *row)
        assert logprobs.dtype == torch.float32
        logprobs.sum().backward()
        grads.append((logprobs.detach(), model.get_input_embeddings().weight.grad))
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs, 2e-2)


def test_a_frozen_output_layer_gets_no_gradient(policy_folder):
    policy = load_policy(policy_folder)
    policy.get_output_embeddings().requires_grad_(False)
    tokens = torch.tensor([[3, 4, 5, 6]])
    logprobs, _ = response_statistics(
        policy, tokens, torch.ones_like(tokens).bool(), 2, LogitStatistics()
    )
    logprobs.sum().backward()
    assert policy.get_output_embeddings().weight.grad is None
    assert policy.get_input_embeddings().weight.grad is not None


def test_a_policy_still_gives_logits_to_whom_asks_for_them(policy_folder, tmp_path):
    policy = load_policy(policy_folder)
    assert isinstance(policy.get_output_embeddings(), ReadingHead)
    plain = AutoModelForCausalLM.from_pretrained(policy_folder)
    tokens = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(policy(tokens).logits, plain(tokens).logits)
