"""Verdicts on comparisons, by numbers computed by hand."""

from math import sqrt

import pytest

from eval.stats.hypothesis_tests import p_of_seeds, within_margin
from reports.results import Interval
from reports.verdicts import Comparison, Word, verdict, verdicts

T2 = 4.302653  # Student's t at 97.5% with 2 degrees of freedom, from a table


def comparison(*by_seed, posts, p_over_posts=0.0001):
    """A comparison with these differences by seed and this interval over posts."""
    estimate = sum(by_seed) / len(by_seed)
    return Comparison(
        over_posts=Interval(estimate=estimate, low=posts[0], high=posts[1]),
        p_over_posts=p_over_posts,
        by_seed=by_seed,
    )


UNCLEAR = comparison(0.05, -0.05, 0.0, posts=(-0.02, 0.02), p_over_posts=0.9)


# -- the four words --------------------------------------------------------------------------------


@pytest.mark.parametrize(("sign", "word"), [(1, Word.BETTER), (-1, Word.WORSE)])
def test_a_difference_that_posts_and_seeds_show_is_better_or_worse(sign, word):
    posts = sorted((sign * 0.08, sign * 0.16))
    result = verdict(comparison(sign * 0.10, sign * 0.12, sign * 0.14, posts=posts))

    assert result.word is word
    # t = 0.12 / (0.02 / sqrt(3)); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2).
    t = 0.12 / (0.02 / sqrt(3))
    assert result.p_value == pytest.approx(1 - t / sqrt(t**2 + 2))


def test_a_difference_within_three_points_for_posts_and_seeds_is_no_difference():
    result = verdict(comparison(0.01, -0.01, 0.0, posts=(-0.015, 0.015), p_over_posts=0.9))
    assert result.word is Word.NO_DIFFERENCE


def test_a_difference_that_neither_shows_nor_excludes_is_inconclusive():
    assert verdict(UNCLEAR).word is Word.INCONCLUSIVE


def test_without_a_win_rate_a_comparison_is_inconclusive():
    result = verdict(Comparison(over_posts=None, p_over_posts=1.0, by_seed=()))
    assert result.word is Word.INCONCLUSIVE
    assert result.interval is None
    assert result.p_value == 1.0


def test_a_small_but_clear_difference_is_better_and_not_no_difference():
    result = verdict(comparison(0.010, 0.012, 0.011, posts=(0.009, 0.013)))
    assert result.word is Word.BETTER


# -- which interval decides ------------------------------------------------------------------------


def test_the_interval_over_seeds_decides_if_it_reaches_further_toward_zero():
    result = verdict(comparison(0.10, 0.12, 0.14, posts=(0.08, 0.16)))

    half = T2 * 0.02 / sqrt(3)
    assert result.interval is not None
    assert result.interval_is_over == "seeds"
    assert result.interval.low == pytest.approx(0.12 - half)
    assert result.interval.high == pytest.approx(0.12 + half)


def test_the_interval_over_posts_decides_if_it_reaches_further_toward_zero():
    result = verdict(comparison(-0.10, -0.12, -0.14, posts=(-0.25, -0.01)))
    assert result.interval_is_over == "posts"
    assert result.interval is not None
    assert result.interval.high == -0.01


def test_seeds_that_agree_on_posts_that_do_not_are_inconclusive():
    result = verdict(comparison(-0.10, -0.12, -0.14, posts=(-0.25, 0.01), p_over_posts=0.06))
    assert result.word is Word.INCONCLUSIVE
    assert result.interval_is_over == "posts"


def test_posts_that_agree_for_seeds_that_do_not_are_inconclusive():
    result = verdict(comparison(0.01, 0.20, 0.09, posts=(0.08, 0.12)))
    assert result.word is Word.INCONCLUSIVE
    assert result.interval_is_over == "seeds"


@pytest.mark.parametrize(("low", "word"), [(0.01, Word.BETTER), (-0.01, Word.INCONCLUSIVE)])
def test_of_a_single_seed_posts_decide(low, word):
    result = verdict(comparison(0.06, posts=(low, 0.12), p_over_posts=0.01))
    assert result.word is word
    assert result.interval_is_over == "posts"


# -- no difference: two one-sided tests ------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "word"), [(0.0357, Word.NO_DIFFERENCE), (0.0358, Word.INCONCLUSIVE)]
)
def test_over_posts_the_90_percent_interval_has_to_lie_within_the_margin(half, word):
    # The normal quantiles 1.644854 and 1.959964: 0.0357 * 0.83923 = 0.02996, 0.0358 gives 0.03004.
    result = verdict(comparison(0.0, posts=(-half, half), p_over_posts=1.0))
    assert result.word is word


def test_over_seeds_the_90_percent_t_interval_has_to_lie_within_the_margin():
    # t(2) at 95% is 2.919986: 2.919986 * 1 / sqrt(3) = 1.6859 points to either side.
    assert within_margin([0.01, -0.01, 0.0], 0.0169)
    assert not within_margin([0.01, -0.01, 0.0], 0.0168)
    assert not within_margin([0.0232, 0.0032, 0.0132], 0.03)  # the upper end is 3.006
    assert within_margin([0.0231, 0.0031, 0.0131], 0.03)  # 2.996
    assert not within_margin([-0.0232, -0.0032, -0.0132], 0.03)


