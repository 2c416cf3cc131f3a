"""The progress and the metrics of a stage: a progress bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from stages.runs.text import COLUMNS, duration

T = TypeVar("T")
Note = Callable[[int, float], None]
Numbers = Callable[[], Mapping[str, Any]]

SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_NOTES = 2.0
SECONDS_BETWEEN_DRAWINGS = 0.2
SECONDS_BEFORE_DRAWING = 1.0

# The metrics and results of a stage that are shown, with their formats; the first matter most.
SHOWN = {
    "objective/scores": "score {:.2f}",
    "objective/kl": "KL {:.1f}",
    "loss/train": "loss {:.3f}",
    "accuracy/train": "accuracy {:.0%}",
    "rewards/accuracies": "accuracy {:.0%}",
    "accuracy": "{:.1%} of held-out pairs right",
    "loss": "held-out loss {:.3f}",
    "loss/validation": "held-out loss {:.3f}",
    "rougeL": "ROUGE-L {:.3f}",
    "mean_before": "mean score of the references was {:.2f}",
    "policy/response_length": "length {:.1f}",
    "policy/eos_rate": "EOS {:.0%}",
    "val/explained_variance": "explained variance {:.2f}",
    "judgements": "{} verdicts",
    "unjudged": "{:.1%} unjudged",
}


def is_terminal() -> bool:
    """Return whether a person is watching: neither output nor errors go to a file or a pipe."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def progress(
    items: Iterable[T],
    label: str,
    total: int,
    done: int = 0,
    note: Note | None = None,
    numbers: Numbers = dict,
) -> Iterator[T]:
    """Yield the items, and show how many are done and how long the rest will take.

    `done` of the `total` were done before. Every few seconds, `note` is called with the number of
    items that are done and the number of seconds left. `numbers` returns the latest metrics.
    """
    started = time.monotonic()
    last_line = started
    last_note = started
    line = ProgressLine(label, total) if is_terminal() else None
    try:
        for count, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            seconds_left = (now - started) / count * (total - done - count)
            if note is not None and now - last_note >= SECONDS_BETWEEN_NOTES:
                note(done + count, seconds_left)
                last_note = now
            if line is not None:
                line.draw(done + count, seconds_left, numbers())
            elif now - last_line >= SECONDS_BETWEEN_LINES and done + count < total:
                print_line(f"{label}: {done + count}/{total}, {seconds_left:.0f} s left", numbers())
                last_line = now
    finally:
        if line is not None:
            line.clear()


class ProgressLine:
    """A bar with the time left, and the latest metrics below it; only one is drawn at a time."""

    drawn: "ProgressLine | None" = None
    """The bar on the terminal. An outer loop keeps it while an inner loop runs."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.live: Any = None
        self.next_drawing = time.monotonic() + SECONDS_BEFORE_DRAWING

    def draw(self, done: int, seconds_left: float, numbers: Mapping[str, Any]) -> None:
        """Draw the bar, unless it was drawn a moment ago or an outer loop shows one."""
        now = time.monotonic()
        if now < self.next_drawing or ProgressLine.drawn not in (None, self):
            return
        self.next_drawing = now + SECONDS_BETWEEN_DRAWINGS
        if self.live is None:
            self._start()
        head = f"{self.label}  {done}/{self.total}"
        tail = f"{duration(seconds_left)} left"
        width = max(4, COLUMNS - len(head) - len(tail) - 4)
        filled = min(width, round(width * done / max(1, self.total)))
        bar = "━" * filled + "─" * (width - filled)
        text = f"{head}  {bar}  {tail}\n{numbers_text(numbers)}".rstrip()
        self.live.update(text, refresh=True)

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # No thread redraws it: that would take time from the computation.
        console = Console(stderr=True, width=COLUMNS, highlight=False, markup=False)
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.live.start()
        console.show_cursor(True)  # a process that is killed could not show it again
        ProgressLine.drawn = self

    def clear(self) -> None:
        """Remove the bar from the terminal."""
        if self.live is not None:
            self.live.stop()
            ProgressLine.drawn = None


def say_result(stage: str, seconds: float, results: Mapping[str, Any]) -> None:
    """Print one line with a stage's time and result; a terminal shows a table instead."""
    if numbers_text(results) and not is_terminal():
        print_line(f"{stage}: done in {seconds:.0f} s", results)


def print_line(start: str, numbers: Mapping[str, Any]) -> None:
    """Print a text and the numbers worth showing on stderr."""
    shown = numbers_text(numbers)
    print(f"{start}: {shown}" if shown else start, file=sys.stderr, flush=True)


def numbers_text(numbers: Mapping[str, Any]) -> str:
    """Return the metrics or results that are worth showing: `score 1.53, KL 3.1`."""
    parts = []
    if "loss/value_avg" in numbers and "loss/policy_avg" not in numbers:
        parts.append("critic warm-up")
    for name, form in SHOWN.items():
        value = numbers.get(name)
        if isinstance(value, int | float):
            parts.append(form.format(value))
    return ", ".join(parts)
