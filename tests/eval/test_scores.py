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
    judged = dict(
        zip(
            [row["id"] for row in rows],
            [1.0, 0.0, 0.75, 1.0, 0.0, 0.5, 1.0, None, 1.0],
            strict=True,
        )
    )

    agreed = agreement(rows, judged)

    assert agreed is not None
    assert (agreed["estimate"], agreed["posts"]) == (3 / 5, 5)
    assert (agreed["low"], agreed["high"]) == wilson(3, 5)


def test_without_a_decided_post_there_is_no_agreement():
    assert agreement(rows_of(2.0), {"p0": 0.5}) is None
    assert agreement(rows_of(2.0), {}) is None


# -- proxy and gold --------------------------------------------------------------------------------


def test_a_gain_is_paired_by_post_and_leaves_out_texts_without_a_score():
    gold = {"sft": rows_of(0.0, 1.0, 5.0), "ppo": rows_of(2.0, 5.0, None)}

    gain = proxy_and_gold({}, gold)["gains"]["ppo"]["gold"]

    # Differences 2 and 4: the mean is 3, its standard error 1, the quantile of t(1) 12.706205.
    assert (gain["estimate"], gain["posts"]) == (3.0, 2)
    assert gain["high"] - 3.0 == pytest.approx(12.706205)


def test_one_post_has_no_gain():
    gold = {"sft": rows_of(0.0, 1.0), "ppo": rows_of(2.0)}
    assert proxy_and_gold({}, gold)["gains"]["ppo"]["gold"] is None


def test_a_scorer_without_scores_has_no_gain():
    gold = {"sft": rows_of(0.0, 1.0), "ppo": rows_of(2.0, 5.0)}
    assert proxy_and_gold({}, gold)["gains"]["ppo"]["proxy"] is None


def test_means_are_of_each_policy_and_of_the_references():
    found = proxy_and_gold({}, {"sft": rows_of(0.0, 1.0, 5.0)})
    assert found["gold"]["sft"]["estimate"] == 2.0
    assert found["gold"]["reference"]["low"] == found["gold"]["reference"]["high"] == 0.5
    assert found["proxy"] == {"reference": None}
