"""Stage `controls` (`make eval`): texts of known quality, judged by the run's judge in both orders.

The references of some held-out posts are compared with themselves (the protocol must say tie
without asking) and with negative controls (`eval.control_texts`). A judge passes a control if the
whole 95% interval shows that it prefers the reference. A judge that fails one is flagged on every
page that uses it, because its win rates are not evidence of good summaries. If there are too few
posts to tell, the judge has neither passed nor failed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from eval.control_texts import CONTROLS, SELF
from eval.judge import (
    controls_of,
    judge_both_orders,
    make_judge,
    read_policies,
    run_questions,
)
from eval.judges.protocol import Row
from eval.stats.intervals import clustered_share
from eval.stats.table import verdict_table
from eval.win_rate import posts_by_text
from stages.config.config import Config
from stages.config.judge import MOST_UNJUDGED
from stages.runs.run import open_stage

EVEN = 0.5
# With this many posts, a judge that prefers the reference on 80% of them is shown to prefer it with
# a power of 80% (two-sided test at 5%).
POSTS_NEEDED = 20


def judge_controls(config: Config) -> dict[str, Any]:
    """Judge the controls of a run, write `judgements.jsonl`, return the manifest's results.

    Raises UserError if there are no summaries or the judge cannot run.
    """
    with open_stage(config, "controls") as run:
        policies = read_policies(run.require("summaries"))
        judge = make_judge(config, policies)
        rows = controls_of(config, policies)
        judgements = judge_both_orders(
            run,
            judge,
            rows,
            label="controls",
            # All questions of a run share one cap: the controls may spend what the others left.
            earlier=run_questions(config, policies),
        )
        results = {"judge": asdict(judge.about), **outcome(judgements, rows)}
        run.finish(results)
    return results


def outcome(judgements: Sequence[Row], rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """The number of posts, the result of each control, and the names of those that failed.

    `rows` has the rows of each control. `undecided` says in words which controls have too few
    posts; it is empty if all are decided.
    """
    controls = {name: describe(name, judgements, rows) for name in CONTROLS}
    failed = [name for name, control in controls.items() if control["passed"] is False]

    judged = [control for control in controls.values() if control["judgements"] > 0]
    posts_of_undecided = [control["posts"] for control in judged if control["passed"] is None]
    undecided = ""
    if posts_of_undecided:
        undecided = (
            f"{len(posts_of_undecided)} of {len(judged)} controls,"
            f" {_too_few(max(posts_of_undecided))}"
        )
    return {
        "posts": len(rows[SELF]),
        "controls": controls,
        "failed": failed,
        "undecided": undecided,
    }


def describe(
    name: str, judgements: Sequence[Row], rows: Mapping[str, Sequence[Row]]
) -> dict[str, Any]:
    """One control's result.

    `preferred` is the rate at which the judge prefers the control to the reference, in [0, 1].
    `posts` counts the posts that have such a text. `passed` says whether the whole interval of the
    rate lies below 1/2; if too many posts are unjudged, even if the control had won all of them.
    For the reference itself it says whether every verdict is a tie. `passed` is None, with the
    reason under `why`, if the control was not judged or has too few posts.
    """
    judgements_of_control = [row for row in judgements if row["policy"] == name]
    post_of = posts_by_text({name: rows.get(name, [])})
    posts = len(set(post_of.values()))
    result: dict[str, Any] = {
        "what": CONTROLS[name].what,
        "posts": posts,
        "judgements": len(judgements_of_control),
        "passed": None,
    }
    if not judgements_of_control:
        if name in rows:
            result["why"] = "the posts have no such text"
        else:
            result["why"] = "this judge cannot judge new texts"
        return result

    texts = {row["id"]: (row["summary"], row["reference"]) for row in rows[name]}
    table = verdict_table(judgements_of_control, texts, post_of)
    judged = table.judged()
    rate = clustered_share(judged.outcomes, judged.posts)
    result["unjudged"] = float(np.isnan(table.outcomes).mean())
    result["preferred"] = rate.estimate if rate else None
    result["low"] = rate.low if rate else None
    result["high"] = rate.high if rate else None
    if rate is None:
        # A judge without any usable verdict has failed.
        result["passed"] = False
        return result

    if name == SELF:
        result["passed"] = all(row["verdict"] == "tie" for row in judgements_of_control)
        return result

    # If many are unjudged, they count against the judge.
    high = rate.high
    if result["unjudged"] > MOST_UNJUDGED:
        worst = clustered_share(np.nan_to_num(table.outcomes, nan=1.0), table.posts)
        assert worst is not None  # there are judgements
        high = max(high, worst.high)

    contains_even = rate.low <= EVEN <= high
    if contains_even and posts < POSTS_NEEDED:
        result["why"] = _too_few(posts)
    else:
        result["passed"] = high < EVEN
    return result


def _too_few(posts: int) -> str:
    return f"too few posts ({posts} of {POSTS_NEEDED} needed)"
