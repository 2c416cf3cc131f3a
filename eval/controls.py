"""Controls: texts whose worth is known, judged by the judge of the run, in both orders.

    python -m eval.controls --preset tiny --seed 44413

The references of some held-out posts are compared with themselves (the protocol must say tie,
without asking), and with negative controls (`eval.control_texts`). A judge that does not prefer the
reference to each, with its whole 95% interval, is flagged on every page that uses it: its win rates
are no evidence of good summaries. If an interval contains both answers because posts are few, the
judge has neither passed nor failed.
"""

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
from eval.stats.formulas import clustered_share, needed_to_show
from eval.stats.table import verdict_table
from eval.win_rate import posts_by_text
from stages.config.config import Config
from stages.config.judge import MOST_UNJUDGED
from stages.runs.run import open_stage

EVEN = 0.5
# Posts with which a judge that prefers the reference on 80% of them passes in 4 of 5 cases.
NEEDED = needed_to_show(0.2, EVEN)
TOO_FEW = f"too few posts ({{}} of {NEEDED} needed)"


def judge_controls(config: Config) -> dict[str, Any]:
    """Judge the controls of a run, write `judgements.jsonl`, return the manifest's results.

    Raises UserError where there are no summaries and where the judge cannot be asked.
    """
    with open_stage(config, "controls") as run:
        policies = read_policies(run.require("summaries"))
        judge = make_judge(config, policies)
        rows = controls_of(config, policies)
        # All questions of a run share one cap: the controls may spend what the others left.
        same_cap = run_questions(config, policies)
        judgements = judge_both_orders(run, judge, rows, "controls", same_cap)
        results = {"judge": asdict(judge.about), **outcome(judgements, rows)}
        run.finish(results)
    return results


def outcome(judgements: list[Row], rows: dict[str, list[Row]]) -> dict[str, Any]:
    """The number of posts, every control's result, and the names of those that failed.

    `undecided`: what posts are too few for, in a sentence; empty where they decide.
    """
    controls = {name: describe(name, judgements, rows) for name in CONTROLS}
    judged = [control for control in controls.values() if control["judgements"]]
    posts_of_undecided = [control["posts"] for control in judged if control["passed"] is None]
    undecided = ""
    if posts_of_undecided:
        count = f"{len(posts_of_undecided)} of {len(judged)} controls"
        undecided = f"{count}, {TOO_FEW.format(max(posts_of_undecided))}"
    return {
        "posts": len(rows[SELF]),
        "controls": controls,
        "failed": [name for name, control in controls.items() if control["passed"] is False],
        "undecided": undecided,
    }


def describe(name: str, judgements: list[Row], rows: dict[str, list[Row]]) -> dict[str, Any]:
    """One control's result: `preferred`, the rate of the control over the reference in [0, 1].

    `passed`: for the reference itself, whether every verdict is a tie; else whether the whole
    interval of the rate lies below 1/2. If more are unjudged than a rate may have, it must lie
    there even if all of these had gone to the control. None, with the reason under `why`, if the
    control could not be judged at all, or posts are too few. `posts`: how many have such a text;
    the others are left out.
    """
    verdicts = [row for row in judgements if row["policy"] == name]
    post_of = posts_by_text({name: rows.get(name, [])})
    result: dict[str, Any] = {
        "what": CONTROLS[name].what,
        "posts": len(set(post_of.values())),
        "judgements": len(verdicts),
        "passed": None,
    }
    if not verdicts:
        has_no_text = name in rows
        why = "the posts have no such text" if has_no_text else "this judge knows no new texts"
        return {**result, "why": why}

    texts = {row["id"]: (row["summary"], row["reference"]) for row in rows[name]}
    table = verdict_table(verdicts, texts, post_of)
    judged = table.judged()
    unjudged = float(np.isnan(table.outcomes).mean())
    rate = clustered_share(judged.outcomes, judged.posts)
    result |= {"unjudged": unjudged, "preferred": None, "low": None, "high": None}
    if rate is None:  # not one usable verdict
        return {**result, "passed": False}
    result |= {"preferred": rate.estimate, "low": rate.low, "high": rate.high}

    if name == SELF:
        return {**result, "passed": all(row["verdict"] == "tie" for row in verdicts)}

    # The unjudged count against the judge if they are many.
    high = rate.high
    if unjudged > MOST_UNJUDGED:
        worst = clustered_share(np.nan_to_num(table.outcomes, nan=1.0), table.posts)
        high = max(high, worst.high) if worst else high
    if rate.low <= EVEN <= high and result["posts"] < NEEDED:
        return {**result, "why": TOO_FEW.format(result["posts"])}
    return {**result, "passed": high < EVEN}
