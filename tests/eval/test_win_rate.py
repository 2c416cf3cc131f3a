"""Win rates, their differences, and the best policy of a training, counted by hand."""

import json
from math import sqrt

import pytest

from eval import judge
from eval import win_rate as win_rate_stage
from eval.win_rate import (
    best_of_training,
    describe,
    names_of_pair,
    pair_name,
    paired_difference,
    post_scores,
    win_rate,
)
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import open_stage
from tests.lib.built_in_summaries import summary_with
from tests.lib.make_stages import run_module

Z = 1.959964


def judged(policy, *pairs):
    """Judgements of the posts p0, p1, ...: each pair has the verdicts in both orders."""
    rows = []
    for number, (policy_first, reference_first) in enumerate(pairs):
        row = {"policy": policy, "id": f"p{number}"}
        rows.append(row | {"order": "policy_first", "verdict": policy_first})
        rows.append(row | {"order": "reference_first", "verdict": reference_first})
    return rows


def scores_of(*values):
    """The scores of the posts p0, p1, ..."""
    return {f"p{number}": value for number, value in enumerate(values)}


def scores_by_count(*, wins=0, ties=0, losses=0):
    """The scores of this many won, tied and lost posts."""
    values = [1.0] * wins + [0.5] * ties + [0.0] * losses
    return scores_of(*values)


# -- scores of posts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "score"),
    [
        (("policy", "policy"), 1.0),
        (("policy", "tie"), 0.75),
        (("tie", "tie"), 0.5),
        (("policy", "reference"), 0.5),
        (("reference", "policy"), 0.5),
        (("tie", "reference"), 0.25),
        (("reference", "reference"), 0.0),
        (("policy", "unjudged"), None),
        (("unjudged", "reference"), None),
        (("unjudged", "unjudged"), None),
    ],
)
def test_a_post_scores_the_mean_of_both_orders(pair, score):
    assert post_scores(judged("ppo", pair)) == {"ppo": {"p0": score}}


POLICY_FIRST, REFERENCE_FIRST = judged("ppo", ("policy", "tie"))


@pytest.mark.parametrize(
    "rows",
    [
        [POLICY_FIRST],
        [POLICY_FIRST, REFERENCE_FIRST, POLICY_FIRST],
        [POLICY_FIRST, POLICY_FIRST],
    ],
    ids=["one order", "three judgements", "one order twice"],
)
def test_a_post_without_one_judgement_in_each_order_is_refused(rows):
    other_post = [row | {"id": "p9"} for row in (POLICY_FIRST, REFERENCE_FIRST)]
    with pytest.raises(UserError, match="each order"):
        post_scores(other_post + rows)


# -- rates -----------------------------------------------------------------------------------------


def test_a_win_rate_is_the_mean_score_with_its_interval():
    rate = win_rate(scores_by_count(wins=500, ties=200, losses=300))

    # The variance is 0.55 - 0.36 = 0.19.
    half_width = Z * sqrt(0.19 / 1000)
    assert rate.estimate == pytest.approx(0.6)
    assert (rate.low, rate.high) == pytest.approx((0.6 - half_width, 0.6 + half_width), abs=0.002)


def test_ten_posts_have_wilsons_interval():
    rate = win_rate(scores_by_count(wins=8, losses=2))
    # By an online calculator of the score interval.
    assert (rate.low, rate.high) == pytest.approx((0.490, 0.943), abs=6e-4)


def test_without_a_judged_post_there_is_no_rate():
    with pytest.raises(UserError, match="no post"):
        win_rate(scores_of(None, None))


def test_a_policys_row_counts_posts_and_brackets_what_is_missing():
    rows = judged(
        "ppo",
        ("policy", "policy"),
        ("policy", "tie"),
        ("policy", "reference"),
        ("reference", "reference"),
        ("policy", "unjudged"),
    )

    row = describe(post_scores(rows)["ppo"])

    assert row["win_rate"] == pytest.approx(2.25 / 4)
    assert row["low"] < row["win_rate"] < row["high"]
    assert (row["wins"], row["ties"], row["losses"]) == (2, 1, 1)
    assert row["posts"] == 4
    assert row["unjudged"] == 0.2
    assert row["worst_case"] == pytest.approx([2.25 / 5, 3.25 / 5])


def test_a_policy_without_verdicts_has_no_rate():
    row = describe(scores_of(None, None))
    for key in ("win_rate", "low", "high", "p_value"):
        assert row[key] is None
    assert row["worst_case"] == [0.0, 1.0]


def test_a_post_with_two_ids_counts_once():
    scores = scores_by_count(wins=30, ties=15, losses=15)
    scores_again = {f"again-{post_id}": score for post_id, score in scores.items()}
    post_of = {post_id: post_id.removeprefix("again-") for post_id in (*scores, *scores_again)}

    once = describe(scores, post_of)
    twice = describe(scores | scores_again, post_of)

    assert once["win_rate"] == pytest.approx(37.5 / 60)
    for key in ("win_rate", "low", "high", "p_value"):
        assert twice[key] == pytest.approx(once[key]), key


# -- differences -----------------------------------------------------------------------------------


def test_a_difference_is_taken_on_the_posts_that_both_have():
    a = scores_of(1.0, 0.5, None, 1.0)
    b = {"p0": 0.0, "p1": 0.75, "p2": 1.0, "p9": 0.0}

    difference = paired_difference(a, b)

    assert difference.posts == 2
    assert difference.estimate == pytest.approx((1.0 - 0.25) / 2)


