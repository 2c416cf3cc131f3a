"""What a judge is and what it says: comparisons, replies, verdicts. No torch, no server.

A verdict is one of policy, reference, tie and unjudged. Both orders of a pair are asked, because
judges lean towards the text shown first. A reply that says nothing usable is `unjudged`: never a
coin flip and never a loss (the code of Huang et al. 2024 has both).
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

# The `finish_reason` of a post that is longer than the judge takes, of a post that a filter of the
# server refuses, and of a reply that such a filter has cut off or emptied.
TOO_LONG = "too long"
FILTERED = "filtered"
CONTENT_FILTER = "content_filter"
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
    if order == "reference_first":
        return Comparison(row["id"], row["query"], row["reference"], row["summary"])
    return Comparison(row["id"], row["query"], row["summary"], row["reference"])


class Judge:
    """Interface of judges, which say which of two summaries of a post is better.

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

    def replies(
        self, comparisons: Sequence[Comparison], concurrency: int
    ) -> Generator[Reply, None, None]:
        """Yield the replies in the order of the comparisons, `concurrency` asked for at once."""
        for comparison in comparisons:
            yield self.reply(comparison)

    def prepare(
        self, comparisons: Sequence[Comparison], earlier: Iterable[Comparison] = ()
    ) -> None:
        """Get ready for all questions: print an estimate of the cost, or score texts in batches.

        Called once before the first `reply`. `earlier`: questions of other stages that count
        towards the same spending limit.
        """

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
    """Return the judge's reply; texts that differ only in white space tie without a question."""
    return tie_of_identical(judge) if comparison.is_identical else judge.reply(comparison)


def tie_of_identical(judge: Judge) -> Reply:
    """Return the reply for two texts that differ only in white space."""
    return Reply(choice="tie", text=f"[not asked: {judge.about.name}] the texts are identical")


def judge_all(
    judge: Judge,
    comparisons: Sequence[Comparison],
    concurrency: int,
    earlier: Iterable[Comparison] = (),
) -> Generator[Reply, None, None]:
    """Return an iterator of the replies to all comparisons, in their order.

    The first error ends it, as does a signal, or closing it. The judge is prepared before this
    function returns, so that a progress bar does not count that time.
    """
    different = [comparison for comparison in comparisons if not comparison.is_identical]
    judge.prepare(different, earlier)

    def replies() -> Generator[Reply, None, None]:
        with closing(judge.replies(different, concurrency)) as asked:
            for comparison in comparisons:
                yield tie_of_identical(judge) if comparison.is_identical else next(asked)
        judge.finish()

    return replies()
