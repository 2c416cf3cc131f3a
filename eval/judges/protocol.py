"""What a judge is and what it says: comparisons, replies, verdicts. No torch, no server.

A verdict is `policy`, `reference`, `tie` or `unjudged`. Both orders of a pair are asked, because
judges lean towards the text that is shown first. A reply that says nothing usable is `unjudged`:
never a coin flip and never a loss (the code of Huang et al. 2024 has both).
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal, NamedTuple

# The `finish_reason` of a post that is longer than the judge takes; of one that a server's filter
# refuses to judge; and of a reply that such a filter has cut off or emptied.
TOO_LONG = "too long"
FILTERED = "filtered"
CONTENT_FILTER = "content_filter"

Row = dict[str, Any]
Choice = Literal["A", "B", "tie"]

VERDICTS: dict[str, dict[Choice | None, str]] = {
    "policy_first": {"A": "policy", "B": "reference", "tie": "tie", None: "unjudged"},
    "reference_first": {"A": "reference", "B": "policy", "tie": "tie", None: "unjudged"},
}
"""Order of the two texts -> the judge's choice -> verdict."""


@dataclass(frozen=True, kw_only=True)
class About:
    """Who judged, as the manifest and the pages name it."""

    kind: str
    name: str
    is_llm: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to one comparison."""

    choice: Choice | None
    """None if the text says nothing usable."""
    text: str
    requested_model: str = ""
    model: str = ""
    """As the server names it; empty if no model was asked."""
    finish_reason: str = ""
    prompt_hash: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Comparison(NamedTuple):
    """A question to a judge: which of two summaries of a post is better?"""

    post_id: str
    query: str
    first: str
    second: str

    @property
    def is_identical(self) -> bool:
        """Whether the texts differ only in white space."""
        return self.first.split() == self.second.split()


def comparison_of(row: Row, order: str) -> Comparison:
    """The comparison of a row's summary with its reference, shown in this order."""
    if order == "reference_first":
        first = row["reference"]
        second = row["summary"]
    else:
        first = row["summary"]
        second = row["reference"]
    return Comparison(post_id=row["id"], query=row["query"], first=first, second=second)


class Judge:
    """Says which of two summaries of a post is better. Many threads ask it at the same time.

    Every judge has `about` and `reply`; it overrides the other methods that it needs.
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
        """Compare the summary that is shown first (A) with the one shown second (B)."""
        raise NotImplementedError

    def prepare(
        self, comparisons: Sequence[Comparison], same_cap: Iterable[Comparison] = ()
    ) -> None:
        """Called once with all questions before the first `reply`, to name a price or to batch.

        `same_cap` are other questions that count towards the same cost cap.
        """

    def stop(self) -> None:
        """Ask nothing more; requests that are under way may finish."""

    def finish(self) -> None:
        """Called once after the last comparison, to report what it took."""

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """A scorer's rows of `gold_scores.jsonl`; empty for a judge that gives no scores."""
        return []


def scored_rows(
    policies: Mapping[str, Sequence[Row]], score: Callable[[Row, str], float | None]
) -> list[Row]:
    """One row per summary: `policy`, `id`, its `score`, and the `reference_score`."""
    return [
        {
            "policy": policy,
            "id": row["id"],
            "score": score(row, row["summary"]),
            "reference_score": score(row, row["reference"]),
        }
        for policy, rows in policies.items()
        for row in rows
    ]


def judge_pair(judge: Judge, comparison: Comparison) -> Reply:
    """The judge's reply; texts that differ only in white space tie without a question."""
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
    """The replies to all comparisons, in their order; `concurrency` questions are asked at a time.

    It ends at the first error, at a signal, or when the iterator is closed. After an error, it
    waits for the requests that are under way, so that no reply is lost.

    The judge is prepared by this call, not by the first `next`, so that whoever times the replies
    does not count the preparation.
    """
    to_ask = [comparison for comparison in comparisons if not comparison.is_identical]
    judge.prepare(to_ask, same_cap)
    return _replies(judge, comparisons, concurrency)


def _replies(
    judge: Judge, comparisons: Sequence[Comparison], concurrency: int
) -> Generator[Reply, None, None]:
    threads = max(1, min(concurrency, len(comparisons)))
    with ThreadPool(threads) as pool:
        try:
            yield from pool.imap(partial(judge_pair, judge), comparisons)
        except Exception:
            judge.stop()
            pool.close()
            pool.join()
            raise
    judge.finish()