def test_without_a_post_in_common_there_is_no_difference():
    with pytest.raises(UserError, match="no post"):
        paired_difference(scores_of(1.0, None), scores_of(None, 1.0))


def test_pairing_removes_what_the_posts_have_in_common():
    # 200 easy and 200 hard posts; b loses 24 of the easy ones, so a - b is 1 on 24 of 400 posts.
    a = scores_by_count(wins=200, losses=200)
    b = scores_by_count(wins=176, losses=224)

    difference = paired_difference(a, b)

    half_width = Z * sqrt(0.06 * 0.94 / 400)
    assert difference.low == pytest.approx(0.06 - half_width, abs=0.003)
    assert difference.high == pytest.approx(0.06 + half_width, abs=0.003)
    assert win_rate(a).low < win_rate(b).high  # unpaired, the intervals overlap


@pytest.mark.parametrize("pair", [("ppo", "sft"), ("best-of-4", "sft"), ("ppo", "best-of-4")])
def test_the_name_of_a_pair_gives_its_policies_back(pair):
    assert names_of_pair(pair_name(*pair)) == pair


# -- the best policy of a training -----------------------------------------------------------------


@pytest.fixture
def training():
    """The last byte of SHA-256 of p0, p1, p4, p7 and p8 is even, that of p2, p3, p5 and p6 is odd.

    p8 lacks a score, and p7 has the text of p4. On the even posts ppo-1 leads ppo by 3 to 2, and on
    the odd ones it trails.
    """
    scores = {
        "sft": scores_of(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
        "ppo-1": scores_of(1.0, 1.0, 0.0, 0.5, 1.0, 0.0, 0.5, 0.0, 1.0),
        "ppo": scores_of(1.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5, None),
    }
    post_of = {f"p{number}": f"p{number}" for number in range(9)} | {"p7": "p4"}
    return scores, post_of


def test_the_best_policy_is_chosen_on_the_even_half(training):
    best = best_of_training(*training)
    assert best["policy"] == "ppo-1"
    assert best["chosen_on"] == 3
    assert best["unjudged"] == pytest.approx(1 / 9)


def test_the_best_policy_is_judged_on_the_odd_half(training):
    best = best_of_training(*training)

    assert best["judged_on"] == 4
    assert best["mean"]["estimate"] == 0.25
    assert best["mean"]["posts"] == 4
    # Differences -1, 0, -1, 0: their deviation is 1 / sqrt(3), and the quantile of t(3) 3.182446.
    half_width = 3.182446 / sqrt(3) / 2
    above_last = best["above_last"]
    assert above_last["low"] == pytest.approx(-0.5 - half_width)
    assert above_last["high"] == pytest.approx(-0.5 + half_width)


def test_the_means_of_a_training_are_over_all_posts(training):
    best = best_of_training(*training)
    assert best["means"]["ppo"]["estimate"] == pytest.approx(5 / 8)


def test_of_equally_good_policies_the_later_is_chosen(training):
    scores, post_of = training
    best = best_of_training({"ppo-1": scores["ppo-1"], "ppo": scores["ppo-1"]}, post_of)
    assert best["policy"] == "ppo"
    assert best["above_last"] is None


# -- the stage -------------------------------------------------------------------------------------


@pytest.fixture
def results_of_30_posts(runs):
    """The results of a run in which ppo tells the event and more, and sft nothing.

    The reference tells the event, and sft repeats it for the first post.
    """
    with open_stage(make_config("tiny"), "summaries") as run:
        for number in range(30):
            post_id = f"toy1-validation-{number}"
            event = summary_with(post_id, "event")
            sft_summary = event if number == 0 else "Nothing."
            ppo_summary = summary_with(post_id, "event", "first")
            row = {
                "id": post_id,
                "query": f"POST: {number}",
                "reference": event,
                "score": None,
                "reference_score": None,
            }
            run.append("sft.jsonl", row | {"summary": sft_summary})
            run.append("ppo.jsonl", row | {"summary": ppo_summary})
        run.finish({})
    run_module(judge, ["--preset", "tiny"])
    run_module(win_rate_stage, ["--preset", "tiny"])
    manifest = read_manifest(stage_folder(make_config("tiny"), "win_rate"))
    assert manifest is not None
    return manifest["results"]


def test_the_stage_measures_each_policy(results_of_30_posts):
    results = results_of_30_posts

    assert list(results["policies"]) == ["sft", "ppo"]
    assert results["posts"] == 30
    assert results["judge"]["is_llm"] is False
    ppo = results["policies"]["ppo"]
    assert ppo["win_rate"] == 1.0
    assert ppo["wins"] == 30
    assert ppo["unjudged"] == 0.0
    assert ppo["high"] == 1.0
    assert 0.8 < ppo["low"] < 1.0
    sft = results["policies"]["sft"]
    assert sft["win_rate"] == pytest.approx(0.5 / 30)
    assert (sft["ties"], sft["losses"]) == (1, 29)
    assert results["differences"]["ppo-sft"]["estimate"] == pytest.approx(1 - 0.5 / 30)


def test_the_results_are_plain_json(results_of_30_posts):
    text = json.dumps(results_of_30_posts, allow_nan=False)
    assert json.loads(text) == results_of_30_posts


def test_the_stage_writes_the_score_of_every_post(results_of_30_posts):
    folder = stage_folder(make_config("tiny"), "win_rate")
    rows = read_lines(folder / "post_scores.jsonl")
    assert len(rows) == 60
    assert rows[0] == {"policy": "sft", "id": "toy1-validation-0", "score": 0.5}
