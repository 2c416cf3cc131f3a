"""How many items are done, how long the rest takes, and what is learned meanwhile: a bar on a
terminal, lines in a log.

Standard library only, but for the bar, which is tqdm's.
"""

import os
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
# Metrics that are shown while a stage learns, and how; the first matter most. EV: the share of the
# variance of returns that the critic explains.
WATCHED = {
    "objective/scores": "score {:.2f}",
    "objective/kl": "KL {:.1f}",
    "loss/train": "loss {:.3f}",
    "accuracy/train": "accuracy {:.0%}",
    "rewards/accuracies": "accuracy {:.0%}",
    "loss/validation": "held-out loss {:.3f}",
    "policy/response_length": "length {:.1f}",
    "policy/eos_rate": "end {:.0%}",
    "val/explained_variance": "EV {:.2f}",
}
# Results that a stage ends with.
ENDED_WITH = {
    "objective/scores": "score {:.2f}",
    "objective/kl": "KL {:.1f} nats",
    "policy/eos_rate": "{:.0%} end",
    "policy/response_length": "{:.1f} tokens",
    "accuracy": "{:.1%} of held-out pairs right",
    "loss": "loss {:.3f} there",
    "loss/validation": "held-out loss {:.3f}",
    "rougeL": "ROUGE-L {:.3f}",
    "mean_before": "mean score of the references was {:.2f}",
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
            watched = with_numbers("", parts_of(WATCHED, numbers()), columns() - len(label) - BAR)
            bar.set_postfix_str(watched, refresh=False)
        elif now - last_line >= SECONDS_BETWEEN_LINES and done + count < total:
            _say(f"{label}: {done + count}/{total}, {left:.0f} s left", WATCHED, numbers())
            last_line = now
    if not terminal:
        took = time.monotonic() - started
        _say(f"{label}: {total} done in {took:.0f} s", WATCHED, numbers())


def say_result(stage: str, seconds: float, results: Mapping[str, Any]) -> None:
    """One line about a stage that has finished; nothing where no result is one to look at."""
    if parts_of(ENDED_WITH, results):
        _say(f"{stage}: done in {seconds:.0f} s", ENDED_WITH, results)


def parts_of(names: Mapping[str, str], numbers: Mapping[str, Any]) -> list[str]:
    """The numbers that have one of these names, in the order of the names, as they are shown."""
    known = {name: numbers.get(name) for name in names}
    return [names[k].format(v) for k, v in known.items() if isinstance(v, int | float)]


def with_numbers(start: str, parts: Sequence[str], width: int) -> str:
    """A text and as many of the numbers as there is room for."""
    kept = [*parts]
    while kept and len(text := f"{start}: {', '.join(kept)}".removeprefix(": ")) > width:
        kept.pop()
    return text if kept else start


def columns() -> int:
    """Of a line: 80, or fewer where COLUMNS says so, because a name will stand before it."""
    columns = os.environ.get("COLUMNS", "")
    return min(COLUMNS, int(columns)) if columns.isdecimal() else COLUMNS


def _say(start: str, names: Mapping[str, str], numbers: Mapping[str, Any]) -> None:
    line = with_numbers(start, parts_of(names, numbers), columns())
    print(line, file=sys.stderr, flush=True)


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
    """The names in at most `width` characters; a cut one has `…` where letters are missing.

    Letters go from the middle, or from where two names are still told apart. Where no one place
    does that, a cut name ends with its number among them.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    middle = width // 2
    for head in sorted(range(1, width - 1), key=lambda place: abs(place - middle)):
        cut = [_cut(name, head, width) for name in names]
        if len(set(cut)) == len(set(names)):
            return cut
    return [
        name if len(name) <= width else _cut(name, middle, width - len(f"#{place}")) + f"#{place}"
        for place, name in enumerate(names, start=1)
    ]


def _cut(name: str, head: int, width: int) -> str:
    """A name without the letters between its first `head` and as many last ones as there fit."""
    tail = width - head - 1
    return name if len(name) <= width else f"{name[:head]}…{name[len(name) - tail :]}"
