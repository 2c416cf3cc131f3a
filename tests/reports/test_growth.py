"""The change of a number with the size of the model."""

import numpy as np
import pytest
from scipy import stats

from reports.growth import fit, growth
from reports.results import find_all
from reports.sizes import runs_by_label
from stages.config.command_line import make_config
from tests.lib.fabricated_runs import fabricate
from tests.lib.fabricated_sizes import two_sizes


def test_three_sizes_carry_no_line():
    assert fit([1e5, 1e6, 1e7], [0.1, 0.2, 0.3]) is None


def test_two_runs_of_one_size_count_as_one_size_for_the_line():
    assert fit([1e5, 1e5, 1e6, 1e7], [0.1, 0.1, 0.2, 0.3]) is None


def test_equal_means_have_no_line():
    assert fit([1e5, 1e6, 1e7, 1e8], [0.3, 0.3, 0.3, 0.3]) is None


def test_a_fit_is_the_line_and_interval_of_another_library():
    parameters = [1e5, 2e5, 1e6, 3e6, 5e6]
    means = [0.30, 0.33, 0.48, 0.50, 0.61]
    line = stats.linregress(np.log10(parameters), means)
    half_width = stats.t.ppf(0.975, 3) * line.stderr

    fitted = fit(parameters, means)

    assert fitted is not None
    slope, r_squared = fitted
    assert slope.estimate == pytest.approx(line.slope)
    assert slope.low == pytest.approx(line.slope - half_width)
    assert slope.high == pytest.approx(line.slope + half_width)
    assert r_squared == pytest.approx(line.rvalue**2)


def test_a_rise_beyond_both_ranges_is_a_rise(runs):
    """PPO wins 30 and 40% in the seeds of the first size and 60 and 64% in those of the second,
    each with 3 points to each side.
    """
    ppo, *_ = growth(runs_by_label(two_sizes()))

    assert ppo.smallest is not None
    assert ppo.smallest.estimate == pytest.approx(0.35)
    assert ppo.smallest.low == pytest.approx(0.27)
    assert ppo.smallest.high == pytest.approx(0.43)
    assert ppo.largest is not None
    assert ppo.largest.estimate == pytest.approx(0.62)
    assert ppo.largest.low == pytest.approx(0.57)
    assert ppo.largest.high == pytest.approx(0.67)
    assert ppo.steps == 1
    assert ppo.rising_steps == 1
    assert ppo.are_apart
    assert ppo.is_higher


def test_equal_rates_do_not_rise(runs):
    _, sft, *_ = growth(runs_by_label(two_sizes()))
    assert sft.rising_steps == 0
    assert sft.are_apart is False
    assert sft.per_tenfold is None


def test_a_size_with_an_unjudged_seed_has_no_range(runs):
    fabricate(make_config("tiny", seed=3), ppo=0.62, unjudged=0.05, size=10**6)
    ppo, *_ = growth(runs_by_label(two_sizes()))
    assert ppo.largest is None
    assert ppo.are_apart is None


def test_growth_of_one_size_has_no_rows(runs):
    fabricate(make_config("tiny"))
    assert growth(runs_by_label(find_all(["tiny"])[0])) == []
