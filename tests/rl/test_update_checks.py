"""Checks of every update: nothing healthy is refused, and each known error is, by its own words."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stages import functional, ppo
from stages.driving.start import run_module
from stages.rl import advantages, grouped, metrics
from stages.rl.episodes import Episodes
from stages.rl.update_checks import check_update
from stages.running.files import read_json
from stages.settings.checks import UserError
from stages.settings.ppo import Grpo, Ppo, Rloo
from tests.lib.planted import PLANTED
from tests.lib.processes import launch
from tests.lib.resuming import ARGUMENTS

EOS, PAD = 0, 9
RESPONSES = torch.tensor([[4, 5, EOS, PAD], [6, 7, 8, 6]])
SIZES: dict[str, Any] = {"total_episodes": 64, "batch_size": 64, "num_ppo_epochs": 4}


def episodes(seed=1):
    noise = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs, values = (torch.randn(2, 4, generator=noise) for _ in range(3))
    return Episodes(
        queries=torch.ones(2, 2, dtype=torch.long),
        responses=RESPONSES,
        pad_id=PAD,
        sampled_logprobs=logprobs,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        sampler_gaps=torch.zeros(2),
        scores=torch.tensor([2.0, 3.0]),
    )


def credited(settings=None):
    """The rollout of two episodes."""
    settings = settings or Ppo(total_episodes=64, batch_size=64)
    shaped = advantages.shape_rewards(episodes(), settings, PAD, settings.kl_coef)
    return advantages.compute_advantages(Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], settings)


def learner(settings, update=3, steps=None):
    """A learner whose optimizer has counted the steps of the updates before, or so many."""
    each = settings.num_ppo_epochs * settings.num_minibatches
    counted = update * each if steps is None else steps
    state = {"weight": {"step": torch.tensor(float(counted))}} if counted else {}
    return SimpleNamespace(
        stage="ppo",
        update=update,
        accelerator=Accelerator(cpu=True),
        networks=SimpleNamespace(pad_id=PAD, eos_id=EOS),
        optimizer=SimpleNamespace(state=state),
    )


def check(rollout, settings=None, **kwargs):
    settings = settings or Ppo(**SIZES)
    check_update(learner(settings, **kwargs), rollout, settings)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"gamma": 0.9, "lam": 0.5},
        {"whiten_advantages": False, "lam": 0.0},
        {"whiten_over": "process"},
        {"whiten_rewards": True},
        {"score_at": "eos"},
        {"baseline": "mean"},
        {"baseline": "gated", "gamma": 0.9},
        {"baseline": "gated", "whiten_rewards": True},
        {"kl_estimator": "k2"},
        {"kl_estimator": "k2", "kl_in": "loss", "loss_mean": "microbatches"},
        {"kl_estimator": "k3", "kl_in": "loss", "loss_mean": "sequences"},
    ],
)
def test_what_is_right_is_not_refused(changed):
    settings = Ppo(**SIZES, **changed)
    check(credited(settings=settings), settings)


@pytest.mark.parametrize("deviation", [1.01e-3, 1.3e-3, 1e-2])
def test_whitening_of_small_advantages_is_not_refused(deviation):
    settings = Ppo(**SIZES)
    plain = credited(settings=replace(settings, whiten_advantages=False))
    factor = deviation / plain.advantages[plain.response_mask].std(correction=0)
    scaled = ("logprobs", "ref_logprobs", "values", "scores")
    small = episodes().map(lambda name, x: factor * x if name in scaled else x)
    shaped = advantages.shape_rewards(small, settings, PAD, settings.kl_coef)
    rollout = advantages.compute_advantages(
        Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], settings
    )
    check(rollout, settings)
    with pytest.raises(UserError, match="advantages are not those"):
        check(replace(rollout, advantages=1.01 * rollout.advantages), settings)


@pytest.mark.parametrize("eos_trick", ["replace", "off"])
def test_a_large_score_and_a_long_response_round_alike(eos_trick):
    settings = Ppo(**SIZES, eos_trick=eos_trick)
    noise = torch.Generator().manual_seed(3)
    logprobs, ref_logprobs, values = (30 * torch.randn(64, 53, generator=noise) for _ in range(3))
    responses = torch.randint(1, 8, (64, 53), generator=noise)
    responses[::2, 20], responses[::2, 21:] = 0, PAD
    long = replace(
        episodes(),
        queries=torch.ones(64, 2, dtype=torch.long),
        responses=responses,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=1000 * torch.randn(64, generator=noise),
    )
    shaped = advantages.shape_rewards(long, settings, PAD, settings.kl_coef)
    check(
        advantages.compute_advantages(Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], settings),
        settings,
    )


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_error_ends_a_real_run_and_its_step_is_a_likely_cause(
    attempt, monkeypatch, capsys, name
):
    attempt("ppo")
    PLANTED[name].plant(monkeypatch.setattr)
    with pytest.raises(SystemExit):
        run_module(ppo, ARGUMENTS)
    line = capsys.readouterr().err.splitlines()[-1]
    what, _, causes = line.partition("Likely causes: ")
    assert "ppo" in what + causes
    assert f"step {PLANTED[name].step} " in causes


def test_a_value_after_eos_is_refused_where_the_score_stands_at_eos():
    settings = Ppo(**SIZES, score_at="eos")
    shaped = advantages.shape_rewards(episodes(), settings, PAD, settings.kl_coef)
    further = replace(shaped, value_mask=functional.response_masks(shaped.responses, PAD)[1])
    with pytest.raises(UserError, match="the critic's targets are not the returns"):
        check(
            advantages.compute_advantages(
                Accelerator(cpu=True), further, ALGORITHMS["ppo"], settings
            ),
            settings,
        )


@pytest.mark.parametrize(("share", "used"), [(0.5, 1.0), (-0.5, 0.0)])
def test_a_gate_takes_the_critic_where_it_explains_more_than_a_constant(share, used):
    settings = Ppo(**SIZES, baseline="gated", lam=1.0)  # the returns do not depend on the values
    targets = credited(settings=settings).returns
    values = share * targets + 0.1 * episodes().values
    shaped = advantages.shape_rewards(
        replace(episodes(), values=values), settings, PAD, settings.kl_coef
    )
    by_critic, by_mean, gated = (
        advantages.compute_advantages(
            Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], replace(settings, baseline=baseline)
        )
        for baseline in ("critic", "mean", "gated")
    )
    right, wrong = (by_critic, by_mean) if used else (by_mean, by_critic)
    assert torch.equal(gated.advantages, right.advantages)
    described = metrics.describe_baselines(Accelerator(cpu=True), gated, settings)
    assert described["policy/critic_used"] == used
    with pytest.raises(UserError, match="advantages are not those"):
        check(wrong, settings)


def test_a_reference_that_follows_is_refused_once_the_policy_has_learned():
    rollout = credited()
    same = replace(episodes(), ref_logprobs=episodes().logprobs)
    shaped = advantages.shape_rewards(same, Ppo(**SIZES), PAD, Ppo(**SIZES).kl_coef)
    same = advantages.compute_advantages(
        Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], Ppo(**SIZES)
    )
    check(rollout)
    check(same, update=0)  # nothing has learned yet
    waiting = Ppo(**SIZES | {"total_episodes": 640}, critic_updates=8)
    check(same, waiting, update=7)
    with pytest.raises(UserError, match=r"update 4: KL\(policy, ref_policy\) is 0 at every token"):
        check(same)


def test_rivals_that_cannot_learn_because_no_response_ends_are_told_so():
    chosen = Rloo(**SIZES, samples_per_query=2)
    unended = replace(
        episodes(),
        responses=torch.full((2, 4), 5),
        ref_logprobs=episodes().logprobs,
        scores=torch.full((2,), -1.0),
    )

    def rollout(x):
        shaped = advantages.shape_rewards(x, chosen, PAD, chosen.kl_coef)
        return grouped.credit(shaped, chosen, functional.leave_one_out)

    with pytest.raises(UserError, match=r"no response ends, so .* more sft\.epochs"):
        check(rollout(unended), chosen)
    scored = replace(unended, scores=torch.tensor([-1.0, 1.0]))
    with pytest.raises(UserError, match="ref_policy follows the policy"):
        check(rollout(scored), chosen)


def test_lost_moments_are_refused():
    with pytest.raises(UserError, match="update 4: the optimizer has counted 4 steps, not 12"):
        check(credited(), steps=4)
    with pytest.raises(UserError, match=r"counted 0 steps, not 12\. Likely causes: step 6 or"):
        check(credited(), steps=0)
    early = Ppo(**SIZES, target_kl=0.1)  # an update may end after one pass
    check(credited(), early, steps=3)
    with pytest.raises(UserError, match="counted 2 steps, not 3"):
        check(credited(), early, steps=2)


@pytest.mark.parametrize(
    ("settings", "baseline"),
    [(Rloo, functional.leave_one_out), (Grpo, functional.minus_group_mean)],
)
def test_without_a_critic_advantages_add_up_to_0_and_each_token_has_a_ratio_of_its_own(
    settings, baseline, monkeypatch
):
    chosen = settings(**SIZES, samples_per_query=2)
    rollout = grouped.credit(
        advantages.shape_rewards(episodes(), chosen, PAD, chosen.kl_coef), chosen, baseline
    )
    check(rollout, chosen)
    with pytest.raises(UserError, match="the advantages of a query's samples do not add up to 0"):
        check(replace(rollout, advantages=rollout.advantages + 0.1), chosen)
    PLANTED["one-ratio"].plant(monkeypatch.setattr)
    with pytest.raises(UserError, match="the policy's gradient is not that of a ratio"):
        check(rollout, chosen)


def gate(accelerator, factors):
    """What the critic explains in this process, and whether the gate opens; values lie this
    process's factor times as far from their mean as the returns do.
    """
    settings = Ppo(**SIZES, baseline="gated", lam=1.0)  # the returns do not depend on the values
    shaped = advantages.shape_rewards(
        episodes(seed=accelerator.process_index), settings, PAD, settings.kl_coef
    )
    returns = advantages.compute_advantages(
        accelerator, shaped, ALGORITHMS["ppo"], settings
    ).returns
    assert returns is not None
    values = returns.lerp(returns[shaped.value_mask].mean(), 1 - factors[accelerator.process_index])
    rollout = advantages.compute_advantages(
        accelerator, replace(shaped, values=values), ALGORITHMS["ppo"], settings
    )
    explained = functional.explained_variance(values, returns, shaped.value_mask)
    return explained.item(), advantages.uses_critic(accelerator, rollout, settings)


GATE = """
import json
from stages.driving.start import end_process
from stages.training.accelerator import new_accelerator
from tests.rl.test_update_checks import gate
accelerator = new_accelerator("no")
with open(f"{{accelerator.process_index}}.json", "w") as file:
    json.dump(gate(accelerator, {}), file)
end_process()
"""


@pytest.mark.walk
@pytest.mark.parametrize(("factors", "opens"), [((1.0, -0.2), True), ((1.0, -1.0), False)])
def test_two_processes_whose_own_episodes_disagree_open_the_gate_alike(tmp_path, factors, opens):
    launched = launch(tmp_path, "ddp", GATE.format(factors))
    assert launched.returncode == 0, launched.stderr[-3000:]
    (good, first), (bad, second) = (read_json(tmp_path / f"{rank}.json") for rank in (0, 1))
    assert bad < 0 < good
    assert first is second is opens
