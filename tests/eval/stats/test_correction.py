"""The win rate corrected for a judge's errors: by hand, by the delta method, and its refusals."""

from math import sqrt

import numpy as np
import pandas as pd
import pytest

from eval.stats.correction import corrected_rate, errors_by_family, family_of, shift_of
from eval.stats.intervals import Interval


def labels_and_answers(sensitivity, specificity, n):
    """n labels of each kind, and the answers of a judge with this sensitivity and specificity."""
    agreed = round(sensitivity * n)
    rejected = round(specificity * n)
    answers = np.repeat([1.0, 0.0, 0.0, 1.0], [agreed, n - agreed, rejected, n - rejected])
    return np.repeat([True, False], n), answers


def labeled_pairs(labels, answers, posts=None, families=None):
    """A frame of pairs, by default each about another post, and of one family."""
    return pd.DataFrame(
        {
            "label": labels,
            "answer": answers,
            "post": np.arange(len(labels)) if posts is None else posts,
            "family": np.full(len(labels), "sup") if families is None else families,
        }
    )


def pairs_of(sensitivity, specificity, n):
    return labeled_pairs(*labels_and_answers(sensitivity, specificity, n))


def pairs_of_families(first, second, n):
    """n labels of each kind and family; `first` and `second`: sensitivity and specificity."""
    first_labels, first_answers = labels_and_answers(first[0], first[1], n)
    second_labels, second_answers = labels_and_answers(second[0], second[1], n)
    return labeled_pairs(
        np.concatenate([first_labels, second_labels]),
        np.concatenate([first_answers, second_answers]),
        families=np.repeat(["ppo", "sup"], 2 * n),
    )


def corrected(scores, pairs, shift=0.0) -> Interval:
    rate = corrected_rate(scores, pairs, shift)
    assert rate is not None
    return rate


# A true rate of 0.7 seen with sensitivity 0.8 and specificity 0.9: 0.7 * 0.8 + 0.3 * 0.1 = 0.59.
SEEN = np.repeat([1.0, 0.0], [590, 410])


def test_the_correction_undoes_the_judges_errors():
    rate = corrected(SEEN, pairs_of(0.8, 0.9, 500))
    assert rate.estimate == pytest.approx(0.7)


def test_the_interval_agrees_with_the_delta_method():
    rate = corrected(SEEN, pairs_of(0.8, 0.9, 500))

    # Variances of the rate, of sensitivity and of specificity, divided by the skill of 0.7.
    variance = 0.59 * 0.41 / 1000 + 0.49 * 0.16 / 500 + 0.09 * 0.09 / 500
    error = sqrt(variance) / 0.7
    assert rate.low == pytest.approx(0.7 - 1.96 * error, abs=0.006)
    assert rate.high == pytest.approx(0.7 + 1.96 * error, abs=0.006)


def test_three_equal_pairs_about_a_post_count_as_one():
    labels, answers = labels_and_answers(0.8, 0.9, 100)
    once = corrected(SEEN, labeled_pairs(labels, answers))
    posts = np.repeat(np.arange(200), 3)
    thrice = corrected(SEEN, labeled_pairs(np.repeat(labels, 3), np.repeat(answers, 3), posts))

    assert thrice.estimate == pytest.approx(once.estimate)
    assert (thrice.low, thrice.high) == pytest.approx((once.low, once.high), abs=0.01)


def test_a_judge_that_guesses_has_no_corrected_rate():
    scores = np.repeat([1.0, 0.0], [60, 40])
    assert corrected_rate(scores, pairs_of(0.5, 0.5, 300), shift=0.0) is None


def test_one_kind_of_label_has_no_corrected_rate():
    pairs = pairs_of(0.8, 0.9, 50)
    assert corrected_rate(np.ones(10), pairs[pairs["label"]], shift=0.0) is None


def test_a_shift_that_spans_every_rate_has_no_corrected_rate():
    # The skill is 0.7, and 0.35 / 0.7 on each side is all of [0, 1].
    assert corrected_rate(SEEN, pairs_of(0.8, 0.9, 500), shift=0.36) is None


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_where_the_judge_may_be_blind_every_rate_is_possible(score):
    """With 6 labels of each kind, it is no better than chance in 4% of the resamples."""
    rate = corrected(np.full(50, score), pairs_of(4 / 6, 5 / 6, 6))
    assert (rate.estimate, rate.low, rate.high) == (score, 0.0, 1.0)


def test_a_shift_widens_the_interval_by_shift_over_skill():
    pairs = pairs_of(0.8, 0.9, 500)
    plain = corrected(SEEN, pairs)
    wide = corrected(SEEN, pairs, shift=0.07)

    # 0.07 / 0.7, apart from the skill, which varies between resamples.
    assert wide.estimate == plain.estimate
    assert plain.low - wide.low == pytest.approx(0.1, abs=0.005)
    assert wide.high - plain.high == pytest.approx(0.1, abs=0.005)
    # The worst case by hand: sensitivity 0.87 and specificity 0.83.
    assert plain.estimate - 0.1 == pytest.approx((0.59 + 0.83 - 1) / (0.87 + 0.83 - 1))


def test_errors_are_counted_for_each_family():
    families = errors_by_family(pairs_of_families((0.9, 0.8), (0.6, 0.8), 200))

    assert {name: family["pairs"] for name, family in families.items()} == {"ppo": 400, "sup": 400}
    assert families["ppo"]["sensitivity"]["estimate"] == pytest.approx(0.9)
    assert families["sup"]["sensitivity"]["estimate"] == pytest.approx(0.6)
    assert families["sup"]["specificity"]["estimate"] == pytest.approx(0.8)


def test_the_shift_is_as_large_as_the_distance_of_a_family():
    # 0.9 and 0.6 on both sides of 0.75.
    pairs = pairs_of_families((0.9, 0.8), (0.6, 0.8), 200)
    assert shift_of(pairs) == pytest.approx(0.15)


def test_families_that_are_close_leave_the_stated_shift():
    assert shift_of(pairs_of_families((0.8, 0.8), (0.76, 0.8), 200)) == 0.1


def test_families_with_few_labels_leave_the_stated_shift():
    assert shift_of(pairs_of_families((1.0, 0.8), (0.5, 0.8), 20)) == 0.1


@pytest.mark.parametrize(
    ("policies", "family"),
    [
        (("ref", "sup4_6b_t0.7"), "sup"),
        (("sup4_ppo_rm4_t.7", "ref"), "ppo"),
        (("sup4_ppo_rm4_t.7", "sup4_12b_t0.7"), "ppo and sup"),
        (("sup_small", "sup_large"), "sup"),
        (("ppo_1.3b", "ref"), "ppo"),
        (("T5", "unknown"), "t and unknown"),
        (("4", "ref"), "4"),
    ],
)
def test_policies_belong_to_families_by_their_names(policies, family):
    assert family_of(policies, "ref") == family
