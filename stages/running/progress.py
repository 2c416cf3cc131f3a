"""How many items are done, how long the rest takes, and what is learned meanwhile: a bar on a
terminal, lines in a log.

Standard library only, but for the bar, which is tqdm's.
"""

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Note = Callable[[int, float], None]
Numbers = Callable[[], Mapping[str, Any]]
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_NOTES = 2.0
COLUMNS = 80
BAR = 34  # columns of a bar that numbers leave to it, its counts and its time
# Metrics and results that a terminal shows of a stage, and how; the first matter most. EV: share
# of the variance of returns that the critic explains.
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
    "policy/eos_rate": "end {:.0%}",
    "val/explained_variance": "EV {:.2f}",
}


def progress(
    items: Iterable[T],
    label: str,
    total: int,
    done: int = 0,
    note: Note | None = None,
    numbers: Numbers = dict,
) -> Iterator[T]:
    """Pass the items on; show how many are done and how long the rest takes.

    `done` of the `total` were done before. Every few seconds `note` is called with the number of
    items that are done and the seconds that are left. `numbers` are those to watch, as they are by
    then, by the names of metrics.
    """
    started = last_line = last_note = time.monotonic()
    terminal = sys.stderr.isatty()
    bar = _bar(items, label, total, done) if terminal else None
    for count, item in enumerate(items if bar is None else bar, start=1):
        yield item
        now = time.monotonic()
        left = (now - started) / count * (total - done - count)
        if note is not None and now - last_note >= SECONDS_BETWEEN_NOTES:
            note(done + count, left)
            last_note = now
        if bar is not None:
            shown = with_numbers("", numbers(), COLUMNS - len(label) - BAR)
            bar.set_postfix_str(shown, refresh=False)
        elif now - last_line >= SECONDS_BETWEEN_LINES and done + count < total:
            _say(f"{label}: {done + count}/{total}, {left:.0f} s left", numbers())
            last_line = now
    if not terminal:
        took = time.monotonic() - started
        _say(f"{label}: {total} done in {took:.0f} s", numbers())


def say_result(stage: str, seconds: float, results: Mapping[str, Any]) -> None:
    """One line about a stage that has finished; nothing where no result is one to look at."""
    if not results.keys().isdisjoint(SHOWN):
        _say(f"{stage}: done in {seconds:.0f} s", results)


def with_numbers(start: str, numbers: Mapping[str, Any], width: int) -> str:
    """A text and as many of the numbers in `SHOWN` as there is room for."""
    known = ((form, numbers.get(name)) for name, form in SHOWN.items())
    parts = [form.format(value) for form, value in known if isinstance(value, int | float)]
    while parts and len(text := f"{start}: {', '.join(parts)}".removeprefix(": ")) > width:
        parts.pop()
    return text if parts else start


def _say(start: str, numbers: Mapping[str, Any]) -> None:
    print(with_numbers(start, numbers, COLUMNS), file=sys.stderr, flush=True)


def _bar(items: Iterable[T], label: str, total: int, done: int) -> Any:
    from tqdm import tqdm

    shown = "{desc}: {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"
    return tqdm(items, desc=label, total=total, initial=done, ncols=COLUMNS, bar_format=shown)


MOST_REPEATED = 40  # a longer name is not repeated on each line


def folded(text: str, more: str = "    ") -> list[str]:
    """A text in lines of at most 80 columns; its own indent stands before the first.

    `more` stands before each other line.
    """
    return textwrap.wrap(text, COLUMNS, subsequent_indent=more, break_on_hyphens=False)


def told(who: str, text: str) -> str:
    """What somebody says, in lines that each begin with the name, so that a log can be searched."""
    mark = f"{who}: "
    return "\n".join(folded(mark + text, mark if len(mark) <= MOST_REPEATED else "    "))


def duration(seconds: float) -> str:
    """Seconds for people: `40 s`, `25 min`, `1 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def shortened(names: Sequence[str], width: int) -> list[str]:
    """The names in at most `width` characters; a cut one ends with its number among them."""
    ends = [f"…#{number}" for number in range(1, len(names) + 1)]
    return [
        name if len(name) <= width else name[: width - len(end)] + end
        for name, end in zip(names, ends, strict=True)
    ]
