"""P-values, compared with other authors' code, with full counts and by hand."""

from itertools import product
from math import comb

import numpy as np
import pytest
from scipy import stats

from eval.stats.hypothesis_tests import (
    fisher_exact,
    holm,
    p_of_interval,
    p_of_seeds,
    sign_flip_p_value,
    within_margin,
)


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.35])
def test_the_sign_flip_test_counts_all_signs(shift):
    random = np.random.default_rng(3)
    differences = np.round(random.normal(shift, 0.5, size=11), 1)
    sums = np.array([abs(np.dot(signs, differences)) for signs in product((1, -1), repeat=11)])
    expected = (sums >= abs(differences.sum()) - 1e-9).mean()

    assert sign_flip_p_value(differences) == pytest.approx(expected)


def test_without_a_difference_sign_flip_p_values_are_uniform():
    random = np.random.default_rng(4)
    p_values = [sign_flip_p_value(random.integers(-20, 21, size=80) / 20) for _ in range(300)]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_a_sign_flip_p_value_is_never_0():
    assert sign_flip_p_value(np.ones(200)) == pytest.approx(2.0**-199)
    # 2^-99, apart from rounding.
    assert 0 < sign_flip_p_value(np.repeat([1.0, 0.5], 50)) < 1e-15


@pytest.mark.parametrize("differences", [np.zeros(5), np.ones(1)])
def test_a_sign_flip_p_value_without_evidence_is_1(differences):
    assert sign_flip_p_value(differences) == 1.0


def test_differences_on_no_common_grid_are_refused():
    differences = np.random.default_rng(4).normal(size=9)
    with pytest.raises(ValueError, match="not multiples of a common fraction"):
        sign_flip_p_value(differences)


def test_the_p_value_of_seeds_is_that_of_a_t_test():
    # Mean 2 and standard error 1 with one degree of freedom: p = 1 - 2 atan(2) / pi.
    assert p_of_seeds([1.0, 3.0]) == pytest.approx(1 - 2 * np.arctan(2.0) / np.pi)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5, 0.5]])
def test_without_spread_over_seeds_the_p_value_is_1(values):
    assert p_of_seeds(values) == 1.0


def test_a_mean_is_within_a_margin_if_its_90_percent_interval_is():
    # Mean 0, standard error 1, and the 95% quantile of t(1) is 6.313752.
    assert within_margin([-1.0, 1.0], margin=6.32)
    assert not within_margin([-1.0, 1.0], margin=6.31)
    assert not within_margin([0.0, 0.0], margin=1.0)


@pytest.mark.parametrize(
    ("estimate", "low", "high"), [(0.6, 0.502, 0.7), (0.4, 0.2, 0.498), (0.6, 0.502, 0.99)]
)
def test_the_p_value_of_an_interval_uses_the_bound_next_to_the_value(estimate, low, high):
    # The bound is 0.098 from the estimate, so the standard error is 0.05: z = 2.
    expected = 2 * stats.norm.sf(0.1 / (0.098 / 1.959964))
    p_value = p_of_interval(estimate=estimate, low=low, high=high, value=0.5)
    assert p_value == pytest.approx(expected)


@pytest.mark.parametrize(("value", "p_value"), [(0.5, 1.0), (0.4, 0.0)])
def test_an_interval_without_width_allows_only_its_estimate(value, p_value):
    assert p_of_interval(estimate=0.5, low=0.5, high=0.5, value=value) == p_value


def test_holm_multiplies_the_smallest_by_all_and_never_falls():
    # 0.01 * 3; then 0.03 * 2; then 0.04 * 1, which is raised to the one before it.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_holm_never_exceeds_1():
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_holm_of_no_tests_is_empty():
    assert holm([]) == []


def test_fisher_counts_the_tables_that_are_no_likelier():
    """3 of 4 against 0 of 4 failed: of comb(8, 3) choices of the failures, 4 + 4 are as extreme."""
    assert fisher_exact((3, 0), (4, 4)) == pytest.approx((4 + 4) / comb(8, 3))
