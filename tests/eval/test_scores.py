"""Scores by a judge, a proxy and a gold reward model, compared by hand."""

import pytest

from eval.scores import agreement, proxy_and_gold
from eval.stats.intervals import wilson


def rows_of(*scores, reference_score=0.5):
    return [
        {"id": f"p{number}", "score": score, "reference_score": reference_score}
        for number, score in enumerate(scores)
    ]


# -- agreement -------------------------------------------------------------------------------------


def test_the_reward_model_agrees_with_the_judge_where_both_decide():
    """Detail 17: of five posts that both decided, they agree on three."""
    rows = rows_of(2.0, 0.0, 2.0, 0.0, 2.0, 2.0, 1.0, 2.0, None, reference_score=1.0)
    judged = {
        "p0": 1.0,  # they agree
        "p1": 0.0,  # they agree
        "p2": 0.75,  # they agree
        "p3": 1.0,
        "p4": 0.0,
        "p5": 0.5,  # the judge ties
        "p6": 1.0,  # the reward model ties
        "p7": None,
        "p8": 1.0,  # no score
    }

    agreed = agreement(rows, judged)

    assert agreed is not None
    assert agreed["estimate"] == 3 / 5
    assert agreed["posts"] == 5
    assert (agreed["low"], agreed["high"]) == wilson(3, 5)


def test_without_a_decided_post_there_is_no_agreement():
    assert agreement(rows_of(2.0), {"p0": 0.5}) is None
    assert agreement(rows_of(2.0), {}) is None


# -- proxy and gold --------------------------------------------------------------------------------


def test_a_gain_is_paired_by_post_and_leaves_out_texts_without_a_score():
    gold = {"sft": rows_of(0.0, 1.0, 5.0), "ppo": rows_of(2.0, 5.0, None)}

    gain = proxy_and_gold({}, gold)["gains"]["ppo"]["gold"]

    # Differences 2 and 4: the mean is 3, its standard error 1, the quantile of t(1) 12.706205.
    assert gain["estimate"] == 3.0
    assert gain["posts"] == 2
    assert gain["high"] - 3.0 == pytest.approx(12.706205)


def test_one_post_has_no_gain():
    gold = {"sft": rows_of(0.0, 1.0), "ppo": rows_of(2.0)}
    assert proxy_and_gold({}, gold)["gains"]["ppo"]["gold"] is None


def test_a_scorer_without_scores_has_no_gain():
    gold = {"sft": rows_of(0.0, 1.0), "ppo": rows_of(2.0, 5.0)}
    assert proxy_and_gold({}, gold)["gains"]["ppo"]["proxy"] is None


def test_means_are_of_each_policy_and_of_the_references():
    results = proxy_and_gold({}, {"sft": rows_of(0.0, 1.0, 5.0)})
    assert results["gold"]["sft"]["estimate"] == 2.0
    assert results["gold"]["reference"]["low"] == results["gold"]["reference"]["high"] == 0.5
    assert results["proxy"] == {"reference": None}
