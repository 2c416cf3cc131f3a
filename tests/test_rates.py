"""The formulas of verdicts, against other authors' code, hand calculations and simulation."""

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from eval.stats.correction import corrected_rate, errors_by_family, family_of, shift_of
from eval.stats.formulas import (
    Interval,
    clustered_share,
    holm,
    mean_of_seeds,
    needed_to_show,
    sign_flip_p_value,
    two_sided,
    wilson,
)
from eval.stats.simple_judges import kappa_interval
from eval.stats.table import leaning


def known(found: Interval | None) -> Interval:
    assert found is not None
    return found


def every(n):
    return np.arange(n)


@pytest.mark.parametrize(("successes", "n"), [(0, 9), (9, 9), (3, 7), (1, 6447), (640, 1000)])
def test_wilson_is_scipys_wilson(successes, n):
    found = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx((found.low, found.high))


def test_judgements_that_repeat_themselves_count_once():
    once = known(clustered_share(np.repeat([1.0, 0.0], [30, 20]), every(50)))
    twice = known(clustered_share(np.repeat([1.0, 0.0], [60, 40]), np.repeat(every(50), 2)))
    # The linearised variance divides by posts - 1: 50 posts count as 49.
    assert (twice.low, twice.high) == pytest.approx(wilson(0.6 * 49, 49))
    assert twice.low < once.low < once.high < twice.high


def test_ties_make_the_interval_of_a_share_as_narrow_as_its_spread():
    """400 posts, 85% ties: 1.9 points either way, where Wilson's of 400 wins and losses has 4.9."""
    values = np.repeat([1.0, 0.5, 0.0], [30, 340, 30])
    found = known(clustered_share(values, every(400)))
    assert found.high - 0.5 == pytest.approx(1.959964 * math.sqrt(0.15 * 0.25 / 400), rel=0.03)
    assert wilson(200, 400)[1] - 0.5 == pytest.approx(0.049, abs=5e-4)


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.35])
def test_the_sign_flip_test_counts_all_signs(shift):
    rng = np.random.default_rng(3)
    values = np.round(rng.normal(shift, 0.5, size=11), 1)
    sums = np.array([abs(np.dot(signs, values)) for signs in product((1, -1), repeat=11)])
    exact = (sums >= abs(values.sum()) - 1e-9).mean()
    assert sign_flip_p_value(values) == pytest.approx(exact)


def test_a_p_value_is_uniform_where_nothing_differs_and_never_0():
    rng = np.random.default_rng(4)
    found = [sign_flip_p_value(rng.integers(-20, 21, size=80) / 20) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert sign_flip_p_value(np.ones(200)) == pytest.approx(2.0**-199)
    assert 0 < sign_flip_p_value(np.repeat([1.0, 0.5], 50)) < 1e-15  # 2^-99, but for rounding
    assert sign_flip_p_value(np.zeros(5)) == 1.0
    assert sign_flip_p_value(np.ones(1)) == 1.0
    with pytest.raises(ValueError, match="no multiples of a common part"):
        sign_flip_p_value(rng.normal(size=9))


def test_what_a_share_needs_is_the_textbooks_number():
    # (1.95996 * 0.5 + 0.84162 * 0.4)^2 / 0.3^2 = 19.3, by hand; and of 72% above 60%, 124.1.
    assert (needed_to_show(0.8, 0.5), needed_to_show(0.72, 0.6)) == (20, 125)
    expected = pytest.approx(2 * stats.norm.sf(0.1 / (0.098 / 1.959964)))
    assert two_sided({"estimate": 0.6, "low": 0.502, "high": 0.7}, 0.5) == expected
    assert two_sided({"estimate": 0.4, "low": 0.2, "high": 0.498}, 0.5) == expected


def test_a_lean_to_either_place_counts_where_it_is_sure_and_large():
    bounds = {
        "first": (0.62, 0.55, 0.69),
        "second": (0.38, 0.31, 0.45),
        "little": (0.54, 0.52, 0.56),
        "unsure": (0.60, 0.45, 0.75),
        "p = 0.04": (0.60, 0.505, 0.695),
    }
    keys = "estimate", "low", "high"
    shares = {name: dict(zip(keys, numbers, strict=True)) for name, numbers in bounds.items()}
    assert leaning({**shares, "silent": None}) == ["first", "second"]
    assert leaning({"alone": shares["p = 0.04"]}) == ["alone"]  # of five it may be chance


def test_kappa_is_that_of_cohens_formula_with_an_interval_over_posts():
    # 20 a/a, 5 a/b, 10 b/a, 15 b/b: agreement 0.7, by chance 0.5, so kappa 0.4 (a known example).
    labels = np.repeat([True, False], 25)
    answers = np.repeat([1.0, 0.0, 1.0, 0.0], [20, 5, 10, 15])
    found = known(kappa_interval(labels, answers, every(50)))
    assert found.estimate == pytest.approx(0.4)
    # Fleiss, Cohen and Everitt 1969: a standard error of about 0.13.
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.128, rel=0.1)
    twice = known(kappa_interval(*(np.tile(x, 2) for x in (labels, answers, every(50)))))
    assert (twice.low, twice.high) == pytest.approx((found.low, found.high), abs=0.01)
    always = known(kappa_interval(labels[:25], answers[:20].repeat(2)[:25], every(25)))
    assert (always.estimate, always.low, always.high) == (0.0, 0.0, 0.0)


def labelled(sensitivity, specificity, n):
    """n labels of each kind, and a judge who errs as often as said."""
    right = round(sensitivity * n), round(specificity * n)
    answers = [1.0] * right[0] + [0.0] * (n - right[0]) + [0.0] * right[1] + [1.0] * (n - right[1])
    return np.repeat([True, False], n), np.array(answers)


