"""Gains in score over SFT, seed by seed."""

from types import SimpleNamespace
from typing import Any

import pytest

from reports.entries import Entry
from reports.gains import Gain, Gains, gains_of, gold_over_kl
from reports.results import Interval

ROSE = Interval(estimate=0.4, low=0.2, high=0.6)
FELL = Interval(estimate=-0.3, low=-0.4, high=-0.2)
UNCLEAR = Interval(estimate=0.1, low=-0.1, high=0.3)


def run_with(proxy=None, gold=None, kl=4.0):
    """A run in which PPO has these gains of proxy and gold score."""
    gains: dict[str, Any] = {}
    if proxy is not None:
        gains["proxy"] = vars(proxy)
    if gold is not None:
        gains["gold"] = vars(gold)
    scores = {"gains": {"ppo": gains}}
    return SimpleNamespace(
        seed=1,
        stages={"win_rate": SimpleNamespace(results={"scores": scores})},
        policies={"ppo": SimpleNamespace(kl=kl), "sft": SimpleNamespace(kl=0.0)},
    )


def entry_of(*runs, policy="ppo"):
    return Entry(name="tiny", policy=policy, runs=runs, label=policy.upper())


def test_a_gain_is_the_mean_over_seeds_with_its_t_interval():
    """Of 0.2, 0.4 and 0.3 the mean is 0.3, the deviation 0.1, and t(0.975, 2) is 4.303."""
    gain = Gain(
        by_seed=(
            Interval(estimate=0.2, low=0.1, high=0.6),
            Interval(estimate=0.4, low=0.1, high=0.6),
            Interval(estimate=0.3, low=0.1, high=0.6),
        )
    )
    assert isinstance(gain.mean, Interval)
    assert gain.mean.estimate == pytest.approx(0.3)
    assert gain.mean.low == pytest.approx(0.0516, abs=1e-4)
    assert gain.mean.high == pytest.approx(0.5484, abs=1e-4)


def test_the_gain_of_one_seed_has_its_interval_over_posts():
    assert Gain(by_seed=(ROSE,)).mean == ROSE


def test_seeds_that_rose_and_fell_are_counted():
    gain = Gain(by_seed=(ROSE, ROSE, FELL, UNCLEAR))
    assert gain.rose == 2
    assert gain.fell == 1
    assert gain.lowest == -0.3
    assert gain.highest == 0.4


def test_one_post_shows_neither_a_rise_nor_a_fall():
    gain = Gain(by_seed=(Interval(estimate=1.0, low=1.0, high=1.0),))
    assert gain.rose == 0
    assert gain.fell == 0


def test_over_optimization_is_counted_by_seed():
    gains = Gains(
        label="PPO",
        proxy=Gain(by_seed=(ROSE, ROSE, UNCLEAR)),
        gold=Gain(by_seed=(FELL, ROSE, FELL)),
    )
    assert gains.over_optimized == 1


def test_an_entry_without_gains_in_every_seed_has_none():
    without_gold_in_one_seed = entry_of(run_with(ROSE, FELL), run_with(ROSE))
    without_gains = entry_of(run_with())

    (gains,) = gains_of([without_gold_in_one_seed, without_gains])

    assert gains.proxy == Gain(by_seed=(ROSE, ROSE))
    assert gains.gold is None


def test_gold_scores_over_kl_need_a_kl_and_a_gold_score(no_drawing):
    two_seeds = entry_of(run_with(gold=ROSE), run_with(gold=FELL))
    without_kl = entry_of(run_with(gold=ROSE, kl=None))
    without_gold = entry_of(run_with(gold=ROSE), policy="sft")
    assert gold_over_kl([two_seeds]) is not None
    assert gold_over_kl([without_kl]) is None
    assert gold_over_kl([without_gold]) is None
