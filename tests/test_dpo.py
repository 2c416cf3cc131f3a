"""DPO: formula, log-probabilities of whole summaries, first loss, two updates by hand."""

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
NATS = st.floats(-300, 0)


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
    rows = [
        {"split": "valid", "batch": str(i % 2), "strength": None, "policies": "a--b"}
        for i in range(11)
    ]
    return TokenizedSplit(columns=columns, rows=rows)


def alone(policy, query, response):
    """Log-probability of one response, without padding, by a softmax over the whole text."""
    logits = policy(input_ids=torch.cat([query, response]).unsqueeze(0)).logits[0]
    predicting = logits[len(query) - 1 : -1].double().log_softmax(dim=-1)
    return predicting[torch.arange(len(response)), response].sum()


def test_the_loss_by_hand():
    chosen, rejected = torch.tensor([-1.0, -4.0]), torch.tensor([-3.0, -4.0])
    ref_chosen, ref_rejected = torch.tensor([-2.0, -1.0]), torch.tensor([-2.0, -3.0])
    # Above the reference: chosen by 1 and -3, rejected by -1 and -1; gaps 2 and -2; beta halves.
    loss, chosen_rewards, rejected_rewards = dpo_loss(
        chosen, rejected, ref_chosen, ref_rejected, 0.5
    )
    assert chosen_rewards.tolist() == [0.5, -1.5]
    assert rejected_rewards.tolist() == [-0.5, -0.5]
    expected = (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    right, *_ = dpo_loss(chosen[:1], rejected[:1], ref_chosen[:1], ref_rejected[:1], 0.5)
    assert right.item() == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)


def test_loss_and_gradient_are_those_of_an_independent_computation_in_float64():
    rng = np.random.default_rng(3)
    raw = rng.normal(-60, 20, (4, 9))
    beta, n = 0.07, 9
    x = beta * (raw[0] - raw[2] - raw[1] + raw[3])
    tensors = [torch.tensor(row, requires_grad=True) for row in raw]
    chosen, rejected, ref_chosen, ref_rejected = tensors
    loss, *_ = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    assert loss.item() == pytest.approx(np.logaddexp(0, -x).mean(), rel=1e-12)
    loss.backward()
    slope = -beta / (1 + np.exp(x)) / n
    for tensor, sign in zip(tensors, (1, -1, -1, 1), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), sign * slope, rtol=1e-9)


@given(NATS, NATS, NATS, NATS, st.floats(0.01, 2))
def test_taking_chosen_for_rejected_adds_the_margin_to_the_loss(c, r, rc, rr, beta):
    one, other, ref_one, ref_other = (
        torch.tensor([x], dtype=torch.float64) for x in (c, r, rc, rr)
    )
    loss, chosen, rejected = dpo_loss(one, other, ref_one, ref_other, beta)
    swapped, *_ = dpo_loss(other, one, ref_other, ref_one, beta)
    assert (swapped - loss).item() == pytest.approx((chosen - rejected).item(), abs=1e-9)
    # What policy and reference share (a harder query, say) is no reward.
    same, *_ = dpo_loss(one - 7, other - 5, ref_one - 7, ref_other - 5, beta)
    assert same.item() == pytest.approx(loss.item(), abs=1e-9)


def test_a_sequence_is_the_sum_of_what_counts_whatever_stands_beside():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, math.nan, math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert sequence_logprobs(logprobs, mask).tolist() == [-3.0, -0.5]


@torch.no_grad()
def test_log_probabilities_of_a_batch_are_those_of_each_summary_alone(policy, pairs):
    rows = [4, 0, 7, 9]
    found = dpo.pair_logprobs(PolicyModel(policy), pairs, rows, torch.device("cpu"))
    for name, column in zip(("chosen", "rejected"), found, strict=True):
        for row, value in zip(rows, column, strict=True):
            expected = alone(policy, pairs.columns["queries"][row], pairs.columns[name][row])
            assert value.item() == pytest.approx(expected.item(), abs=1e-4)


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


def two_updates_by_hand(policy_folder, pairs):
    """The same from the definition: a second model as reference, one text at a time, no padding."""
    policy = load_policy(policy_folder).eval()
    ref_policy = copy.deepcopy(policy).requires_grad_(False)
    beta = settings().dpo.beta
    adam = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)
    for update in range(2):
        losses = []
        for row in batch_rows(len(pairs), 8, update, 1, "dpo"):
            query = pairs.columns["queries"][row]
            chosen = pairs.columns["chosen"][row]
            rejected = pairs.columns["rejected"][row]
            chosen_ratio = alone(policy, query, chosen) - alone(ref_policy, query, chosen)
            rejected_ratio = alone(policy, query, rejected) - alone(ref_policy, query, rejected)
            losses.append(F.softplus(-beta * (chosen_ratio - rejected_ratio)))
        torch.stack(losses).mean().backward()
        adam.step()
        adam.zero_grad()
    return flat(policy)


@pytest.mark.parametrize("microbatch_size", [1, 2, 6, 8, 64])
def test_two_updates_are_those_of_the_definition_for_any_microbatch(
    policy_folder, pairs, microbatch_size
):
    weights, statistics = two_updates(policy_folder, pairs, microbatch_size)
    assert (weights - two_updates_by_hand(policy_folder, pairs)).abs().max() < 1e-5
    assert (weights - flat(load_policy(policy_folder))).abs().max() > 1e-3
    assert statistics[1]["rewards/chosen"] != 0


def train_with_reference(policy_folder, pairs, spoil):
    """Take the stage's updates with a reference that `spoil` has changed."""
    config = settings()
    policy = PolicyModel(load_policy(policy_folder))
    reference = spoil(reference_of(policy, pairs, config))
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
    "spoil",
    [
        lambda reference: reference.roll(1, dims=0),  # of other rows
        lambda reference: reference.flip(1),  # of the other summary
        lambda reference: reference + 1.0,  # of another model
        lambda reference: torch.full_like(reference, math.nan),
    ],
    ids=["rows", "sides", "model", "nan"],
)
def test_a_wrong_reference_stops_the_stage_at_its_first_batch(policy_folder, pairs, runs, spoil):
    line = refusal_of(train_with_reference, policy_folder, pairs, spoil)
    assert "dpo" in line or "loss/train" in line
    assert not list(runs.glob("*/*/dpo*"))


def test_a_gap_of_0_counts_as_wrong():
    assert summarize_gaps([1.0, 0.0, -1.0, 2.0])["accuracy"] == 0.5
