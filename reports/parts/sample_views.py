"""Summaries of held-out posts as plain rows: what each policy wrote, and what was said of it.

A row is a post: `id`, `post`, `reference` and `sides`, one a policy in the order of `policies_of`.
A side:

text, tokens     the summary and its length, tokens with EOS (None of given summaries)
score, kl        the reward model's score, and the log-ratio to SFT in nats; None where not known
ends             whether it ends by itself
points           mean verdict of both orders against the reference in [0, 1], None if unjudged
verdict          won, even, lost or unjudged
"""

from collections.abc import Iterable, Sequence

from reports.parts.collect import Record, policies_of
from reports.parts.words import Row

SCORES = "post_scores.jsonl"
WON, EVEN, LOST, UNJUDGED = "won", "even", "lost", "unjudged"
BETTER, WORSE, FAILING, UNCHANGED = "better", "worse", "failing", "unchanged"
HEIGHTS = {LOST: 0, EVEN: 1, WON: 2}


def post_rows(record: Record, policies: Sequence[str] = ()) -> list[Row]:
    """The posts that these policies of a run summarised, or all of them, in the data's order."""
    names = policies or policies_of(record)
    written = [by_id(record.rows("summaries", f"{name}.jsonl")) for name in names]
    points = {(row["policy"], row["id"]): row["score"] for row in record.rows("win_rate", SCORES)}
    first, *others = written
    return [
        {
            "id": post,
            "post": row["query"],
            "reference": {
                "text": row["reference"],
                "tokens": row.get("reference_tokens"),  # given summaries have no tokens, no scores
                "score": row.get("reference_score"),
            },
            "sides": [
                _side(rows[post], points.get((name, post)))
                for name, rows in zip(names, written, strict=True)
            ],
        }
        for post, row in first.items()
        if all(post in other for other in others)
    ]


def by_id(rows: Iterable[Row]) -> dict[str, Row]:
    """Summaries by the id of their post."""
    return {row["id"]: row for row in rows}


def _side(row: Row, points: float | None) -> Row:
    side = {key: row.get(key) for key in ("tokens", "score", "kl")}
    judged = {"points": points, "verdict": verdict_of(points)}
    return {"text": row["summary"], "ends": row.get("has_eos")} | side | judged


def verdict_of(points: float | None) -> str:
    """What both orders say together; a judge that contradicts itself has said even."""
    if points is None:
        return UNJUDGED
    return EVEN if points == 0.5 else WON if points > 0.5 else LOST


def change(before: str, after: str) -> str:
    """How one verdict stands to another on the same post; `failing`: both lose."""
    if UNJUDGED in (before, after):
        return UNJUDGED
    if before == after:
        return FAILING if after == LOST else UNCHANGED
    return BETTER if HEIGHTS[after] > HEIGHTS[before] else WORSE
