"""A judge beside the longest text, the majority label and the most overlap: by hand, flagged."""

import random

import numpy as np
import pytest
from statsmodels.stats.inter_rater import cohens_kappa as reference_kappa

from eval.calibration import describe, sample_pairs, with_answers
from eval.judges.protocol import VERDICTS
from eval.stats.formulas import mean_of_posts
from eval.stats.simple_judges import (
    beside_judge,
    beside_simple_judges,
    kappas,
    measured,
    simple_answers,
)
from stages.runs.files import read_lines


def pair(label, answer, words=(2, 1), overlap=(1, 2)):
    """A pair about a post of its own."""
    counts = {"words": list(words), "overlap": list(overlap)}
    return {"post": f"p{random.random()}", "label": label, "answer": answer} | counts


def test_words_and_words_of_the_post_are_counted_by_hand():
    query = "SUBREDDIT: r/x\n\nTITLE: My bike\n\nPOST: My boss sold it.\n\nTL;DR:"
    found = measured(query, "My boss SOLD my car!", "")
    assert found == {"words": [5, 1], "overlap": [3, 0]}  # my, boss, sold


def test_each_simple_judge_answers_as_its_name_says():
    pairs = [
        pair(True, 1.0, (5, 3), (1, 2)),
        pair(True, 1.0, (3, 3), (4, 2)),
        pair(False, 1.0, (2, 3), (2, 2)),
    ]
    found = {name: answers.tolist() for name, answers in simple_answers(pairs).items()}
    assert found == {
        "majority": [1.0, 1.0, 1.0],
        "longest": [1.0, 0.5, 0.0],
        "overlap": [0.0, 1.0, 0.5],
    }


def test_agreement_kappa_and_difference_are_counted_by_hand():
    """40 pairs, label yes in 24; the first text is longer in 20, of which 16 have label yes."""
    kinds = [(True, (2, 1), 16), (True, (1, 2), 8), (False, (2, 1), 4), (False, (1, 2), 12)]
    pairs = [pair(label, float(label), words) for label, words, n in kinds for _ in range(n)]
    found = beside_simple_judges(pairs)
    simple = found["simple"]
    assert simple["majority"]["agreement"]["estimate"] == pytest.approx(12 / 20)
    assert simple["majority"]["kappa"]["estimate"] == 0.0
    assert simple["longest"]["agreement"]["estimate"] == pytest.approx(14 / 20)
    # By chance: (24 * 20 + 16 * 20) / 1600 = 1/2.
    assert simple["longest"]["kappa"]["estimate"] == pytest.approx((0.7 - 0.5) / 0.5)
    assert simple["longest"]["difference"]["estimate"] == pytest.approx(1 - 14 / 20)
    assert found["kappa_interval"]["estimate"] == 1.0
    assert found["prefers_longer"]["labels"]["estimate"] == pytest.approx(14 / 20)
    assert found["prefers_longer"]["judge"]["estimate"] == pytest.approx(14 / 20)


def test_two_judges_are_the_same_where_both_decide_and_right_where_the_label_agrees():
    """The second pair is a tie of one, so four count: three alike, of which two are right."""
    labels = np.array([True, True, True, False, False])
    answers, rivals = np.array([1.0, 0.5, 1.0, 0.75, 0.0]), np.array([0.75, 1.0, 0.0, 1.0, 0.25])
    found = beside_judge(labels, answers, rivals, np.arange(5))
    shares = {key: found[key]["estimate"] for key in ("agreement", "difference", "same", "right")}
    assert shares == pytest.approx(
        {"agreement": 2.5 / 5, "difference": 1.25 / 5, "same": 3 / 4, "right": 2 / 3}
    )
    nothing = beside_judge(labels, np.full(5, 0.5), rivals, np.arange(5))
    assert nothing["same"] is nothing["right"] is None


def test_kappas_of_tables_are_those_of_statsmodels():
    rng = np.random.default_rng(1)
    tables = rng.integers(1, 40, size=(50, 4)).astype(float)
    expected = [reference_kappa([[a, b], [c, d]]).kappa for a, b, c, d in tables]
    assert kappas(tables) == pytest.approx(expected)
    assert kappas(np.array([[5.0, 3, 0, 0], [4.0, 0, 0, 0]])).tolist() == [0.0, 0.0]


def test_a_paired_difference_is_the_mean_over_pairs_and_not_over_posts():
    found = mean_of_posts(np.array([1.0, 1.0, 1.0, -1.0]), (-1.0, 1.0), np.array([0, 0, 0, 1]))
    assert (found.estimate, found.posts) == (0.5, 2)


def calibrated_by(choose, shared, count=500):
    """What a calibration says of a judge `choose(pair)` in [0, 1], on labels by people."""
    lines = read_lines(shared / "tldr-human" / "comparisons_train.jsonl")
    pairs = sample_pairs([(f"file:{n}", row) for n, row in enumerate(lines)], count, seed=44413)
    words = {1.0: "policy", 0.5: "tie", 0.0: "reference"}
    judgements = [
        {"policy": "labelled", "id": one["id"], "order": order, "verdict": words[choose(one)]}
        for one in pairs
        for order in VERDICTS
    ]
    return describe(with_answers(pairs, judgements), judgements)


def longest(one):
    a, b = one["words"]
    return float((1 + np.sign(a - b)) / 2)


def test_a_judge_of_length_is_found_out_by_labels_of_people(shared):
    """Before, its agreement of 62 % and its kappa of 0.2 raised no flag but the one at 60 %."""
    found = calibrated_by(longest, shared)
    assert found["agreement"]["estimate"] == found["simple"]["longest"]["agreement"]["estimate"]
    assert found["prefers_longer"]["judge"]["estimate"] == 1.0
    assert any("than the longest text: +0.0%" in flag for flag in found["flags"])
    assert any("than the text that repeats most of the post" in flag for flag in found["flags"])


def test_a_judge_as_good_as_people_beats_the_simple_ones_and_is_not_flagged(shared):
    rng = random.Random(5)
    found = calibrated_by(lambda one: float(one["label"] == (rng.random() < 0.75)), shared)
    assert found["flags"] == []
    assert found["kappa_interval"]["low"] > 0.3
    assert all(one["difference"]["low"] > 0 for one in found["simple"].values())
