"""A limitation is listed only if a run's numbers call for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from reports import limits
from reports.results import Interval


def run_judged_by(judge, checkpoint, policies=("sft",), released="", is_llm=True) -> Any:
    training = None
    if checkpoint:
        training = SimpleNamespace(checkpoint=checkpoint)
    settings = {}
    if released:
        settings["released"] = {"policy": released}
    return SimpleNamespace(
        judge=SimpleNamespace(name=judge, is_llm=is_llm),
        training=training,
        policies=dict.fromkeys(policies),
        settings=settings,
    )


@pytest.mark.parametrize(
    ("run", "maker"),
    [
        (run_judged_by("Qwen3-32B", "Qwen/Qwen3-0.6B"), "Qwen"),
        (run_judged_by("gemini-x", "", policies=("gemma-2b",)), "Google"),
        (run_judged_by("Qwen3-32B", "", released="org/qwen2-sft"), "Qwen"),
        (run_judged_by("gpt-6-luna", "Qwen/Qwen3-0.6B"), ""),
        (run_judged_by("Qwen3-32B", "random"), ""),
        (run_judged_by("my-own", "Qwen/Qwen3-0.6B"), ""),
        (run_judged_by("Qwen3-32B", "Qwen/Qwen3-0.6B", is_llm=False), ""),
    ],
)
def test_an_llm_judge_by_the_maker_of_a_policys_model_is_named(run, maker):
    assert limits.judge_family(run) == maker


def policy_with(win_rate, at_length) -> Any:
    return SimpleNamespace(win_rate=win_rate, at_equal_length=SimpleNamespace(rate=at_length))


BEATS = Interval(estimate=0.6, low=0.55, high=0.65)
EVEN = Interval(estimate=0.52, low=0.49, high=0.55)


@pytest.mark.parametrize(
    ("win_rate", "at_length", "is_length"),
    [(BEATS, EVEN, True), (BEATS, BEATS, False), (EVEN, EVEN, False), (None, None, False)],
    ids=["gone at equal length", "stays", "no lead", "no rates"],
)
def test_a_lead_is_length_if_it_is_gone_at_equal_length(win_rate, at_length, is_length):
    assert limits.lead_is_length(policy_with(win_rate, at_length)) == is_length


def run_with_critic(name, below_zero, used) -> Any:
    """A run of four updates, with the number of those whose critic was poor or used."""
    critic = SimpleNamespace(below_zero=below_zero, updates=4, used=used)
    return SimpleNamespace(name=name, critic=critic)


def test_poor_critics_are_counted_over_the_seeds_of_a_run():
    runs = [
        run_with_critic("gated", below_zero=2, used=1),
        run_with_critic("gated", below_zero=4, used=0),  # another seed
        run_with_critic("good", below_zero=0, used=4),
    ]
    (row,) = limits.poor_critics(runs)
    assert row.name == "gated"
    assert row.below_zero == 6
    assert row.updates == 8
    assert row.used == 1


def run_with_kl_target(name, **ppo) -> Any:
    settings = {"kl_target": 2, "kl_horizon": 128, "total_episodes": 3584, **ppo}
    return SimpleNamespace(name=name, settings={"ppo": settings})


def test_a_horizon_of_half_of_the_run_or_more_is_long():
    runs = [
        run_with_kl_target("short"),
        run_with_kl_target("half", kl_horizon=1792),
        run_with_kl_target("half", kl_horizon=1792),  # another seed
        run_with_kl_target("fixed", kl_horizon=10_000, kl_target=0),
    ]
    assert [run.name for run in limits.slow_kl_coefs(runs)] == ["half"]


def test_a_run_without_ppo_has_no_horizon():
    run: Any = SimpleNamespace(name="dpo", settings={})
    assert limits.slow_kl_coefs([run]) == []
