"""Win rates pooled over the seeds of a size."""

from math import sqrt

import numpy as np
import pytest
from scipy import stats

from reports.pooled_rates import Outcome, outcome_of, pool
from reports.results import Interval


def rate(estimate: float, half: float = 0.03) -> Interval:
    return Interval(estimate=estimate, low=estimate - half, high=estimate + half)


def pooled(rates: list[Interval]) -> Interval:
    """The interval of the rates of some seeds, which must have one."""
    result = pool(rates)
    assert result is not None
    return result.interval


def test_seeds_without_uncertainty_over_posts_have_students_interval():
    values = [0.5389, 0.2224, 0.1973, 0.6179]
    interval = pooled([rate(value, half=0.0) for value in values])
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert interval.low == pytest.approx(low)
    assert interval.high == pytest.approx(high)


def test_seeds_that_agree_keep_the_uncertainty_over_posts():
    interval = pooled([rate(0.6)] * 5)
    assert interval.low == pytest.approx(0.57)
    assert interval.high == pytest.approx(0.63)


def test_both_sources_of_uncertainty_are_added():
    # Seeds 0.60 to 0.66: s^2 / k = (0.002 / 3) / 4 = 1 / 6000. Posts: 0.0392 / 1.96 = 0.02.
    # Degrees of freedom 3 * (1 / 6000 + 0.0004)^2 / (1 / 6000)^2 = 34.68.
    interval = pooled([rate(value, half=0.0392) for value in (0.6, 0.62, 0.64, 0.66)])
    half = stats.t.ppf(0.975, 34.68) * sqrt(1 / 6000 + 0.0004)
    assert interval.high - interval.low == pytest.approx(2 * half, rel=1e-3)


def test_a_pooled_rate_is_cut_at_100_percent():
    interval = pooled([rate(value, half=0.0392) for value in (0.94, 0.96, 0.98, 1.0)])
    half = stats.t.ppf(0.975, 34.68) * sqrt(1 / 6000 + 0.0004)
    assert interval.low == pytest.approx(0.97 - half, rel=1e-3)
    assert interval.high == 1.0


def test_uncertainty_over_posts_never_narrows_the_interval_of_the_seeds():
    interval = pooled([rate(value, half=0.0392) for value in (0.6, 0.64)])
    low, high = stats.t.interval(0.95, 1, 0.62, stats.sem([0.6, 0.64]))
    assert interval.low == pytest.approx(low)
    assert interval.high == pytest.approx(high)


def test_one_seed_has_the_interval_of_its_posts():
    assert pooled([Interval(estimate=0.6, low=0.55, high=0.66)]) == Interval(0.6, 0.55, 0.66)


def test_no_seed_has_no_pooled_rate():
    assert pool([]) is None


def test_the_pooled_interval_covers_the_truth_where_seeds_and_posts_vary():
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(400):
        post = rng.normal(0, 0.02)  # the same posts for all seeds
        values = 0.6 + post + rng.normal(0, 0.03, size=3)
        interval = pooled([rate(float(value), half=0.0392) for value in values])
        covered += interval.low <= 0.6 <= interval.high
    assert 0.93 <= covered / 400 <= 1


@pytest.mark.parametrize(
    ("estimate", "outcome"),
    [
        (0.60, Outcome.BEATS),
        (0.52, Outcome.INCONCLUSIVE),
        (0.40, Outcome.LOSES),
    ],
)
def test_the_whole_interval_has_to_be_on_one_side_of_50_percent(estimate, outcome):
    assert outcome_of(pool([rate(estimate)])) is outcome


def test_without_a_rate_the_outcome_is_inconclusive():
    assert outcome_of(None) is Outcome.INCONCLUSIVE
