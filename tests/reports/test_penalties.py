"""The numbers of each algorithm at each KL penalty, and what a smaller penalty changes."""

import pytest

from reports.penalties import differences_at_equal_penalty, penalty_effects, setting_rows
from reports.results import Interval
from tests.lib.algorithm_points import PPO, RLOO, line


def test_each_setting_has_a_row_with_means_over_seeds():
    row = setting_rows(PPO + RLOO)[2]
    assert row.title == "RLOO"
    assert row.setting == "1.0"
    assert row.seeds == 3
    assert row.seconds == 5.0
    assert isinstance(row.win_rate, Interval)
    assert row.win_rate.estimate == pytest.approx(0.85)
    assert row.gold is None


def test_a_proxy_that_rises_while_the_gold_score_falls_is_over_optimization():
    """From the largest penalty (KL 1) to the smallest (KL 4)."""
    points = []
    for seed, change in enumerate((0.4, 0.5, 0.6)):
        proxies = (1.0, 1.0 + change)
        falling = (2.0, 2.0 - change)
        rising = (2.0, 2.0 + change)
        points += line("ppo", 0.8, 0.8, seed=seed, proxies=proxies, golds=falling)
        points += line("rloo", 0.8, 0.8, seed=seed, proxies=proxies, golds=rising)

    ppo, rloo = penalty_effects(points)

    assert ppo.largest == "1.0"
    assert ppo.smallest == "0.25"
    assert isinstance(ppo.gold, Interval)
    assert ppo.gold.estimate == pytest.approx(-0.5)
    assert ppo.is_over_optimized
    assert not rloo.is_over_optimized


def test_differences_at_equal_penalty_are_paired_by_seed():
    means = differences_at_equal_penalty(PPO + RLOO, "rloo")
    assert list(means) == ["1.0", "0.25"]
    for mean in means.values():
        assert isinstance(mean, Interval)
        assert mean.estimate == pytest.approx(5.0)
        assert mean.low == pytest.approx(2.52, abs=0.01)
        assert mean.high == pytest.approx(7.48, abs=0.01)
