"""A judge compared with simple ones, and Cohen's kappa: by hand and with statsmodels."""

from itertools import count

import numpy as np
import pytest
from statsmodels.stats.inter_rater import cohens_kappa

from eval.stats.simple_judges import (
    compare_judges,
    compare_with_simple_judges,
    kappa_interval,
    kappas,
    measured,
    simple_answers,
)

POST_NUMBERS = count()


def pair(label, answer, words=(2, 1), overlap=(1, 2)):
    """A labeled pair about a post of its own."""
    return {
        "post": f"p{next(POST_NUMBERS)}",
        "label": label,
        "answer": answer,
        "words": list(words),
        "overlap": list(overlap),
    }


# -- simple judges ---------------------------------------------------------------------------------


def test_words_and_words_of_the_post_are_counted():
    query = "SUBREDDIT: r/x\n\nTITLE: My bike\n\nPOST: My boss sold it.\n\nTL;DR:"
    # my, boss and sold are in the post; an empty text counts as one word.
    assert measured(query, "My boss SOLD my car!", "") == {"words": [5, 1], "overlap": [3, 0]}


def test_each_simple_judge_does_what_its_name_says():
    pairs = [
        pair(True, 1.0, words=(5, 3), overlap=(1, 2)),
        pair(True, 1.0, words=(3, 3), overlap=(4, 2)),
        pair(False, 1.0, words=(2, 3), overlap=(2, 2)),
    ]
    answers = {name: answers.tolist() for name, answers in simple_answers(pairs).items()}
    assert answers == {
        "majority": [1.0, 1.0, 1.0],
        "longest": [1.0, 0.5, 0.0],
        "overlap": [0.0, 1.0, 0.5],
    }


def test_a_judge_that_is_always_right_beats_the_simple_ones_by_what_they_miss():
    """24 of 40 labels are true; the first text is longer in 16 of these pairs, and in 4 others."""
    pairs = [pair(True, 1.0, words=(2, 1)) for _ in range(16)]
    pairs += [pair(True, 1.0, words=(1, 2)) for _ in range(8)]
    pairs += [pair(False, 0.0, words=(2, 1)) for _ in range(4)]
    pairs += [pair(False, 0.0, words=(1, 2)) for _ in range(12)]

    results = compare_with_simple_judges(pairs)

    simple = results["simple"]
    assert simple["majority"]["agreement"]["estimate"] == pytest.approx(24 / 40)
    assert simple["majority"]["kappa"]["estimate"] == 0.0
    # "The longer one" is right on 16 + 12 pairs, and would be on half of them by chance.
    assert simple["longest"]["agreement"]["estimate"] == pytest.approx(28 / 40)
    assert simple["longest"]["kappa"]["estimate"] == pytest.approx((0.7 - 0.5) / 0.5)
    assert simple["longest"]["difference"]["estimate"] == pytest.approx(12 / 40)
    assert results["kappa_interval"]["estimate"] == 1.0
    assert results["prefers_longer"]["labels"]["estimate"] == pytest.approx(28 / 40)
    assert results["prefers_longer"]["judge"]["estimate"] == pytest.approx(28 / 40)


def test_without_answers_nothing_is_compared():
    results = compare_with_simple_judges([])
    assert results == {"kappa_interval": None, "prefers_longer": None, "simple": {}}


# -- two judges ------------------------------------------------------------------------------------


def test_two_judges_are_compared_where_both_decide():
    labels = np.array([True, True, True, False, False])
    answers = np.array([1.0, 0.5, 1.0, 0.75, 0.0])
    other_answers = np.array([0.75, 1.0, 0.0, 1.0, 0.25])

    results = compare_judges(
        labels=labels, answers=answers, other_answers=other_answers, posts=np.arange(5)
    )

    # The second pair is a tie of this judge. Of the other four, three have the same verdict, and
    # two of these agree with the label.
    assert results["agreement"]["estimate"] == pytest.approx(2.5 / 5)
    assert results["difference"]["estimate"] == pytest.approx(1.25 / 5)
    assert results["same"]["estimate"] == pytest.approx(3 / 4)
    assert results["right"]["estimate"] == pytest.approx(2 / 3)


def test_a_judge_of_ties_has_no_verdict_in_common_with_another():
    labels = np.array([True, False])
    results = compare_judges(
        labels=labels,
        answers=np.array([0.5, 0.5]),
        other_answers=np.array([1.0, 0.0]),
        posts=np.arange(2),
    )
    assert results["same"] is None
    assert results["right"] is None


# -- kappa -----------------------------------------------------------------------------------------

# 20 for/for, 5 against/for, 10 for/against, 15 against/against: the observed agreement is 0.7 and
# the expected one 0.5, so kappa is 0.4.
LABELS = np.repeat([True, True, False, False], [20, 5, 10, 15])
ANSWERS = np.repeat([1.0, 0.0, 1.0, 0.0], [20, 5, 10, 15])


def test_kappa_is_that_of_cohens_formula():
    kappa = kappa_interval(LABELS, ANSWERS, np.arange(50))
    assert kappa is not None
    assert kappa.estimate == pytest.approx(0.4)


def test_the_interval_of_kappa_agrees_with_its_published_standard_error():
    """Fleiss, Cohen and Everitt 1969: about 0.128 for this table."""
    kappa = kappa_interval(LABELS, ANSWERS, np.arange(50))
    assert kappa is not None
    assert kappa.high - kappa.low == pytest.approx(2 * 1.96 * 0.128, rel=0.1)


def test_two_equal_pairs_about_a_post_leave_kappas_interval():
    once = kappa_interval(LABELS, ANSWERS, np.arange(50))
    twice = kappa_interval(np.tile(LABELS, 2), np.tile(ANSWERS, 2), np.tile(np.arange(50), 2))
    assert once is not None
    assert twice is not None
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high), abs=0.01)


def test_a_judge_that_always_says_the_same_has_kappa_0():
    labels = np.repeat([True, False], [15, 10])
    kappa = kappa_interval(labels, np.ones(25), np.arange(25))
    assert kappa is not None
    assert (kappa.estimate, kappa.low, kappa.high) == (0.0, 0.0, 0.0)


def test_a_judge_of_ties_has_no_kappa():
    assert kappa_interval(LABELS, np.full(50, 0.5), np.arange(50)) is None


def test_kappas_of_tables_agree_with_statsmodels():
    tables = np.random.default_rng(1).integers(1, 40, size=(50, 4)).astype(float)
    expected = [cohens_kappa(table.reshape(2, 2)).kappa for table in tables]
    assert kappas(tables) == pytest.approx(expected)


def test_kappa_is_0_where_chance_alone_agrees_always():
    tables = np.array([[5.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    assert kappas(tables).tolist() == [0.0, 0.0]
