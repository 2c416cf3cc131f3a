"""Log-probabilities and entropies that are computed in chunks, against formulas over all logits."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stages.config.sections import CHUNK
from stages.functional import entropy, token_logprobs
from stages.models import logprobs
from stages.models.forward import ResponseBatch, response_logits, response_logprobs
from stages.models.loading import load_policy
from stages.models.logprobs import chunked_logprobs
from stages.models.policy import PLAIN_HEAD, PolicyModel, weights_cast_once
from tests.lib.asserts import close
from tests.lib.families import CONFIGS

ROWS, COLUMNS, VOCABULARY, WIDTH = 2, 4, 11, 5
POSITIONS = ROWS * COLUMNS
NO_PADDING = -1


@pytest.fixture(params=[1, 3, POSITIONS])
def small_chunks(request, monkeypatch):
    """Chunks of one position, of three, and of all, in blocks of two positions."""
    monkeypatch.setitem(CHUNK, "cpu", request.param * VOCABULARY)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CPU_BLOCK", 2 * VOCABULARY)


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the weight of an output layer, and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, COLUMNS, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (ROWS, COLUMNS))


def policy_of(family: str) -> PolicyModel:
    config = copy.deepcopy(CONFIGS[family])
    config.vocab_size = VOCABULARY
    torch.manual_seed(1)
    return PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval())


def random_batch() -> ResponseBatch:
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    return ResponseBatch(queries=tokens[:, :5], responses=tokens[:, 5:], pad_id=NO_PADDING)


def response_logits_of_plain_model(policy: PolicyModel, batch: ResponseBatch) -> Tensor:
    """The logits that predict each response token, by a pass of the model inside."""
    first = batch.queries.shape[1] - 1
    logits: Tensor = policy.model(input_ids=batch.tokens).logits
    return logits[:, first:-1]


# -- in chunks -------------------------------------------------------------------------------------


def test_chunks_give_the_formulas_over_all_logits(small_chunks):
    hidden, weight, targets = random_inputs()
    found, entropies = chunked_logprobs(hidden, weight, targets, 0.7, with_entropy=True)
    logits = hidden @ weight.T
    close(found, token_logprobs(logits, targets, 0.7).detach(), 1e-12)
    close(entropies, entropy(logits / 0.7).detach(), 1e-12)


def test_gradients_are_finite_differences(small_chunks):
    hidden, weight, targets = random_inputs()

    def only_logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        found, _ = chunked_logprobs(hidden, weight, targets, 0.7, with_entropy=True)
        return found

    assert torch.autograd.gradcheck(only_logprobs, (hidden, weight))


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_the_entropys_gradient_is_that_of_the_formula_over_all_logits(with_logprobs, small_chunks):
    hidden, weight, targets = random_inputs()
    entropy_weights = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    logprob_weights = torch.randn(ROWS, COLUMNS, dtype=torch.float64)

    found, entropies = chunked_logprobs(hidden, weight, targets, 0.7, with_entropy=True)
    loss = (entropy_weights * entropies).sum()
    logits = hidden @ weight.T
    expected_loss = (entropy_weights * entropy(logits / 0.7)).sum()
    if with_logprobs:
        loss = loss + (logprob_weights * found).sum()
        expected_loss = (
            expected_loss + (logprob_weights * token_logprobs(logits, targets, 0.7)).sum()
        )

    gradients = torch.autograd.grad(loss, (hidden, weight))
    expected = torch.autograd.grad(expected_loss, (hidden, weight))
    close(gradients[0], expected[0], 1e-12)
    close(gradients[1], expected[1], 1e-12)


def test_entropy_is_zero_unless_requested():
    hidden, weight, targets = random_inputs()
    _, entropies = chunked_logprobs(hidden, weight, targets)
    assert not entropies.any()


def test_an_impossible_token_adds_nothing_to_the_entropy():
    hidden = torch.tensor([[[1.0], [1.0]]], requires_grad=True)
    weight = torch.tensor([[0.0], [0.0], [-math.inf]])  # logits 0, 0, -inf
    found, entropies = chunked_logprobs(hidden, weight, torch.tensor([[0, 2]]), with_entropy=True)
    close(entropies, [[math.log(2), math.log(2)]])
    assert found[0, 0].item() == pytest.approx(-math.log(2))
    assert found[0, 1] == -math.inf


# -- bf16: logits may be rounded, what is computed from them must not be ---------------------------


def test_logprobs_of_bf16_logits_are_those_of_their_float32_copy():
    logits = torch.randn(1, 50, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    targets = torch.arange(50).remainder(40).unsqueeze(0)
    found = token_logprobs(logits, targets, 0.7)
    assert found.dtype == torch.float32
    assert torch.equal(found, token_logprobs(logits.float(), targets, 0.7))


def test_chunked_logprobs_of_bf16_logits_are_those_of_their_float32_copy(small_chunks):
    hidden, weight, targets = random_inputs(torch.bfloat16)
    found, entropies = chunked_logprobs(hidden, weight, targets, 0.7, with_entropy=True)
    logits = (hidden @ weight.T).float()
    close(found, token_logprobs(logits, targets, 0.7).detach(), 1e-5)
    close(entropies, entropy(logits / 0.7).detach(), 1e-5)


def test_a_policy_under_autocast_has_bf16_logits_and_float32_logprobs(policy_folder):
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    batch = ResponseBatch(queries=tokens[:, :3], responses=tokens[:, 3:], pad_id=NO_PADDING)
    policy = PolicyModel(load_policy(policy_folder))
    plain = AutoModelForCausalLM.from_pretrained(policy_folder).eval()

    with torch.autocast("cpu", torch.bfloat16):
        found, _ = response_logprobs(policy, batch)
        expected = token_logprobs(plain(tokens).logits[:, 2:-1], tokens[:, 3:], 1.0)
    found.sum().backward()
    expected.sum().backward()

    assert found.dtype == torch.float32
    close(found.detach(), expected.detach(), 2e-2)
    gradients = [model.get_input_embeddings().weight.grad for model in (policy.model, plain)]
    close(gradients[0], gradients[1], 2e-2)


# -- a policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_policy_has_the_logprobs_and_gradients_of_its_logits(family, with_entropy, small_chunks):
    policy = policy_of(family)
    plain = copy.deepcopy(policy)
    batch = random_batch()
    weights = torch.randn(batch.responses.shape, dtype=torch.float64)

    found, entropies = response_logprobs(policy, batch, temperature=0.7, with_entropy=with_entropy)
    (weights * found).sum().backward()
    logits = response_logits_of_plain_model(plain, batch)
    expected = token_logprobs(logits, batch.responses, 0.7)
    (weights * expected).sum().backward()

    close(found.detach(), expected.detach().to(found.dtype), 1e-5)
    assert not entropies.requires_grad
    if with_entropy:
        close(entropies, entropy(logits / 0.7).detach().to(entropies.dtype), 1e-5)
    else:
        assert not entropies.any()
    for weight, of_plain in zip(policy.parameters(), plain.parameters(), strict=True):
        if of_plain.grad is not None:
            assert weight.grad is not None
            close(weight.grad, of_plain.grad, 1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_policys_entropy_has_the_gradient_of_its_logits_if_requested(family, small_chunks):
    """In chunks where the head is plain, through all logits in any other family."""
    policy = policy_of(family)
    plain = copy.deepcopy(policy)
    batch = random_batch()
    weights = torch.randn(batch.responses.shape, dtype=torch.float64)

    _, entropies = response_logprobs(
        policy, batch, temperature=0.7, with_entropy=True, entropy_requires_grad=True
    )
    (weights * entropies).sum().backward()
    logits = response_logits_of_plain_model(plain, batch)
    (weights * entropy(logits / 0.7)).sum().backward()

    for weight, of_plain in zip(policy.parameters(), plain.parameters(), strict=True):
        if of_plain.grad is not None:
            assert weight.grad is not None
            close(weight.grad, of_plain.grad, 1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_plain_model_at_the_columns(family):
    policy = policy_of(family)
    batch = random_batch()
    padded = ResponseBatch(
        queries=torch.cat([torch.full((2, 3), 99), batch.queries], dim=1),
        responses=batch.responses,
        pad_id=99,
    )
    expected = response_logits_of_plain_model(policy, batch)
    close(response_logits(policy, padded), expected, 1e-6)


@pytest.mark.parametrize("family", sorted(PLAIN_HEAD))
def test_chunks_are_used_where_the_head_is_plain(family, monkeypatch):
    """No pass of the whole causal LM, so that logits never exist all at once."""
    policy = policy_of(family)
    calls: list[str] = []
    policy.model.register_forward_pre_hook(lambda *_: calls.append("logits"))
    response_logprobs(policy, random_batch())
    assert not calls


def test_a_head_with_a_bias_is_not_bypassed():
    policy = policy_of("llama")
    head = nn.Linear(policy.config.hidden_size, VOCABULARY, dtype=torch.float64)
    policy.model.set_output_embeddings(head)
    batch = random_batch()
    found, _ = response_logprobs(policy, batch)
    logits = response_logits_of_plain_model(policy, batch)
    close(found.detach(), token_logprobs(logits, batch.responses, 1.0).detach(), 1e-12)
    hidden = policy.model.base_model(batch.tokens).last_hidden_state[:, 4:-1]
    without_bias = token_logprobs(hidden @ head.weight.T, batch.responses, 1.0)
    assert (found - without_bias).abs().max() > 1e-3


def test_a_frozen_output_layer_gets_no_gradient(policy_folder):
    policy = PolicyModel(load_policy(policy_folder))
    policy.model.get_output_embeddings().requires_grad_(False)
    tokens = torch.tensor([[3, 4, 5, 6]])
    batch = ResponseBatch(queries=tokens[:, :2], responses=tokens[:, 2:], pad_id=NO_PADDING)
    found, _ = response_logprobs(policy, batch)
    found.sum().backward()
    assert policy.model.get_output_embeddings().weight.grad is None
    assert policy.model.get_input_embeddings().weight.grad is not None


def test_the_model_inside_stays_a_plain_one(policy_folder):
    model = load_policy(policy_folder)
    plain = AutoModelForCausalLM.from_pretrained(policy_folder)
    response_logprobs(PolicyModel(model), random_batch())
    tokens = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    for (name, module), (plain_name, plain_module) in zip(
        model.named_modules(), plain.named_modules(), strict=True
    ):
        assert name == plain_name
        assert type(module) is type(plain_module)
    assert model.state_dict().keys() == plain.state_dict().keys()


@torch.no_grad()
def test_the_copy_of_the_head_lasts_no_longer_than_its_context(policy_folder):
    policy = PolicyModel(load_policy(policy_folder))
    batch = random_batch()
    head = policy.model.get_output_embeddings()

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found, _ = response_logprobs(policy, batch)
        return found

    before = under_autocast()
    with weights_cast_once(policy):
        assert torch.equal(under_autocast(), before)
        weight = head.weight.clone()
        head.weight.mul_(2)  # not allowed here: it shows that the copy is used
        assert torch.equal(under_autocast(), before)
    assert not torch.equal(under_autocast(), before)
    head.weight.copy_(weight)
    assert torch.equal(under_autocast(), before)
