"""The judged posts of a run, one row each: what every comparison is computed from."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from reports.results import RunResult

WON = "won"
EVEN = "even"
LOST = "lost"
UNJUDGED = "unjudged"
# Column -> the field of a row of the stage `summaries`.
SUMMARY_FIELDS = {
    "query": "query",
    "summary": "summary",
    "proxy": "score",
    "length": "tokens",
    "kl": "kl",
    "ends": "has_eos",
    "reference": "reference",
    "reference_tokens": "reference_tokens",
    "reference_score": "reference_score",
}


def judged_posts(run: RunResult, policy: str) -> pd.DataFrame:
    """Return a row for each post on which a policy was judged, in the order of the judgements.

    seed: the run's; post: its id; text: the first id with an equal text; score: the mean of both
    orders in [0, 1], NaN without a verdict; verdict; proxy and gold: the scores of the run's own
    reward model and of the judge's; length: tokens; kl: log-ratio to SFT in nats; query, summary,
    reference; ends: whether the summary emits EOS. What is not known is NaN or None.
    """
    summaries = {row["id"]: row for row in run.stages["summaries"].rows(f"{policy}.jsonl")}
    gold_scores = {}
    for row in run.stages["judge"].rows("gold_scores.jsonl"):
        if row["policy"] == policy:
            gold_scores[row["id"]] = row["score"]

    rows = []
    for judged in run.stages["win_rate"].rows("post_scores.jsonl"):
        if judged["policy"] != policy:
            continue
        summary = summaries.get(judged["id"], {})
        row = {
            "seed": run.seed,
            "post": judged["id"],
            "text": judged.get("post") or judged["id"],
            "policy": policy,
            "score": judged["score"],
            "verdict": verdict_of(judged["score"]),
            "gold": gold_scores.get(judged["id"]),
        }
        for column, name in SUMMARY_FIELDS.items():
            row[column] = summary.get(name)
        rows.append(row)
    columns = ["seed", "post", "text", "policy", "score", "verdict", "gold", *SUMMARY_FIELDS]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"score": float, "gold": float, "proxy": float})


def verdict_of(score: float | None) -> str:
    """Return the verdict of both orders together; a judge that contradicts itself says even."""
    if score is None:
        return UNJUDGED
    if score == 0.5:
        return EVEN
    return WON if score > 0.5 else LOST


def texts_of(posts: pd.DataFrame) -> dict[str, str]:
    """Return for each post the first post with the same text."""
    return dict(zip(posts["post"], posts["text"], strict=True))


def side_by_side(frames: Sequence[pd.DataFrame]) -> list[list[dict[str, Any]]]:
    """Return the rows of each post that all frames have, in the order of the first frame."""
    by_post = []
    for frame in frames:
        rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
        by_post.append({row["post"]: row for row in rows})
    shared = [post for post in by_post[0] if all(post in rows for rows in by_post)]
    return [[rows[post] for rows in by_post] for post in shared]
