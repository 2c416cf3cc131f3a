"""Win rates and their intervals, against hand calculations and other authors' formulas."""

import json
import math
from typing import Any

import numpy as np
import pytest

from eval import judge
from eval import win_rate as win_rate_stage
from eval import win_rate as win_rates
from eval.scores import agreement
from eval.stats.formulas import wilson
from eval.win_rate import describe, paired_difference, post_scores, win_rate
from stages.config.command_line import make_config
from stages.config.config import UserError
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.run import open_stage
from tests.lib.make_stages import run_module
from tests.lib.told import told


def test_the_reward_model_agrees_with_the_judge_where_both_decide():
    """Detail 17: of five posts that both decided, they agree on three."""
    rows = [
        {"id": f"p{k}", "score": score, "reference_score": 1.0}
        for k, score in enumerate([2.0, 0.0, 2.0, 0.0, 2.0, 2.0, 1.0, 2.0, None])
    ]
    found = agreement(rows, posts(1.0, 0.0, 0.75, 1.0, 0.0, 0.5, 1.0, None, 1.0))
    assert found is not None
    assert (found["estimate"], found["posts"]) == (3 / 5, 5)
    assert (found["low"], found["high"]) == wilson(3, 5)
    assert agreement(rows, {}) is None


def judged(policy: str, *pairs: tuple[str, str]) -> list[dict[str, Any]]:
    """Judgements of posts p0, p1, ...: for each, the verdict in either order."""
    return [
        {"policy": policy, "id": f"p{k}", "order": order, "verdict": verdict}
        for k, pair in enumerate(pairs)
        for order, verdict in zip(("policy_first", "reference_first"), pair, strict=True)
    ]


def posts(*values: float | None) -> dict[str, float | None]:
    return {f"p{k}": value for k, value in enumerate(values)}


def many(**counts: int) -> dict[str, float | None]:
    levels = {"win": 1.0, "half": 0.5, "loss": 0.0}
    return posts(*[levels[name] for name, n in counts.items() for _ in range(n)])


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


def test_a_post_without_both_orders_is_refused():
    rows = judged("ppo", ("policy", "tie"), ("reference", "policy"))
    for broken in (rows[:-1], [*rows, rows[0]], [*rows[:-1], rows[-2]]):
        with pytest.raises(UserError, match="one of each"):
            post_scores(broken)


def test_the_bootstrap_is_as_wide_as_the_spread_over_posts_says():
    # Scores 1, 1/2, 0 in 500, 200, 300 posts: mean 0.6, variance 0.55 - 0.36 = 0.19.
    interval = win_rate(many(win=500, half=200, loss=300))
    half = 1.96 * math.sqrt(0.19 / 1000)
    assert interval.estimate == pytest.approx(0.6)
    assert (interval.low, interval.high) == pytest.approx((0.6 - half, 0.6 + half), abs=0.002)


def test_few_posts_get_wilsons_interval():
    interval = win_rate(many(win=8, loss=2))
    assert (interval.low, interval.high) == pytest.approx((0.490, 0.943), abs=6e-4)
    interval = win_rate(many(win=30, loss=19))  # of 50 it is the bootstrap's
    assert (interval.low, interval.high) == pytest.approx(wilson(30, 49))
    interval = win_rate(many(win=30, loss=20))
    assert interval.low != pytest.approx(wilson(30, 50)[0])


def test_nothing_but_ties_does_not_pass_for_certainty():
    interval = win_rate(many(half=300))
    assert interval.low < 0.5 < interval.high
    # One win and one loss are added: 302 posts, of which two lie 1/2 from the mean.
    half = 1.959964 * math.sqrt(2 * 0.25 / 301 / 302)
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half))


@pytest.mark.parametrize("n", [8, 12, 20, 100])
@pytest.mark.parametrize("shares", [(0.3, 0.4, 0.3), (0.2, 0.2, 0.6), (0.02, 0.96, 0.02)])
def test_with_few_posts_and_ties_the_interval_holds_the_truth_too(n, shares):
    """Of 8 posts with 40 % ties it held it in 82 % of the data sets."""
    rng = np.random.default_rng(0)
    truth, held = shares[1] / 2 + shares[2], 0
    for _ in range(300):
        scores = posts(*rng.choice([0.0, 0.5, 1.0], n, p=shares))
        interval = win_rate(scores)
        held += interval.low <= truth <= interval.high
    assert held / 300 >= 0.92


def test_of_a_dozen_posts_with_ties_the_interval_is_that_of_paired_proportions():
    """Bonett and Price 2012: 7 of 14 against 3 of 14, with their n in the variance less 1."""
    interval = win_rate(many(win=6, half=4, loss=2))
    half = 1.959964 * math.sqrt((10 / 14 - (4 / 14) ** 2) / 13) / 2
    middle = 0.5 + 4 / 14 / 2
    assert (interval.low, interval.high) == pytest.approx((middle - half, middle + half))


def test_no_judged_post_is_no_rate():
    with pytest.raises(UserError, match="no post"):
        win_rate(posts(None, None))
    with pytest.raises(UserError, match="no post"):
        paired_difference(posts(1.0, None), posts(None, 1.0))


def test_a_difference_is_taken_on_the_posts_that_both_have():
    a, b = posts(1.0, 0.5, None, 1.0), {"p0": 0.0, "p1": 0.75, "p2": 1.0, "p9": 0.0}
    interval = paired_difference(a, b)
    assert interval.posts == 2
    assert interval.estimate == pytest.approx((1.0 - 0.25) / 2)


