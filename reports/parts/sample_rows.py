"""Held-out posts with what each policy wrote about them and what was said of it, as plain rows.

A row is `id`, `post`, `reference` and `sides`, one a policy in the order of `policies_of`. A side:

text, tokens     the summary and its length, tokens with EOS (None of given summaries)
score, kl        the reward model's score, and the log-ratio to SFT in nats; None where not known
ends             whether it ends by itself
points           mean verdict of both orders against the reference in [0, 1], None if unjudged
verdict          won, even, lost or unjudged
said             the judge's own words: `shown` as A or B, whom it `prefers`, the `text`
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from reports.parts.collect import Record, policies_of

Row = dict[str, Any]
SCORES = "post_scores.jsonl"
PLACES = {"policy_first": "A", "reference_first": "B"}
WON, EVEN, LOST, UNJUDGED = "won", "even", "lost", "unjudged"
BETTER, WORSE, FAILING, UNCHANGED = "better", "worse", "failing", "unchanged"
HEIGHTS = {LOST: 0, EVEN: 1, WON: 2}


def post_rows(record: Record, policies: Sequence[str] = ()) -> list[Row]:
    """The posts that these policies of a run summarised, or all of them, in the data's order."""
    names = policies or policies_of(record)
    written = [by_id(record.rows("summaries", f"{name}.jsonl")) for name in names]
    points = {(row["policy"], row["id"]): row["score"] for row in record.rows("win_rate", SCORES)}
    words_of = sentences(record.rows("judge", "judgements.jsonl"))
    first, *others = written
    shared = [post for post in first if all(post in other for other in others)]
    return [
        {
            "id": post,
            "post": first[post]["query"],
            "reference": reference_of(first[post]),
            "sides": [
                side_of(rows[post], points.get((name, post)), words_of.get((name, post), []))
                for name, rows in zip(names, written, strict=True)
            ],
        }
        for post in shared
    ]


def by_id(rows: Iterable[Row]) -> dict[str, Row]:
    """Summaries by the id of their post."""
    return {row["id"]: row for row in rows}


def reference_of(row: Row) -> Row:
    """The reference of a row of summaries."""
    return {
        "text": row["reference"],
        "tokens": row.get("reference_tokens"),
        "score": finite(row.get("reference_score")),
    }


def side_of(row: Row, points: float | None, words: Sequence[Row]) -> Row:
    """A row of summaries with what was said of it."""
    return {
        "text": row["summary"],
        "tokens": row.get("tokens"),
        "score": finite(row.get("score")),
        "kl": finite(row.get("kl")),
        "ends": row.get("has_eos"),
        "points": points,
        "verdict": verdict_of(points),
        "said": list(words),
    }


def sentences(judgements: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """(policy, post id) -> what the judge said of it in each order."""
    by_summary: dict[tuple[str, str], list[Row]] = {}
    for judgement in judgements:
        sentence = {
            "shown": PLACES[judgement["order"]],
            "prefers": judgement["verdict"],
            "text": judgement.get("reply") or "",
        }
        by_summary.setdefault((judgement["policy"], judgement["id"]), []).append(sentence)
    return by_summary


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


def finite(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return value if value is not None and isfinite(value) else None
