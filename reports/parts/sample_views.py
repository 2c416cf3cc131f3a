"""Summaries on a page: plain rows, and the block that lets a reader search them.

A row is a held-out post with what each policy wrote about it and what was said of it: `id`, `post`,
`reference` and `sides`, one a policy in the order of `policies_of`. A side:

text, tokens     the summary and its length, tokens with EOS (None of given summaries)
score, kl        the reward model's score, and the log-ratio to SFT in nats; None where not known
ends             whether it ends by itself
points           mean verdict of both orders against the reference in [0, 1], None if unjudged
verdict          won, even, lost or unjudged
said             the judge's own words: `shown` as A or B, whom it `prefers`, the `text`

The data lie in the page. Without JavaScript, and in Markdown, the first few rows stand there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from reports.parts.blocks import Block, Sample
from reports.parts.collect import Record, policies_of
from reports.parts.page import as_data
from reports.parts.words import Row

SCORES = "post_scores.jsonl"
PLACES = {"policy_first": "A", "reference_first": "B"}
WON, EVEN, LOST, UNJUDGED = "won", "even", "lost", "unjudged"
BETTER, WORSE, FAILING, UNCHANGED = "better", "worse", "failing", "unchanged"
HEIGHTS = {LOST: 0, EVEN: 1, WON: 2}
MOST_SAMPLES = 200
MOST_BYTES = 2_500_000  # of all samples; a page stays below 5 MB
REFERENCE = "the reference"


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
        "tokens": row.get("reference_tokens"),  # given summaries have no tokens and no scores
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


# -- held-out posts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleBrowser(Block):
    """Posts with all that was written about them, and what was said of it."""

    template = "sample_browser.html"
    style = "sample_browser.css"
    script = "sample_browser.js"
    name: str
    """Of the element on the page."""
    sides: Sequence[str]
    """Who wrote the summaries of each post, in their order."""
    posts: Sequence[Row]
    """Rows as this module describes them."""
    few: Sequence[Sample]
    """What stands there where no script runs."""
    against: str = REFERENCE
    """With what each summary was compared."""
    shown: int = -1
    """The side whose verdicts and numbers are filtered and sorted at first."""

    @property
    def data(self) -> Row:
        """What the script reads."""
        shown = self.shown % len(self.sides)
        return {
            "sides": list(self.sides),
            "against": self.against,
            "shown": shown,
            "posts": list(self.posts),
        }

    def markdown(self, stem: str) -> str:
        """The first few."""
        return "\n\n".join(sample.markdown(stem) for sample in self.few)

    def inside(self) -> Sequence[Block]:
        """The first few."""
        return self.few

    def without_the_data(self) -> "SampleBrowser":
        """The policies' own words: no post, no reference, and no judge who may quote them."""
        return replace(
            self,
            posts=[
                row
                | {"post": None, "reference": None}
                | {"sides": [side | {"said": []} for side in row["sides"]]}
                for row in self.posts
            ],
            few=[sample.without_the_data() for sample in self.few],
        )


def fitting(rows: Iterable[Row], most: int = MOST_SAMPLES, size: int = MOST_BYTES) -> list[Row]:
    """The first rows, as many as a page holds."""
    rows_that_fit: list[Row] = []
    for row in rows:
        size -= len(as_data(row))
        if len(rows_that_fit) == most or size < 0:
            break
        rows_that_fit.append(row)
    return rows_that_fit
