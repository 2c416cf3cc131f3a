"""The interface of judges: comparisons, replies, verdicts. It needs neither torch nor a server.

A verdict is one of policy, reference, tie and unjudged. Each pair is judged in both orders, because
judges favor the text shown first. A reply without a usable verdict is `unjudged`: never a coin flip
and never a loss (the code of Huang et al. 2024 has both).
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

# The `finish_reason` of a post that is too long for the judge, of a post that the server's filter
# refuses, and of a reply that such a filter has cut off or emptied.
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
    """One answer to one comparison; `choice` is None if the text has no usable verdict."""

    choice: Choice | None
    text: str
    requested_model: str = ""
    model: str = ""
    """The model's name according to the server; empty if no model was asked."""
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
        """Whether the texts differ only in white space."""
        return self.first.split() == self.second.split()


def comparison_of(row: Row, order: str) -> Comparison:
    """The question about a summary and its reference, shown in one order."""
    if order == "reference_first":
        return Comparison(row["id"], row["query"], row["reference"], row["summary"])
    return Comparison(row["id"], row["query"], row["summary"], row["reference"])


class Judge:
    """Interface of judges, which say which of two summaries of a post is better.

    Every judge implements `about` and `reply`, and those of the other methods that it needs.
    """

    label = ""
    """How pages name the scores of `scores_of`."""
    keep: Path | None = None
    """A folder for finished parts of a long computation; removed when the stage has finished."""

    @property
    def about(self) -> About:
        """The judge's name and notes."""
        raise NotImplementedError

    def reply(self, comparison: Comparison) -> Reply:
        """Compare the summary shown first (A) with the one shown second (B)."""
        raise NotImplementedError

    def replies(
        self, comparisons: Sequence[Comparison], concurrency: int
    ) -> Generator[Reply, None, None]:
        """Yield the replies in the order of the comparisons, `concurrency` at a time."""
        for comparison in comparisons:
            yield self.reply(comparison)

    def prepare(
        self, comparisons: Sequence[Comparison], earlier: Iterable[Comparison] = ()
    ) -> None:
        """Get ready for all questions: print an estimate of the cost, or score texts in batches.

        Called once before the first `reply`. `earlier`: questions of other stages that count
        toward the same cost cap.
        """

    def finish(self) -> None:
        """Called once after the last comparison, to print what it cost."""

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

    The first error ends it, and so does a signal, or closing it. The judge is prepared before this
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
