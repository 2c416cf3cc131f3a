"""The formulas of verdicts, against other authors' code, hand calculations and simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.inter_rater import cohens_kappa as other_kappa
from statsmodels.stats.proportion import proportion_confint

from eval.rates.formulas import (
    Interval,
    bootstrap,
    clustered_share,
    cohens_kappa,
    corrected_rate,
    mean_of_posts,
    mean_of_seeds,
    mean_of_two,
    sign_flip_p_value,
)
from stages.learning.intervals import wilson


def known(found: Interval | None) -> Interval:
    assert found is not None
    return found


def every(n):
    return np.arange(n)


@pytest.mark.parametrize(("successes", "n"), [(0, 9), (3, 7), (560, 880), (640, 1000)])
def test_wilson_is_statsmodels_wilson(successes, n):
    assert wilson(successes, n) == pytest.approx(proportion_confint(successes, n, method="wilson"))


def test_a_share_with_one_judgement_a_post_has_wilsons_interval():
    found = known(clustered_share(np.repeat([1.0, 0.0], [640, 360]), every(1000)))
    assert (found.low, found.high) == pytest.approx((0.610, 0.669), abs=6e-4)  # as published


def test_judgements_that_repeat_themselves_count_once():
    once = known(clustered_share(np.repeat([1.0, 0.0], [30, 20]), every(50)))
    twice = known(clustered_share(np.repeat([1.0, 0.0], [60, 40]), np.repeat(every(50), 2)))
    # The linearised variance divides by posts - 1: 50 posts count as 49.
    assert (twice.low, twice.high) == pytest.approx(wilson(0.6 * 49, 49))
    assert twice.low < once.low < once.high < twice.high


def test_a_judge_of_places_gives_two_judgements_a_post_at_most():
    found = known(clustered_share(np.tile([1.0, 0.0], 50), np.repeat(every(50), 2)))
    assert (found.estimate, found.low, found.high) == pytest.approx((0.5, *wilson(50, 100)))


def test_a_clustered_interval_holds_the_truth_19_times_in_20():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        post = rng.beta(2, 1.2, size=150)  # mean 0.625: some posts are won in both orders
        outcomes = (rng.random((150, 2)) < post[:, None]).astype(float).ravel()
        found = known(clustered_share(outcomes, np.repeat(every(150), 2)))
        held += found.low <= 0.625 <= found.high
    assert 0.92 <= held / 400 <= 0.985


def test_no_judgement_is_no_share():
    assert clustered_share(np.array([]), np.array([], dtype=int)) is None


def test_the_bootstrap_of_a_ratio_is_the_plain_one():
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 3, size=(60, 2)) + np.array([0.0, 1.0])
    drawn = rows[rng.integers(0, 60, size=(20_000, 60))].sum(axis=1)
    expected = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    found = bootstrap(rows, lambda totals: totals[:, 0] / totals[:, 1])
    assert found == pytest.approx(tuple(expected), abs=0.006)


def test_the_mean_of_two_rates_has_the_width_of_independent_errors():
    first = Interval(estimate=0.7, low=0.64, high=0.75, posts=1)
    second = Interval(estimate=0.5, low=0.42, high=0.58, posts=1)
    assert mean_of_two(first, second) == pytest.approx((0.55, 0.6 + math.hypot(0.05, 0.08) / 2))


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.35])
def test_the_sign_flip_test_is_scipys_exact_permutation_test(shift):
    rng = np.random.default_rng(3)
    values = np.round(rng.normal(shift, 0.5, size=11), 1)
    exact = stats.permutation_test(
        (values,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", n_resamples=10**6
    ).pvalue
    assert sign_flip_p_value(values, resamples=40_000) == pytest.approx(exact, abs=0.01)


def test_a_p_value_is_uniform_where_nothing_differs_and_never_0():
    rng = np.random.default_rng(4)
    found = [sign_flip_p_value(rng.normal(size=80), resamples=500) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert sign_flip_p_value(np.ones(200), resamples=999) == 1 / 1000
    assert sign_flip_p_value(np.zeros(5)) == 1.0


def test_kappa_is_that_of_cohens_formula_and_of_statsmodels():
    # 20 a/a, 5 a/b, 10 b/a, 15 b/b: agreement 0.7, by chance 0.5, so kappa 0.4 (a known example).
    labels = list("a" * 25 + "b" * 25)
    answers = list("a" * 20 + "b" * 5 + "a" * 10 + "b" * 15)
    assert cohens_kappa(labels, answers) == pytest.approx(0.4)
    assert other_kappa(np.array([[20, 5], [10, 15]])).kappa == pytest.approx(0.4)
    assert cohens_kappa(["a"] * 4, ["a"] * 4) is None


def labelled(sensitivity, specificity, n):
    """n labels of each kind, and a judge who errs as often as said."""
    right = round(sensitivity * n), round(specificity * n)
    answers = [1.0] * right[0] + [0.0] * (n - right[0]) + [0.0] * right[1] + [1.0] * (n - right[1])
    return np.repeat([True, False], n), np.array(answers)


def corrected(scores, labels, answers):
    """With one pair a post."""
    return corrected_rate(scores, labels, answers, np.arange(len(labels)))


def test_pairs_of_one_post_are_no_more_evidence_than_one():
    labels, answers = labelled(0.8, 0.9, 100)
    scores = np.repeat([1.0, 0.0], [590, 410])
    alone = known(corrected(scores, labels, answers))
    posts = np.repeat(np.arange(200), 3)
    together = known(corrected_rate(scores, np.repeat(labels, 3), np.repeat(answers, 3), posts))
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


def test_a_judge_without_errors_needs_no_correction():
    labels, answers = labelled(1.0, 1.0, 200)
    scores = np.repeat([1.0, 0.5, 0.0], [120, 30, 50])
    found = known(corrected(scores, labels, answers))
    plain = mean_of_posts(scores, (0.0, 1.0))
    assert found.estimate == pytest.approx(plain.estimate)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=0.005)


def test_a_judge_who_guesses_corrects_nothing():
    labels, answers = labelled(0.5, 0.5, 300)
    assert corrected(np.repeat([1.0, 0.0], [60, 40]), labels, answers) is None
    labels, answers = labelled(0.8, 0.9, 50)
    assert corrected(np.ones(10), labels[:50], answers[:50]) is None  # one kind of label only


def test_the_corrected_interval_holds_the_truth_19_times_in_20():
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        labels = rng.random(300) < 0.5
        answers = (rng.random(300) < np.where(labels, 0.75, 0.2)).astype(float)
        scores = (rng.random(400) < 0.6 * 0.75 + 0.4 * 0.2).astype(float)
        found = known(corrected(scores, labels, answers))
        held += found.low <= 0.6 <= found.high
    assert 0.9 <= held / 200 <= 0.99


def test_a_mean_over_seeds_has_students_interval():
    values = [0.61, 0.66, 0.58, 0.63]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert mean_of_seeds(values) == pytest.approx(expected)
    assert mean_of_seeds([0.6]) is None