def test_pairing_takes_out_what_the_posts_have_in_common():
    # 200 easy and 200 hard posts; b loses 24 of the easy ones: a - b is 1 in 24 of 400 posts.
    a = posts(*[1.0] * 200, *[0.0] * 200)
    b = posts(*[1.0] * 176, *[0.0] * 224)
    interval = paired_difference(a, b)
    half = 1.96 * math.sqrt(0.06 * 0.94 / 400)
    assert (interval.low, interval.high) == pytest.approx((0.06 - half, 0.06 + half), abs=0.003)
    assert win_rate(a).low < win_rate(b).high  # unpaired, the two intervals overlap


def test_a_policys_row_counts_posts_and_brackets_what_is_missing():
    rows = judged(
        "ppo",
        ("policy", "policy"),
        ("policy", "tie"),
        ("policy", "reference"),
        ("reference", "reference"),
        ("policy", "unjudged"),
    )
    found = describe(post_scores(rows)["ppo"])
    assert found["win_rate"] == pytest.approx(2.25 / 4)
    assert (found["wins"], found["ties"], found["losses"]) == (2, 1, 1)
    assert (found["posts"], found["unjudged"]) == (4, 0.2)
    assert found["worst_case"] == pytest.approx([2.25 / 5, 3.25 / 5])
    assert found["low"] < found["win_rate"] < found["high"]


def test_a_post_under_two_ids_leaves_the_win_rates_interval_as_wide_as_under_one():
    scores = many(win=30, half=15, loss=15)
    again = {f"again-{name}": score for name, score in scores.items()}
    post_of = {name: name.removeprefix("again-") for name in (*scores, *again)}

    once = describe(scores, post_of)
    twice = describe(scores | again, post_of)

    assert once["win_rate"] == pytest.approx(37.5 / 60)
    for key in ("win_rate", "low", "high", "p_value"):
        assert twice[key] == pytest.approx(once[key]), key


def test_the_best_of_a_training_is_chosen_on_one_half_of_the_posts_and_judged_on_the_other():
    """The last byte of SHA-256 of p0, p1, p4, p7, p8 is even, that of p2, p3, p5, p6 odd; p8 lacks
    a score and p7 is p4's text. On the even ones b leads a, 3 to 2; on the odd ones it trails.
    """
    scores = {
        "sft": posts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
        "ppo-1": posts(1.0, 1.0, 0.0, 0.5, 1.0, 0.0, 0.5, 0.0, 1.0),
        "ppo": posts(1.0, 0.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5, None),
    }
    post_of = {f"p{k}": f"p{k}" for k in range(9)} | {"p7": "p4"}
    found = win_rates.best_of_training(scores, post_of)
    assert (found["policy"], found["chosen_on"]) == ("ppo-1", 3)
    assert (found["mean"]["estimate"], found["mean"]["posts"]) == (0.25, 4)
    # Differences -1, 0, -1, 0: their deviation is 1 / sqrt(3), and t(3) is 3.182.
    gap = found["above_last"]
    half = 3.182446 / math.sqrt(3) / 2
    assert (gap["low"], gap["high"]) == pytest.approx((-0.5 - half, -0.5 + half))
    assert found["means"]["ppo"]["estimate"] == pytest.approx(5 / 8)
    equal = {"ppo-1": scores["ppo-1"], "ppo": scores["ppo-1"]}
    assert (
        win_rates.best_of_training(equal, {f"p{k}": f"p{k}" for k in range(9)})["policy"] == "ppo"
    )


def summarise_toy_posts(n: int) -> None:
    """Fabricated summaries: ppo tells the event and more, sft nothing, the reference the event."""
    with open_stage(make_config("tiny"), "summaries") as run:
        for k in range(n):
            post = f"toy1-validation-{k}"
            event = told(post, "event")
            row: dict[str, Any] = {"id": post, "query": f"POST: {k}", "reference": event}
            row |= {"score": None, "reference_score": None}
            run.append("sft.jsonl", {**row, "summary": "Nothing." if k else event})
            run.append("ppo.jsonl", {**row, "summary": told(post, "event", "first")})
        run.finish({})


def test_judge_and_win_rate_run_end_to_end_on_a_runs_folder(runs):
    summarise_toy_posts(30)
    run_module(judge, ["--preset", "tiny"])
    run_module(win_rate_stage, ["--preset", "tiny"])
    folder = stage_folder(make_config("tiny"), "win_rate")
    results = (read_manifest(folder) or {})["results"]
    ppo, sft = results["policies"]["ppo"], results["policies"]["sft"]
    assert list(results["policies"]) == ["sft", "ppo"]
    assert results["posts"] == 30
    assert (ppo["win_rate"], ppo["wins"], ppo["unjudged"], ppo["high"]) == (1.0, 30, 0.0, 1.0)
    assert 0.8 < ppo["low"] < 1.0
    assert sft["win_rate"] == pytest.approx(0.5 / 30)  # the first post repeats the reference
    assert (sft["ties"], sft["losses"]) == (1, 29)
    assert results["differences"]["ppo-sft"]["estimate"] == pytest.approx(1 - 0.5 / 30)
    assert results["judge"]["is_llm"] is False
    scores = read_lines(folder / "post_scores.jsonl")
    assert scores[0] == {"policy": "sft", "id": "toy1-validation-0", "score": 0.5}
    assert len(scores) == 60
    json.dumps(results, allow_nan=False)
