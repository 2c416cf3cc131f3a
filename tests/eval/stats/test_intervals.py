"""Intervals over posts and over seeds, compared with other authors' code and by hand."""

from math import sqrt

import numpy as np
import pytest
from scipy import stats

from eval.stats.intervals import (
    clustered_share,
    mean_of_seeds,
    mean_over_posts,
    mean_with_t_interval,
    post_numbers,
    seeds_needed,
    wilson,
)
from stages.config.errors import UserError

Z = 1.959964


def numbered(count):
    """Each value is about a post of its own."""
    return np.arange(count)


# -- shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("successes", "n"), [(0, 9), (9, 9), (3, 7), (1, 6447), (640, 1000)])
def test_wilson_agrees_with_scipy(successes, n):
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high))


def test_a_share_without_ties_has_wilsons_interval():
    share = clustered_share(np.repeat([1.0, 0.0], [30, 20]), numbered(50))

    assert share is not None
    assert (share.estimate, share.posts) == (0.6, 50)
    assert (share.low, share.high) == pytest.approx(wilson(30, 50))


def test_a_share_without_values_is_none():
    assert clustered_share(np.array([]), numbered(0)) is None


def test_equal_judgements_of_a_post_count_once():
    share = clustered_share(np.repeat([1.0, 0.0], [60, 40]), np.repeat(numbered(50), 2))

    # The linearized variance divides by posts - 1, so 50 posts count as 49.
    assert share is not None
    assert (share.low, share.high) == pytest.approx(wilson(0.6 * 49, 49))


def test_ties_narrow_the_interval_of_a_share():
    """85% of 400 posts tie: 1.9 points on each side, where Wilson's interval has 4.9."""
    values = np.repeat([1.0, 0.5, 0.0], [30, 340, 30])

    share = clustered_share(values, numbered(400))

    assert share is not None
    assert share.high - 0.5 == pytest.approx(Z * sqrt(0.15 * 0.25 / 400), rel=0.03)
    assert wilson(200, 400)[1] - 0.5 == pytest.approx(0.049, abs=5e-4)


# -- bounded means ---------------------------------------------------------------------------------


def test_the_bootstrap_is_as_wide_as_the_spread_over_posts():
    # 1, 1/2 and 0 in 500, 200 and 300 posts: the mean is 0.6, the variance 0.55 - 0.36 = 0.19.
    values = np.repeat([1.0, 0.5, 0.0], [500, 200, 300])

    mean = mean_over_posts(values, limits=(0.0, 1.0))

    half_width = Z * sqrt(0.19 / 1000)
    assert mean.estimate == pytest.approx(0.6)
    assert (mean.low, mean.high) == pytest.approx((0.6 - half_width, 0.6 + half_width), abs=0.002)


def test_fewer_than_50_posts_get_wilsons_interval():
    values = np.repeat([1.0, 0.0], [30, 19])
    mean = mean_over_posts(values, limits=(0.0, 1.0))
    assert (mean.low, mean.high) == pytest.approx(wilson(30, 49))


def test_50_posts_get_a_bootstrap():
    values = np.repeat([1.0, 0.0], [30, 20])
    mean = mean_over_posts(values, limits=(0.0, 1.0))
    assert mean.low != pytest.approx(wilson(30, 50)[0])


def test_nothing_but_ties_is_not_certain():
    mean = mean_over_posts(np.full(300, 0.5), limits=(0.0, 1.0))

    # One win and one loss are added: 302 posts, of which two lie 1/2 from the mean.
    half_width = Z * sqrt(2 * 0.25 / 301 / 302)
    assert (mean.low, mean.high) == pytest.approx((0.5 - half_width, 0.5 + half_width))


def test_a_dozen_posts_with_ties_get_the_interval_of_paired_proportions():
    """Bonett and Price 2012: 7 of 14 against 3 of 14, with n - 1 for n in the variance."""
    values = np.repeat([1.0, 0.5, 0.0], [6, 4, 2])

    mean = mean_over_posts(values, limits=(0.0, 1.0))

    half_width = Z * sqrt((10 / 14 - (4 / 14) ** 2) / 13) / 2
    center = 0.5 + 4 / 14 / 2
    assert (mean.low, mean.high) == pytest.approx((center - half_width, center + half_width))