def known_pairs(labels, answers, posts=None, families=None):
    posts = np.arange(len(labels)) if posts is None else posts
    families = np.full(len(labels), "sup") if families is None else families
    columns = {"label": labels, "answer": answers, "post": posts, "family": families}
    return pd.DataFrame(columns)


def corrected(scores, labels, answers, shift=0.0):
    """With one pair a post, and no shift unless one is asked for."""
    return corrected_rate(scores, known_pairs(labels, answers), shift)


def test_pairs_of_one_post_are_no_more_evidence_than_one():
    labels, answers = labelled(0.8, 0.9, 100)
    scores = np.repeat([1.0, 0.0], [590, 410])
    alone = known(corrected(scores, labels, answers))
    posts = np.repeat(np.arange(200), 3)
    thrice = known_pairs(np.repeat(labels, 3), np.repeat(answers, 3), posts)
    together = known(corrected_rate(scores, thrice, 0.0))
    assert together.estimate == pytest.approx(alone.estimate)
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high), abs=0.01)


def test_the_corrected_rate_undoes_the_judges_errors():
    # True rate 0.7 through sensitivity 0.8 and specificity 0.9: 0.7 * 0.8 + 0.3 * 0.1 = 0.59.
    labels, answers = labelled(0.8, 0.9, 500)
    found = known(corrected(np.repeat([1.0, 0.0], [590, 410]), labels, answers))
    assert found.estimate == pytest.approx(0.7)
    # Delta method: variances of p, sensitivity and specificity, over the skill of 0.7.
    error = math.sqrt(0.59 * 0.41 / 1000 + 0.49 * 0.16 / 500 + 0.09 * 0.09 / 500) / 0.7
    assert found.low == pytest.approx(0.7 - 1.96 * error, abs=0.006)
    assert found.high == pytest.approx(0.7 + 1.96 * error, abs=0.006)


def test_a_judge_who_guesses_corrects_nothing():
    labels, answers = labelled(0.5, 0.5, 300)
    assert corrected(np.repeat([1.0, 0.0], [60, 40]), labels, answers) is None
    labels, answers = labelled(0.8, 0.9, 50)
    assert corrected(np.ones(10), labels[:50], answers[:50]) is None  # one kind of label only


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_where_the_judge_may_be_blind_every_rate_is_possible(score):
    """Of 6 labels of each kind: in 4 % of the resamples it is no better than chance."""
    labels, answers = labelled(4 / 6, 5 / 6, 6)
    found = known(corrected(np.full(50, score), labels, answers))
    assert (found.estimate, found.low, found.high) == (score, 0.0, 1.0)


def test_a_shift_widens_the_corrected_interval_by_itself_over_the_skill():
    labels, answers = labelled(0.8, 0.9, 500)
    scores = np.repeat([1.0, 0.0], [590, 410])
    plain, wide = (known(corrected(scores, labels, answers, shift)) for shift in (0.0, 0.07))
    assert wide.estimate == plain.estimate
    assert (plain.low - wide.low, wide.high - plain.high) == pytest.approx(
        (0.1, 0.1),
        abs=0.005,  # 0.07 / 0.7, but for the skill that varies between resamples
    )
    # The worst case by hand: sensitivity 0.87 and specificity 0.83 instead.
    assert plain.estimate - 0.1 == pytest.approx((0.59 + 0.83 - 1) / (0.87 + 0.83 - 1))


def two_families(first, second, n):
    """n labels of each kind and family; each family's sensitivity and specificity."""
    parts = [labelled(first[0], first[1], n), labelled(second[0], second[1], n)]
    labels, answers = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    return known_pairs(labels, answers, families=np.repeat(["ppo", "sup"], 2 * n))


def test_errors_are_kept_per_family_and_the_shift_is_at_least_as_large_as_theirs():
    known_errors = two_families((0.9, 0.8), (0.6, 0.8), 200)
    found = errors_by_family(known_errors)
    assert {name: one["pairs"] for name, one in found.items()} == {"ppo": 400, "sup": 400}
    assert found["ppo"]["sensitivity"]["estimate"] == pytest.approx(0.9)
    assert found["sup"]["sensitivity"]["estimate"] == pytest.approx(0.6)
    assert shift_of(known_errors) == pytest.approx(0.15)  # 0.9 and 0.6 about 0.75
    assert shift_of(two_families((0.8, 0.8), (0.76, 0.8), 200)) == 0.1  # the stated least
    assert shift_of(two_families((1.0, 0.8), (0.5, 0.8), 20)) == 0.1  # too few labels to say


@pytest.mark.parametrize(
    ("policies", "family"),
    [
        (("ref", "sup4_6b_t0.7"), "sup"),
        (("sup4_ppo_rm4_t.7", "ref"), "ppo"),
        (("sup4_ppo_rm4_t.7", "sup4_12b_t0.7"), "ppo and sup"),
        (("sup_small", "sup_large"), "sup"),
        (("ppo_1.3b", "ref"), "ppo"),
        (("T5", "unknown"), "t and unknown"),
    ],
)
def test_policies_are_put_into_families_by_their_names(policies, family):
    assert family_of(policies, "ref") == family


def test_a_mean_over_seeds_has_students_interval():
    values = [0.61, 0.66, 0.58, 0.63]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert mean_of_seeds(values) == pytest.approx(expected)
    assert mean_of_seeds([0.6]) is None
    assert mean_of_seeds([0.1 + 0.2, 0.3, 0.3]) is None  # no spread, which other seeds might show


def test_holm_multiplies_the_smallest_by_all_and_never_falls():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # by hand
    assert holm([]) == []
