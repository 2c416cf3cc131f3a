"""Checks of an update: nothing right is refused, and each planted error is, by its own words."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from stages import functional, ppo
from stages.config.ppo import PolicyGradient, Ppo
from stages.rl import advantages
from stages.rl.algorithms import ALGORITHMS, Grpo, Rloo
from stages.rl.episodes import Rollout
from stages.rl.update_checks import (
    UpdateCheckError,
    check_statistics,
    check_update,
    is_checked,
)
from stages.runs.files import read_lines
from tests.lib.episodes import EOS, PAD, two_episodes
from tests.lib.learners import rollout_from
from tests.lib.make_stages import run_module
from tests.lib.planted import PLANTED
from tests.lib.processes import launch
from tests.lib.resuming import ARGUMENTS

SIZES: dict[str, Any] = {"total_episodes": 640, "batch_size": 64, "num_ppo_epochs": 4}
THREE_UPDATES = [*ARGUMENTS, "ppo.total_episodes=48"]
THIRD = 2  # an update that is checked, counted from 0; the policy has learned in two before it


def make_learner(settings: PolicyGradient, update: int = THIRD, steps: int | None = None) -> Any:
    """A learner whose optimizer has counted all steps of earlier updates, or only `steps`."""
    if steps is None:
        steps = update * settings.num_ppo_epochs * settings.num_minibatches
    state = {"weight": {"step": torch.tensor(float(steps))}} if steps else {}
    return SimpleNamespace(
        stage=settings.section(),
        update=update,
        accelerator=Accelerator(cpu=True),
        networks=SimpleNamespace(pad_id=PAD, eos_id=EOS),
        optimizer=SimpleNamespace(state=state),
        has_warned=False,
    )


def check(
    rollout: Rollout, settings: PolicyGradient, mode: str = "stop", **learner_changes: Any
) -> None:
    learner = make_learner(settings, **learner_changes)
    check_update(learner, rollout, settings, settings.kl_coef, mode)


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Ppo(**SIZES), [0, 1, 2]),
        (Ppo(**SIZES, critic_updates=2), [0, 1, 2, 3, 4]),
        (Ppo(**SIZES, critic_updates=5), [0, 1, 2, 5, 6, 7]),
        (Ppo(**SIZES, critic_updates=9), [0, 1, 2, 9]),
        (Rloo(**SIZES), [0, 1, 2]),
    ],
    ids=str,
)
def test_three_updates_of_critic_warm_up_and_three_of_the_policy_are_checked(settings, expected):
    updates = range(settings.num_updates)
    assert [update for update in updates if is_checked(update, settings)] == expected


def test_a_wrong_update_that_is_not_among_the_checked_ones_passes():
    settings = Ppo(**SIZES)
    right = rollout_from(two_episodes(), settings, PAD)
    check(replace(right, advantages=2 * right.advantages), settings, update=3)


# -- off, warn, stop -------------------------------------------------------------------------------


def wrong_rollout(settings: Ppo) -> Rollout:
    right = rollout_from(two_episodes(), settings, PAD)
    return replace(right, advantages=1.5 * right.advantages)


def test_off_computes_and_prints_nothing(capsys):
    settings = Ppo(**SIZES)
    check(wrong_rollout(settings), settings, mode="off")
    assert capsys.readouterr().err == ""


def test_warn_prints_one_line_that_names_update_difference_step_and_the_way_out(capsys):
    settings = Ppo(**SIZES)
    check(wrong_rollout(settings), settings, mode="warn")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ppo, update 3: advantages are not those of this update's")
    assert "Likely causes: step 5 (gamma, lam, baseline, whitening)" in line
    assert "checks.updates=off" in line


def test_stop_raises_the_same_line(capsys):
    settings = Ppo(**SIZES)
    with pytest.raises(UpdateCheckError, match="ppo, update 3: advantages are not those"):
        check(wrong_rollout(settings), settings, mode="stop")
    assert capsys.readouterr().err == ""


def test_by_default_a_run_with_another_formula_warns_once_and_finishes(
    attempt, monkeypatch, capsys
):
    folder = attempt("ppo")
    PLANTED["whitened-targets"].plant(monkeypatch.setattr)
    run_module(ppo, THREE_UPDATES)
    printed = capsys.readouterr().err.splitlines()
    (warning,) = [line for line in printed if line.startswith("warning: ")]
    assert warning.startswith("warning: ppo, update 1: the critic's targets are not the returns")
    assert len(read_lines(folder / "metrics.jsonl")) == 3


def test_with_off_the_same_run_says_nothing(attempt, monkeypatch, capsys):
    attempt("ppo")
    PLANTED["whitened-targets"].plant(monkeypatch.setattr)
    run_module(ppo, [*THREE_UPDATES, "checks.updates=off"])
    assert "warning" not in capsys.readouterr().err


# -- what is right ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"gamma": 0.9, "lam": 0.5},
        {"lam_value": 1.0},
        {"lam_value": 1.0, "lam_length_alpha": 0.4},
        {"lam_value": 0.5, "lam_length_alpha": 0.3, "gamma": 0.9, "whiten_advantages": False},
        {"whiten_advantages": False, "lam": 0.0},
        {"whiten_over": "process"},
        {"whiten_rewards": True},
        {"score_at": "eos"},
        {"baseline": "gated", "gamma": 0.9},
        {"baseline": "gated", "whiten_rewards": True},
        {"kl_estimator": "k2", "kl_in": "loss", "loss_mean": "microbatches"},
        {"kl_estimator": "k3", "kl_in": "loss", "loss_mean": "sequences"},
        {"kl_estimator": "k1", "kl_in": "loss", "kl_correction": "token"},
        {"kl_estimator": "k3", "kl_in": "loss", "kl_correction": "token"},
        {"kl_estimator": "k1", "kl_in": "loss", "kl_correction": "sequence"},
        {"entropy_coef": 0.1},
    ],
    ids=str,
)
def test_what_is_right_is_not_refused(changed):
    settings = Ppo(**SIZES, **changed)
    check(rollout_from(two_episodes(), settings, PAD), settings)


def test_a_fixed_lambda_is_refused_where_it_depends_on_the_length():
    adaptive = Ppo(**SIZES, lam_value=1.0, lam_length_alpha=0.4)
    fixed = rollout_from(two_episodes(), adaptive.changed(lam_length_alpha=0.0), PAD)
    with pytest.raises(UpdateCheckError, match="advantages are not those"):
        check(fixed, adaptive)


def test_shaped_scores_are_checked_against_the_references():
    settings = Ppo(**SIZES, score_shaping="preference")
    reference_scores = torch.tensor([2.0 - math.log(3), 9.0])
    # Row 0 ends: odds of 3 to 1. Row 1 does not, so it has the penalty.
    shaped_scores = torch.tensor([0.75, -1.0])
    episodes = two_episodes(reference_scores=reference_scores, shaped_scores=shaped_scores)
    rollout = rollout_from(episodes, settings, PAD)
    check(rollout, settings)

    of_another_query = replace(rollout, reference_scores=torch.tensor([2.0, 9.0]))
    with pytest.raises(UpdateCheckError, match="a shaped score is not the probability"):
        check(of_another_query, settings)
    unshaped = rollout_from(replace(episodes, shaped_scores=None), settings, PAD)
    with pytest.raises(UpdateCheckError, match="its score minus kl_coef times its KL"):
        check(replace(unshaped, shaped_scores=shaped_scores), settings)


def test_a_mean_baseline_without_a_critic_is_not_refused():
    settings = Ppo(**SIZES, baseline="mean")
    check(rollout_from(two_episodes(values=None), settings, PAD), settings)


def test_an_adapted_kl_coefficient_is_not_refused():
    settings = Ppo(**SIZES, kl_target=6.0)
    kl_coef = 2 * settings.kl_coef
    shaped = advantages.assign_rewards(two_episodes(), settings, PAD, kl_coef)
    rollout = advantages.compute_advantages(
        Accelerator(cpu=True), shaped, ALGORITHMS["ppo"], settings
    )
    check_update(make_learner(settings), rollout, settings, kl_coef, "stop")
    with pytest.raises(UpdateCheckError, match="its score minus kl_coef times its KL"):
        check_update(make_learner(settings), rollout, settings, settings.kl_coef, "stop")


@pytest.mark.parametrize("deviation", [1.01e-3, 1.3e-3, 1e-2])
def test_whitening_of_small_advantages_is_not_refused(deviation):
    settings = Ppo(**SIZES)
    plain = rollout_from(two_episodes(), settings.changed(whiten_advantages=False), PAD)
    factor = deviation / plain.advantages[plain.response_mask].std(correction=0)
    scaled = ("logprobs", "ref_logprobs", "values", "scores")
    small = {name: factor * getattr(plain, name) for name in scaled}
    rollout = rollout_from(two_episodes(**small), settings, PAD)
    check(rollout, settings)
    with pytest.raises(UpdateCheckError, match="advantages are not those"):
        check(replace(rollout, advantages=1.01 * rollout.advantages), settings)


@pytest.mark.parametrize("eos_trick", ["replace", "off"])
def test_a_large_score_and_a_long_response_are_not_refused_for_their_rounding(eos_trick):
    settings = Ppo(**SIZES, eos_trick=eos_trick)
    generator = torch.Generator().manual_seed(3)
    logprobs, ref_logprobs, values = (
        30 * torch.randn(64, 53, generator=generator) for _ in range(3)
    )
    responses = torch.randint(1, 8, (64, 53), generator=generator)
    responses[::2, 20] = EOS
    responses[::2, 21:] = PAD
    episodes = two_episodes(
        queries=torch.ones(64, 2, dtype=torch.long),
        responses=responses,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=1000 * torch.randn(64, generator=generator),
    )
    check(rollout_from(episodes, settings, PAD), settings)


@pytest.mark.parametrize("algorithm", [Rloo, Grpo])
def test_advantages_within_a_query_are_not_refused(algorithm):
    settings = algorithm(**SIZES, samples_per_query=2)
    episodes = two_episodes(samples_per_query=2)
    check(rollout_from(episodes, settings, PAD, settings.section()), settings)


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_error_stops_a_run_and_its_step_is_a_likely_cause(
    attempt, monkeypatch, capsys, name
):
    attempt("ppo")
    planted = PLANTED[name]
    planted.plant(monkeypatch.setattr)
    with pytest.raises(SystemExit):
        run_module(ppo, [*ARGUMENTS, "checks.updates=stop", *planted.settings], planted.stage)
    line = capsys.readouterr().err.splitlines()[-1]
    _, _, causes = line.partition("Likely causes: ")
    assert planted.stage in line
    assert f"step {planted.step} " in causes


def test_a_value_after_eos_is_refused_where_the_score_is_added_at_eos():
    settings = Ppo(**SIZES, score_at="eos")
    shaped = advantages.assign_rewards(two_episodes(), settings, PAD, settings.kl_coef)
    _, value_mask = functional.response_masks(shaped.responses, PAD)
    further = replace(shaped, value_mask=value_mask)
    rollout = advantages.compute_advantages(
        Accelerator(cpu=True), further, ALGORITHMS["ppo"], settings
    )
    with pytest.raises(UpdateCheckError, match="the critic's targets are not the returns"):
        check(rollout, settings)


def test_rewards_whitened_to_mean_0_are_refused():
    settings = Ppo(**SIZES, whiten_rewards=True)
    rollout = rollout_from(two_episodes(), settings, PAD)
    mean = functional.masked_mean(rollout.rewards, rollout.value_mask)
    shifted = torch.where(rollout.value_mask, rollout.rewards - mean, 0.0)
    with pytest.raises(UpdateCheckError, match="whitening the rewards has changed their mean"):
        check(replace(rollout, rewards=shifted), settings)


def test_a_reference_that_follows_is_refused_once_the_policy_has_learned():
    settings = Ppo(**SIZES)
    episodes = two_episodes()
    follows = rollout_from(replace(episodes, ref_logprobs=episodes.logprobs), settings, PAD)
    check(follows, settings, update=0)
    with pytest.raises(
        UpdateCheckError, match=r"ppo, update 3: KL\(policy, ref_policy\) is 0 at every token"
    ):
        check(follows, settings, update=2)


def test_a_reference_is_the_policy_throughout_critic_warm_up():
    settings = Ppo(**SIZES, critic_updates=5)
    episodes = two_episodes()
    same = rollout_from(replace(episodes, ref_logprobs=episodes.logprobs), settings, PAD)
    check(same, settings, update=2)
    check(same, settings, update=6)
    with pytest.raises(UpdateCheckError, match="update 8: KL"):
        check(same, settings, update=7)


def test_an_algorithm_without_a_critic_is_told_that_no_response_ends():
    settings = Rloo(**SIZES, samples_per_query=2)
    episodes = two_episodes(samples_per_query=2)
    unended = replace(
        episodes,
        responses=torch.full((2, 4), 5),
        ref_logprobs=episodes.logprobs,
        scores=torch.full((2,), -1.0),
    )
    with pytest.raises(UpdateCheckError, match=r"no response ends, so .* more sft\.epochs"):
        check(rollout_from(unended, settings, PAD, "rloo"), settings)
    scored = replace(unended, scores=torch.tensor([-1.0, 1.0]))
    with pytest.raises(UpdateCheckError, match="ref_policy follows the policy"):
        check(rollout_from(scored, settings, PAD, "rloo"), settings)


def test_lost_moments_are_refused():
    settings = Ppo(**SIZES)
    rollout = rollout_from(two_episodes(), settings, PAD)
    with pytest.raises(UpdateCheckError, match="the optimizer has counted 4 steps, not 8"):
        check(rollout, settings, steps=4)
    with pytest.raises(
        UpdateCheckError, match=r"counted 0 steps, not 8\. .* step 6 \(optimizer steps\), or"
    ):
        check(rollout, settings, steps=0)


def test_with_target_kl_an_update_may_have_ended_after_one_pass():
    settings = Ppo(**SIZES, target_kl=0.1)
    rollout = rollout_from(two_episodes(), settings, PAD)
    check(rollout, settings, steps=2)
    with pytest.raises(UpdateCheckError, match="counted 1 steps, not 2"):
        check(rollout, settings, steps=1)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([[1.0], [0.5]]),  # of another query
        torch.tensor([[1.0], [1.0]]),
    ],
)
@pytest.mark.parametrize("algorithm", [Rloo, Grpo])
def test_advantages_that_do_not_follow_the_rewards_of_a_query_are_refused(algorithm, wrong):
    settings = algorithm(**SIZES, samples_per_query=2)
    episodes = two_episodes(samples_per_query=2)
    rollout = rollout_from(episodes, settings, PAD, settings.section())
    with pytest.raises(UpdateCheckError, match="do not follow their rewards"):
        check(replace(rollout, advantages=wrong.expand(2, 4)), settings)


@pytest.mark.parametrize("algorithm", [Ppo, Rloo])
def test_one_ratio_for_a_whole_response_is_refused(algorithm, monkeypatch):
    settings = algorithm(**SIZES, samples_per_query=2)
    episodes = two_episodes(samples_per_query=2)
    rollout = rollout_from(episodes, settings, PAD, settings.section())
    PLANTED["one-ratio"].plant(monkeypatch.setattr)
    with pytest.raises(UpdateCheckError, match="the policy's gradient is not that of a ratio"):
        check(rollout, settings)


# -- after the optimizer steps ---------------------------------------------------------------------


def check_after(settings: PolicyGradient, approxkl: float, epochs: float = 4.0) -> None:
    statistics = {"policy/approxkl_avg": approxkl, "policy/epochs": epochs}
    check_statistics(make_learner(settings), statistics, settings, "stop")


def test_a_ratio_of_exactly_1_after_several_steps_is_refused():
    check_after(Ppo(**SIZES), approxkl=1e-9)
    with pytest.raises(UpdateCheckError, match=r"update 3: the ratio is exactly 1 .*step 6 \(old"):
        check_after(Ppo(**SIZES), approxkl=0.0)
    with pytest.raises(UpdateCheckError, match="the ratio is exactly 1"):
        check_after(Ppo(**SIZES, num_minibatches=2), approxkl=0.0, epochs=1.0)


def test_a_ratio_of_exactly_1_in_a_single_step_is_right():
    check_after(Rloo(**SIZES), approxkl=0.0, epochs=1.0)


def test_statistics_without_a_policy_are_those_of_critic_warm_up():
    settings = Ppo(**SIZES, critic_updates=5)
    check_statistics(make_learner(settings), {"policy/epochs": 4.0}, settings, "stop")


ONE_PROCESS_IS_WRONG = """
from dataclasses import replace
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from stages.config.ppo import Ppo
from stages.rl.update_checks import check_update
from tests.lib.episodes import EOS, PAD, two_episodes
from tests.lib.learners import rollout_from

accelerator = Accelerator(cpu=True)
ppo = Ppo(total_episodes=640, batch_size=64)
rollout = rollout_from(two_episodes(), ppo, PAD)
if accelerator.process_index == 1:
    rollout = replace(rollout, scores=rollout.scores + 1)
learner = SimpleNamespace(
    stage="ppo",
    update=0,
    accelerator=accelerator,
    networks=SimpleNamespace(pad_id=PAD, eos_id=EOS),
    optimizer=SimpleNamespace(state={}),
    has_warned=False,
)
check_update(learner, rollout, ppo, ppo.kl_coef, "warn")
assert learner.has_warned
total = accelerator.reduce(torch.tensor(1.0))  # no process waits in another collective
assert total.item() == 2
"""


@pytest.mark.walk
def test_a_failure_in_one_of_two_processes_is_printed_and_both_continue(tmp_path):
    launched = launch(tmp_path, "ddp", ONE_PROCESS_IS_WRONG)
    assert launched.returncode == 0, launched.stderr[-3000:]
    (warning,) = [line for line in launched.stderr.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: ppo, update 1: the rewards of an episode are not its score")
