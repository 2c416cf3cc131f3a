"""DPO's loss, its log-probabilities and two updates agree with independent computations."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from stages import dpo
from stages.config.command_line import make_config
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.functional import dpo_loss, sequence_logprobs
from stages.models.loading import load_policy
from stages.models.policy import PolicyModel
from stages.runs.run import open_stage
from stages.training.memory import MemoryBudget
from stages.training.optimizer import make_optimizer
from stages.training.preferences import summarize_gaps
from stages.training.random_streams import batch_rows
from stages.training.state import Order
from tests.lib.asserts import refusal_of
from tests.lib.learners import flat, state_of

EOS = 0


def settings(microbatch_size=64, **changes):
    config = make_config("tiny")
    memory = config.memory.changed(microbatch_size=microbatch_size, forward_batch_size=6)
    changes = {"batch_size": 8, "learning_rate": 1e-3, **changes}
    return config.changed(memory=memory, dpo=config.dpo.changed(**changes))


@pytest.fixture
def pairs():
    """Eleven comparisons of different lengths, each summary with its EOS."""
    generator = torch.Generator().manual_seed(4)

    def texts(shortest: int, longest: int, end: list[int]) -> list[list[int]]:
        lengths = torch.randint(shortest, longest, (11,), generator=generator).tolist()
        return [torch.randint(1, 250, (n,), generator=generator).tolist() + end for n in lengths]

    columns = {
        "queries": make_ragged(texts(3, 12, [])),
        "chosen": make_ragged(texts(1, 9, [EOS])),
        "rejected": make_ragged(texts(1, 9, [EOS])),
    }
    rows = []
    for number in range(11):
        batch = str(number % 2)
        rows.append({"split": "valid", "batch": batch, "strength": None, "policies": "a--b"})
    return TokenizedSplit(columns=columns, rows=rows)


def unbatched_logprob(policy, query, response):
    """Log-probability of one response, without padding, by a softmax over the whole text."""
    logits = policy(input_ids=torch.cat([query, response]).unsqueeze(0)).logits[0]
    logprobs = logits[len(query) - 1 : -1].double().log_softmax(dim=-1)  # [T, V]
    return logprobs[torch.arange(len(response)), response].sum()


# -- the formula -----------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """Above the reference are chosen by 1 and -3 and rejected by -1 and -1, so the gaps are 2 and
    -2. Beta halves them.
    """
    loss, chosen_rewards, rejected_rewards = dpo_loss(
        torch.tensor([-1.0, -4.0]),
        torch.tensor([-3.0, -4.0]),
        torch.tensor([-2.0, -1.0]),
        torch.tensor([-2.0, -3.0]),
        beta=0.5,
    )
    assert chosen_rewards.tolist() == [0.5, -1.5]
    assert rejected_rewards.tolist() == [-0.5, -0.5]
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_one_pair_by_hand():
    loss, _, _ = dpo_loss(
        torch.tensor([-1.0]),
        torch.tensor([-3.0]),
        torch.tensor([-2.0]),
        torch.tensor([-2.0]),
        beta=0.5,
    )
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)


def test_loss_and_gradient_are_those_of_an_independent_computation_in_float64():
    count = 9
    beta = 0.07
    nats = np.random.default_rng(3).normal(-60, 20, (4, count))
    chosen, rejected, ref_chosen, ref_rejected = (
        torch.tensor(row, requires_grad=True) for row in nats
    )

    loss, _, _ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    loss.backward()

    gaps = beta * (nats[0] - nats[2] - nats[1] + nats[3])
    assert loss.item() == pytest.approx(np.logaddexp(0, -gaps).mean(), rel=1e-12)
    slope = -beta / (1 + np.exp(gaps)) / count
    assert_gradient(chosen, slope)
    assert_gradient(rejected, -slope)
    assert_gradient(ref_chosen, -slope)
    assert_gradient(ref_rejected, slope)


def assert_gradient(tensor, expected):
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-9)


@st.composite
def logprobs(draw):
    """The log-probability of one response."""
    return torch.tensor([draw(st.floats(-300, 0))], dtype=torch.float64)


@given(logprobs(), logprobs(), logprobs(), logprobs(), st.floats(0.01, 2))
def test_taking_chosen_for_rejected_adds_the_margin_to_the_loss(
    first, second, ref_first, ref_second, beta
):
    loss, first_reward, second_reward = dpo_loss(first, second, ref_first, ref_second, beta)
    swapped_loss, _, _ = dpo_loss(second, first, ref_second, ref_first, beta)
    margin = first_reward - second_reward
    assert (swapped_loss - loss).item() == pytest.approx(margin.item(), abs=1e-9)


@given(logprobs(), logprobs(), logprobs(), logprobs(), st.floats(0.01, 2))
def test_what_policy_and_reference_share_is_no_reward(
    chosen, rejected, ref_chosen, ref_rejected, beta
):
    """A harder query, for example, lowers the log-probabilities of both."""
    loss, _, _ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    same_loss, _, _ = dpo_loss(chosen - 7, rejected - 5, ref_chosen - 7, ref_rejected - 5, beta)
    assert same_loss.item() == pytest.approx(loss.item(), abs=1e-9)


def test_a_sequences_log_probability_is_the_sum_over_its_mask():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, math.nan, math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert sequence_logprobs(logprobs, mask).tolist() == [-3.0, -0.5]


# -- updates ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_log_probabilities_of_a_batch_are_those_of_each_summary_alone(policy, pairs):
    rows = [4, 0, 7, 9]

    chosen, rejected = dpo.pair_logprobs(PolicyModel(policy), pairs, rows, torch.device("cpu"))

    for place, row in enumerate(rows):
        query = pairs.columns["queries"][row]
        expected = unbatched_logprob(policy, query, pairs.columns["chosen"][row])
        assert chosen[place].item() == pytest.approx(expected.item(), abs=1e-4)
        expected = unbatched_logprob(policy, query, pairs.columns["rejected"][row])
        assert rejected[place].item() == pytest.approx(expected.item(), abs=1e-4)


def reference_of(policy, pairs, config):
    """The log-probabilities of all pairs, as the stage computes them before its first update."""
    budget = MemoryBudget.from_settings(config.memory)
    return dpo.split_logprobs(Accelerator(cpu=True), budget, policy, pairs, label="test")


def two_updates(policy_folder, pairs, microbatch_size):
    """The weights after two updates, and the statistics of each."""
    config = settings(microbatch_size)
    policy = PolicyModel(load_policy(policy_folder))
    reference = reference_of(policy, pairs, config)
    optimizer = make_optimizer(policy.parameters(), config.dpo.learning_rate, config.optimizer)
    state = state_of(config, policy, optimizer)
    statistics = []
    for update in range(2):
        rows = batch_rows(len(pairs), 8, update, 1, "dpo")
        statistics.append(dpo.take_step(state, pairs, reference, rows))
    return flat(policy), statistics


def log_ratio(policy, ref_policy, query, response):
    """By how many nats the policy prefers a response more than the reference does."""
    logprob = unbatched_logprob(policy, query, response)
    return logprob - unbatched_logprob(ref_policy, query, response)


def two_updates_by_hand(policy_folder, pairs):
    """The weights after the same updates, from the definition of the loss.

    A second model is the reference. Texts are read one at a time, so there is no padding.
    """
    policy = load_policy(policy_folder).eval()
    ref_policy = copy.deepcopy(policy).requires_grad_(False)
    beta = settings().dpo.beta
    adam = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)
    for update in range(2):
        losses = []
        for row in batch_rows(len(pairs), 8, update, 1, "dpo"):
            query = pairs.columns["queries"][row]
            chosen_gain = log_ratio(policy, ref_policy, query, pairs.columns["chosen"][row])
            rejected_gain = log_ratio(policy, ref_policy, query, pairs.columns["rejected"][row])
            losses.append(F.softplus(-beta * (chosen_gain - rejected_gain)))
        torch.stack(losses).mean().backward()
        adam.step()
        adam.zero_grad()
    return flat(policy)


@pytest.mark.parametrize("microbatch_size", [1, 2, 6, 8, 64])
def test_two_updates_are_those_of_the_definition_for_any_microbatch(
    policy_folder, pairs, microbatch_size
):
    before = flat(load_policy(policy_folder))
    weights, statistics = two_updates(policy_folder, pairs, microbatch_size)

    expected = two_updates_by_hand(policy_folder, pairs)

    assert (weights - expected).abs().max() < 1e-5
    assert (weights - before).abs().max() > 1e-3
    assert statistics[1]["rewards/chosen"] != 0


# -- a wrong reference -----------------------------------------------------------------------------


def of_other_rows(reference):
    return reference.roll(1, dims=0)


def of_the_other_summary(reference):
    return reference.flip(1)


def of_another_model(reference):
    return reference + 1.0


def not_finite(reference):
    return torch.full_like(reference, math.nan)


def train_with_reference(policy_folder, pairs, change):
    """Take the stage's updates with a reference that `change` has made wrong."""
    config = settings()
    policy = PolicyModel(load_policy(policy_folder))
    reference = change(reference_of(policy, pairs, config))
    optimizer = make_optimizer(policy.parameters(), 1e-3, config.optimizer)
    batch_size = config.dpo.batch_size
    with open_stage(config, "dpo") as run:
        state = state_of(
            config,
            policy,
            optimizer,
            run=run,
            updates=config.dpo.epochs * len(pairs) // batch_size,
            order=Order(rows=len(pairs), batch_size=batch_size, seed=config.seed, purpose="dpo"),
        )
        dpo.learn(state, pairs, reference)
        run.finish({})


@pytest.mark.parametrize(
    "change", [of_other_rows, of_the_other_summary, of_another_model, not_finite]
)
def test_a_wrong_reference_stops_the_stage_at_its_first_batch(policy_folder, pairs, runs, change):
    line = refusal_of(train_with_reference, policy_folder, pairs, change)
    assert "dpo" in line or "loss/train" in line
    assert not list(runs.glob("*/*/dpo*"))


def test_a_gap_of_0_counts_as_wrong():
    assert summarize_gaps([1.0, 0.0, -1.0, 2.0])["accuracy"] == 0.5
