"""What a judge is and what it says: comparisons, replies, verdicts. No torch, no server.

A verdict is one of policy, reference, tie and unjudged. Both orders of a pair are asked, because
judges lean towards the text shown first. A reply that says nothing usable is `unjudged`: never a
coin flip and never a loss (the code of Huang et al. 2024 has both).
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

# The `finish_reason` of a post that is longer than the judge takes, of one that a server's filter
# refuses to judge, and of a reply that such a filter has cut off or emptied.
TOO_LONG, FILTERED, CONTENT_FILTER = "too long", "filtered", "content_filter"
Row = dict[str, Any]
Choice = Literal["A", "B", "tie"]

VERDICTS: dict[str, dict[Choice | None, str]] = {
    "policy_first": {"A": "policy", "B": "reference", "tie": "tie", None: "unjudged"},
    "reference_first": {"A": "reference", "B": "policy", "tie": "tie", None: "unjudged"},
}


@dataclass(frozen=True, kw_only=True)
class About:
    """Who judged, as the manifest and the reports name it."""

    kind: str
    name: str
    is_llm: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer to one comparison; `choice` is None where the text says nothing usable."""

    choice: Choice | None
    text: str
    requested_model: str = ""
    model: str = ""
    """As the server names it; empty where no model was asked."""
    finish_reason: str = ""
    prompt_hash: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Comparison(NamedTuple):
    """A question to a judge: which of two summaries of a post is better."""

    post_id: str
    query: str
    first: str
    second: str

    @property
    def is_identical(self) -> bool:
        """Whether the texts differ in nothing but white space."""
        return self.first.split() == self.second.split()


def comparison_of(row: Row, order: str) -> Comparison:
    """The question that a summary and its reference make, shown in one order."""
    first, second = row["summary"], row["reference"]
    if order == "reference_first":
        first, second = second, first
    return Comparison(row["id"], row["query"], first, second)


class Judge:
    """Whoever can say which of two summaries of a post is better; asked from many threads.

    Every judge has `about` and `reply`, and of the other methods those that it needs.
    """

    label = ""
    """How pages name the scores of `scores_of`."""
    keep: Path | None = None
    """A folder for finished parts of a long computation; removed when the stage has finished."""

    @property
    def about(self) -> About:
        """Who this is."""
        raise NotImplementedError

    def reply(self, comparison: Comparison) -> Reply:
        """Compare the summary shown first (A) with the one shown second (B)."""
        raise NotImplementedError

    def prepare(
        self, comparisons: Sequence[Comparison], same_cap: Iterable[Comparison] = ()
    ) -> None:
        """Called once, before the first `reply`, with all questions, and with those asked before
        that fall under the same cap on the cost: to name a price, or to batch.
        """

    def stop(self) -> None:
        """Ask nothing more; what is under way may still end."""

    def finish(self) -> None:
        """Called once after the last comparison, to say what it took."""

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """A reward model's scores: rows `policy`, `id`, `score`, `reference_score`, in its unit."""
        return []


def scored_rows(
    policies: Mapping[str, Sequence[Row]], score: Callable[[Row, str], float | None]
) -> list[Row]:
    """The score of each policy's `summary` and of the `reference`, one row a summary."""
    return [
        {
            "policy": name,
            "id": row["id"],
            "score": score(row, row["summary"]),
            "reference_score": score(row, row["reference"]),
        }
        for name, rows in policies.items()
        for row in rows
    ]


def judge_pair(judge: Judge, comparison: Comparison) -> Reply:
    """The judge's reply; texts that differ in nothing but white space tie without a call."""
    if comparison.is_identical:
        text = f"[not asked: {judge.about.name}] the texts are identical"
        return Reply(choice="tie", text=text)
    return judge.reply(comparison)


def judge_all(
    judge: Judge,
    comparisons: Sequence[Comparison],
    concurrency: int,
    same_cap: Iterable[Comparison] = (),
) -> Generator[Reply, None, None]:
    """The replies to all comparisons, in their order, `concurrency` of them under way at once.

    The first error ends it, as a signal does, or closing the iterator. After an error calls under
    way are waited for, so that no reply is lost. The judge is prepared at once, so the clock of
    whoever counts replies begins after that.
    """
    judge.prepare([pair for pair in comparisons if not pair.is_identical], same_cap)
    return _replies(judge, comparisons, concurrency)


def _replies(
    judge: Judge, comparisons: Sequence[Comparison], concurrency: int
) -> Generator[Reply, None, None]:
    with ThreadPool(max(1, min(concurrency, len(comparisons)))) as pool:
        try:
            yield from pool.imap(partial(judge_pair, judge), comparisons)
        except Exception:
            judge.stop()
            pool.close()
            pool.join()
            raise
    judge.finish()
