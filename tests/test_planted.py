"""Each planted error changes what its function returns."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from stages import functional
from stages.learning import passes
from stages.posts.ragged import TokenizedSplit, make_ragged
from stages.rl import credit
from stages.rl.episodes import Episodes
from stages.settings.ppo import Ppo
from tests import planted
from tests.conftest import close
from tests.planted import PLANTED

EOS, PAD = 0, 9
RESPONSES = torch.tensor([[4, 5, EOS, PAD], [6, 7, 8, 6]])
MASK = RESPONSES != PAD
KL = torch.tensor([[0.1, 0.2, 0.3, 0.0], [0.4, 0.5, 0.6, 0.7]])
SCORES = torch.tensor([2.0, 3.0])


def wrong(name, right, *args, **kwargs):
    """What the wrong function returns that gets the right one."""
    return PLANTED[name].wrong(right, *args, **kwargs)


def episodes(seed=1):
    noise = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs, values = (torch.randn(2, 4, generator=noise) for _ in range(3))
    return Episodes(
        queries=torch.ones(2, 2, dtype=torch.long),
        responses=RESPONSES,
        sampled_logprobs=logprobs,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        sampler_gaps=torch.zeros(2),
        scores=SCORES,
    )


def credited(change=lambda right, *args: right(*args), settings=None, seed=1):
    """The rollout of two episodes: the right one, or what a wrong function makes of it."""
    settings = settings or Ppo(total_episodes=64, batch_size=64)
    shaped = credit.shape(episodes(seed), settings, PAD, 0.05, settings.score_at)
    return change(credit.credit, Accelerator(cpu=True), shaped, settings)


def test_every_error_names_a_function_that_is_there():
    assert len(PLANTED) == len({error.wrong for error in PLANTED.values()}) == 20
    for name, error in PLANTED.items():
        assert callable(getattr(error.module, error.name)), name


def test_swapped_pairs():
    assert wrong("swapped-pairs", lambda: ("chosen", "rejected")) == ("rejected", "chosen")


def test_sft_without_eos_shortens_the_summaries_that_are_learned_and_no_others():
    columns = {"queries": make_ragged([[1, 2], [3]]), "summaries": make_ragged([[4, EOS], [5]])}
    split = TokenizedSplit(columns=columns, rows=[{}, {}])
    made = wrong("sft-without-eos", lambda *_: split, "folder", "sft_train").columns
    assert [made["summaries"][row].tolist() for row in range(2)] == [[4], []]
    assert made["queries"] is columns["queries"]
    assert wrong("sft-without-eos", lambda *_: split, "folder", "sft_validation") is split


def test_a_score_at_padding_is_another_one_where_there_is_padding(reward_model, tokenizer):
    pad_id = tokenizer.pad_token_id
    queries = torch.tensor([[5, 6], [7, 8]])
    responses = torch.where(RESPONSES == PAD, pad_id, RESPONSES)
    args = (reward_model, queries, responses, pad_id)
    with torch.no_grad():
        right = passes.score_responses(*args)
        made = wrong("score-at-padding", passes.score_responses, *args)
    assert abs(made[0] - right[0]) > 1e-3
    close(made[1], right[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl-rewarded", [[0.01, 0.02, 0.03, 2.0], [0.04, 0.05, 0.06, 3.07]]),
        ("kl-left-out", [[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 3.0]]),
        ("score-at-every-token", [[1.99, 1.98, 1.97, 2.0], [2.96, 2.95, 2.94, 5.93]]),
    ],
)
def test_rewards_are_shaped_wrongly(name, expected):
    args = KL, SCORES, MASK, 0.1
    close(
        functional.shape_rewards(*args), [[-0.01, -0.02, -0.03, 2.0], [-0.04, -0.05, -0.06, 2.93]]
    )
    close(wrong(name, functional.shape_rewards, *args), expected)


def test_other_temperature_changes_the_old_log_probabilities_alone():
    def measure(learner, sampled, settings):
        return replace(episodes(), logprobs=torch.full((2, 4), -settings.temperature))

    settings = SimpleNamespace(temperature=0.7)
    hot = Ppo(temperature=0.7)
    made = wrong("other-temperature", measure, None, None, hot)
    close(measure(None, None, settings).logprobs, torch.full((2, 4), -0.7))
    close(made.logprobs, torch.full((2, 4), -1.0))
    close(made.ref_logprobs, episodes().ref_logprobs)


def test_a_reference_that_follows_has_no_kl():
    made = wrong("reference-follows", lambda *_: episodes())
    assert not torch.equal(episodes().ref_logprobs, episodes().logprobs)
    assert made.ref_logprobs is made.logprobs


def test_a_mask_that_is_one_short_leaves_eos_out():
    right, values = functional.response_masks(RESPONSES, PAD)
    made, made_values = wrong("mask-one-short", functional.response_masks, RESPONSES, PAD)
    assert right.tolist() == [[True, True, True, False], [True] * 4]
    assert made[0].tolist() == [True, True, False, False]
    assert torch.equal(values, made_values)


def test_whitening_counts_padding_too():
    x, process = torch.arange(8.0).reshape(2, 4).square(), Accelerator(cpu=True)
    made = wrong("padding-whitened", credit.whiten, process, x, MASK, Ppo(), shift_mean=True)
    right = credit.whiten(process, x, MASK, Ppo(), shift_mean=True)
    close(made.mean(), 0.0)
    close(right[MASK].mean(), 0.0)
    assert (made - right)[MASK].abs().min() > 1e-3


def test_stale_advantages_are_those_of_the_batch_before():
    change = planted.of_the_batch_before()
    first, second = credited(change, seed=1), credited(change, seed=2)
    close(first.advantages, credited(seed=1).advantages)  # there is none before
    close(second.advantages, first.advantages)
    close(second.returns, first.returns)
    assert not torch.equal(credited(seed=2).advantages, first.advantages)
    close(second.values, credited(seed=2).values)


def test_whitened_targets_are_not_the_returns():
    right, made = credited(), credited(PLANTED["whitened-targets"].wrong)
    close(made.advantages, right.advantages)
    close(made.returns, right.advantages + right.values)
    assert (made.returns - right.returns)[right.value_mask].abs().max() > 0.1


def test_gae_goes_on_across_eos_with_the_values_of_padding():
    settings = Ppo(total_episodes=64, batch_size=64, whiten_advantages=False)
    longer = torch.cat([RESPONSES[:, :3], torch.full((2, 1), PAD)], dim=1)
    short = replace(episodes(), responses=torch.where(longer == 8, EOS, longer))
    # After EOS and the column of the score there must be one more of padding.
    wide = short.map(lambda name, x: torch.cat([x, x[:, -1:]], dim=1) if x.shape[1:] == (4,) else x)
    shaped = credit.shape(wide, settings, PAD, kl_coef=0.05)
    args = Accelerator(cpu=True), shaped, settings
    right, made = credit.credit(*args), wrong("gae-across-eos", credit.credit, *args)
    assert torch.equal(made.value_mask, right.value_mask)
    assert (made.advantages - right.advantages)[:, :3].abs().min() > 1e-4


def test_dropout_in_the_policy():
    networks = SimpleNamespace(policy=nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    made = wrong("dropout-in-policy", lambda: networks)
    assert made.policy[1].p == 0.1


def test_the_optimizer_forgets():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    learner = SimpleNamespace(optimizer=optimizer)
    assert wrong("optimizer-reset", lambda learner: len(learner.optimizer.state), learner) == 0