@pytest.mark.parametrize("posts", [8, 12, 20, 100])
@pytest.mark.parametrize("shares", [(0.3, 0.4, 0.3), (0.2, 0.2, 0.6), (0.02, 0.96, 0.02)])
def test_the_interval_of_few_posts_with_ties_contains_the_truth(posts, shares):
    random = np.random.default_rng(0)
    losses, ties, wins = shares
    truth = wins + ties / 2

    contained = 0
    for _ in range(300):
        values = random.choice([0.0, 0.5, 1.0], posts, p=[losses, ties, wins])
        mean = mean_over_posts(values, limits=(0.0, 1.0))
        contained += mean.low <= truth <= mean.high

    assert contained / 300 >= 0.92  # a plain bootstrap of 8 posts reached 0.82


def test_a_mean_with_several_values_per_post_is_over_values():
    values = np.array([1.0, 1.0, 1.0, -1.0])
    mean = mean_over_posts(values, limits=(-1.0, 1.0), posts=np.array([0, 0, 0, 1]))
    assert (mean.estimate, mean.posts) == (0.5, 2)


def test_a_mean_without_values_is_refused():
    with pytest.raises(UserError, match="no post has a verdict"):
        mean_over_posts(np.array([]), limits=(0.0, 1.0))


# -- t intervals -----------------------------------------------------------------------------------


def test_a_mean_over_seeds_has_a_t_interval():
    values = [0.61, 0.66, 0.58, 0.63]

    # Mean 0.62, standard error sqrt(0.0034 / 3 / 4), and the quantile of t(3) is 3.182446.
    half_width = 3.182446 * sqrt(0.0034 / 3 / 4)
    assert mean_of_seeds(values) == pytest.approx((0.62 - half_width, 0.62 + half_width))


def test_a_90_percent_interval_has_its_own_quantile():
    # Two values at a distance of 2: the standard error is 1, and the quantile of t(1) is 6.313752.
    bounds = mean_of_seeds([-1.0, 1.0], confidence=0.9)
    assert bounds == pytest.approx((-6.313752, 6.313752))


@pytest.mark.parametrize("values", [[0.6], [0.1 + 0.2, 0.3, 0.3]])
def test_without_spread_over_seeds_there_is_no_interval(values):
    assert mean_of_seeds(values) is None


def test_the_seeds_needed_are_the_fewest_that_are_narrow_enough():
    # s = 1: the quantile of t(17) is 2.110, and 2.110 / sqrt(18) = 0.497; of 17 seeds it is 0.514.
    assert seeds_needed([-1.0, 0.0, 1.0], half_width=0.5) == 18


def test_a_mean_with_one_value_per_post_has_a_t_interval():
    # Values 2 and 4: mean 3, standard error 1, quantile of t(1) 12.706205.
    mean = mean_with_t_interval(np.array([2.0, 4.0]), numbered(2))
    assert (mean.estimate, mean.posts) == (3.0, 2)
    assert (mean.low, mean.high) == pytest.approx((3 - 12.706205, 3 + 12.706205))


def test_a_t_interval_counts_posts_and_not_values():
    once = mean_with_t_interval(np.array([2.0, 4.0]), numbered(2))
    twice = mean_with_t_interval(np.array([2.0, 4.0, 2.0, 4.0]), np.array([0, 1, 0, 1]))
    assert twice.posts == 2
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high))


def test_a_t_interval_of_one_post_has_no_width():
    mean = mean_with_t_interval(np.array([2.0, 4.0]), np.array([0, 0]))
    assert (mean.low, mean.estimate, mean.high) == (3.0, 3.0, 3.0)


def test_posts_are_numbered_in_the_order_in_which_they_appear():
    assert post_numbers(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]
