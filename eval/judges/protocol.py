"""What a judge is and what it says: comparisons, replies, verdicts. No torch, no server.

A verdict is one of policy, reference, tie and unjudged. Both orders of a pair are asked, because
judges lean towards the text shown first. A reply that says nothing usable is `unjudged`: never a
coin flip and never a loss (the code of Huang et al. 2024 has both, section E.1).
"""

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

SECONDS_TO_FINISH = 2.0
"""How long a judge that is stopped waits for replies that are under way."""
TOO_LONG = "too long"
"""The `finish_reason` of a post that is longer than the judge takes."""
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
    model: str = ""
    """As the server names it; empty where no model was asked."""
    finish_reason: str = ""
    confidence: float | None = None
    """The judge's probability of its choice, in [0, 1], where it gives one."""
    requested_model: str = ""
    prompt_hash: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    asked: bool = True
    """False where the texts are identical, a tie without a call."""


class Comparison(NamedTuple):
    """A question to a judge: which of two summaries of a post is better."""

    post_id: str
    query: str
    first: str
    second: str


class Judge(Protocol):
    """Whoever can say which of two summaries of a post is better; called from many threads."""

    @property
    def about(self) -> About:
        """Who this is."""

    def compare(self, post_id: str, query: str, first: str, second: str) -> Reply:
        """Compare the summary shown first (A) with the one shown second (B)."""


@runtime_checkable
class Preparing(Protocol):
    """A judge that wants to know beforehand all that it will be asked."""

    def prepare(self, comparisons: Sequence[Comparison], beside: Sequence[Comparison] = ()) -> None:
        """Called once, before the first `compare`, to name a price or to work in batches.

        `beside` was asked before and falls under the same cap on the cost.
        """


@runtime_checkable
class Remembering(Protocol):
    """A judge that keeps its replies, so that not every question is asked anew."""

    @property
    def remembered(self) -> int:
        """Questions that kept replies answered when it was told what it will be asked."""


@runtime_checkable
class Keeping(Protocol):
    """A judge that computes for long, so that its finished parts must outlast an interruption."""

    def keep_in(self, folder: Path) -> None:
        """Called before `prepare`, with a folder that is removed when the stage has finished."""


@runtime_checkable
class Stopping(Protocol):
    """A judge that waits for others, so that it must be told when to stop and when all is asked."""

    def stop(self) -> None:
        """Ask nothing more; what is under way may still end."""

    def finish(self) -> None:
        """Called once after the last comparison, to say what it took."""


@runtime_checkable
class Scoring(Protocol):
    """A judge that gives each text a number, and says so beside its verdicts."""

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the judge's model, as plain data."""

    def scores_of(self, policies: Mapping[str, Sequence[Row]]) -> list[Row]:
        """Rows `policy`, `id`, `score`, `reference_score`, in the judge's own unit."""


def judge_pair(judge: Judge, post_id: str, query: str, first: str, second: str) -> Reply:
    """The judge's reply; texts that differ in nothing but white space tie without a call."""
    if first.split() == second.split():
        text = f"[not asked: {judge.about.name}] the texts are identical"
        return Reply(choice="tie", text=text, asked=False)
    return judge.compare(post_id, query, first, second)


def judge_all(
    judge: Judge,
    comparisons: Sequence[Comparison],
    concurrency: int,
    beside: Sequence[Comparison] = (),
) -> Generator[Reply, None, None]:
    """The replies to all comparisons, in their order, `concurrency` of them under way at once.

    The first error ends it: calls under way are waited for, pending ones are cancelled. A signal,
    or closing the iterator, waits for calls under way for `SECONDS_TO_FINISH` and leaves them.
    `beside` is what was asked before under the same cap on the cost.
    """
    if isinstance(judge, Preparing):
        asked = [one for one in comparisons if one.first.split() != one.second.split()]
        judge.prepare(asked, beside)
    calls = Calls(judge, comparisons, concurrency)
    patience = 0.0
    try:
        for future in calls.futures:
            yield future.result()
    except Exception:
        patience = float("inf")
        raise
    except BaseException:
        patience = SECONDS_TO_FINISH
        raise
    finally:
        calls.end(patience)
    if isinstance(judge, Stopping):
        judge.finish()


class Calls:
    """Calls to a judge in threads that die with the process, unlike those of an executor."""

    def __init__(self, judge: Judge, comparisons: Sequence[Comparison], threads: int) -> None:
        self.judge = judge
        self.futures: list[Future[Reply]] = [Future() for _ in comparisons]
        self.todo = deque(zip(self.futures, comparisons, strict=True))
        count = min(threads, len(comparisons))
        self.threads = [Thread(target=self._work, daemon=True) for _ in range(count)]
        for one in self.threads:
            one.start()

    def _work(self) -> None:
        while True:
            try:
                future, one = self.todo.popleft()
            except IndexError:
                return
            try:
                future.set_result(judge_pair(self.judge, *one))
            except BaseException as error:  # whoever waits for the reply gets it
                future.set_exception(error)

    def end(self, patience: float) -> None:
        """Cancel what is pending; wait `patience` seconds for calls under way."""
        self.todo.clear()
        if isinstance(self.judge, Stopping) and patience:
            self.judge.stop()
        deadline = monotonic() + patience
        for one in self.threads:
            one.join(None if patience == float("inf") else max(0.0, deadline - monotonic()))