def test_seeds_of_one_difference_leave_the_margin_to_posts():
    result = verdict(comparison(0.0, 0.0, 0.0, posts=(-0.01, 0.01), p_over_posts=1.0))
    assert result.word is Word.NO_DIFFERENCE


def test_no_difference_has_the_90_percent_interval_that_reaches_further_from_0():
    # t(2) at 95% is 2.919986: 1 - 2.919986 / sqrt(3) = -0.686 points, and 2.686 above.
    result = verdict(comparison(0.02, 0.0, 0.01, posts=(0.005, 0.015), p_over_posts=0.001))
    assert result.word is Word.NO_DIFFERENCE
    assert result.interval_of_90 is not None
    assert result.interval_of_90.low == pytest.approx(-0.00686, abs=1e-5)
    assert result.interval_of_90.high == pytest.approx(0.02686, abs=1e-5)


def test_other_verdicts_have_no_90_percent_interval():
    assert verdict(UNCLEAR).interval_of_90 is None


# -- seeds that agree ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_seed", "posts", "agrees"),
    [
        ((0.4, 0.4, 0.1), (0.2, 0.4), True),
        ((-0.4, -0.4, -0.1), (-0.4, -0.2), True),
        ((0.4, 0.4, -0.1), (0.2, 0.4), False),
        ((0.4, 0.4, 0.1), (-0.1, 0.7), False),  # the posts show nothing
        ((0.4,), (0.3, 0.5), False),
    ],
)
def test_seeds_agree_if_all_have_the_sign_that_the_posts_show(by_seed, posts, agrees):
    assert comparison(*by_seed, posts=posts).every_seed_agrees == agrees


# -- correction for many comparisons ---------------------------------------------------------------


def test_p_values_are_corrected_by_holms_steps():
    smallest, largest, middle = verdicts(
        [
            comparison(0.06, posts=(0.01, 0.11), p_over_posts=0.01),
            comparison(0.06, posts=(0.01, 0.11), p_over_posts=0.04),
            comparison(0.06, posts=(0.01, 0.11), p_over_posts=0.03),
        ]
    )
    # The smallest times 3, the next times 2, and never below the one before.
    assert smallest.p_value == pytest.approx(0.03)
    assert smallest.word is Word.BETTER
    assert middle.p_value == pytest.approx(0.06)
    assert middle.word is Word.INCONCLUSIVE
    assert largest.p_value == pytest.approx(0.06)
    assert largest.word is Word.INCONCLUSIVE
    assert smallest.comparisons == middle.comparisons == largest.comparisons == 3


def test_a_difference_is_judged_again_among_all_comparisons():
    # t = 0.10 / (0.01 / sqrt(3)) = 17.32, so p = 1 - sqrt(300 / 302) = 0.0033; times 16: 0.053.
    strong = comparison(0.09, 0.10, 0.11, posts=(0.08, 0.12))

    among_15, *_ = verdicts([strong] + [UNCLEAR] * 14)
    among_16, *_ = verdicts([strong] + [UNCLEAR] * 15)

    assert among_15.word is Word.BETTER
    assert among_16.word is Word.INCONCLUSIVE
    assert among_16.p_value == pytest.approx(16 * (1 - sqrt(300 / 302)))


def test_a_small_difference_that_the_correction_leaves_unclear_is_no_difference():
    small = comparison(0.009, 0.010, 0.011, posts=(0.008, 0.012))
    result, *_ = verdicts([small] + [UNCLEAR] * 15)
    assert result.word is Word.NO_DIFFERENCE


def test_the_p_value_over_seeds_is_that_of_students_t():
    # -5, -10, -15 have t = -10 / (5 / sqrt(3)) = -3.464, and p = 1 - 3.464 / sqrt(14).
    assert p_of_seeds([-0.05, -0.10, -0.15]) == pytest.approx(1 - sqrt(12 / 14))
    assert p_of_seeds([-0.1, -0.1, -0.1]) == p_of_seeds([-0.1]) == 1.0


def test_an_interval_beyond_0_can_be_inconclusive_by_its_corrected_p_value():
    """Over seeds t = 5.77 gives p = 0.029, and the interval leaves out 0; twice that is 0.057."""
    gain = comparison(0.07, 0.10, 0.13, posts=(0.05, 0.15))
    (alone,) = verdicts([gain])
    (corrected, _) = verdicts([gain, gain])

    assert alone.word is Word.BETTER
    assert not alone.is_inconclusive_by_p_value
    assert corrected.word is Word.INCONCLUSIVE
    assert corrected.is_inconclusive_by_p_value


def test_an_interval_that_includes_0_is_not_inconclusive_by_its_p_value():
    assert not verdict(UNCLEAR).is_inconclusive_by_p_value
