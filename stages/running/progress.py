"""How many items are done and how long the rest takes: a bar on a terminal, lines in a log.

Standard library only, but for the bar, which is tqdm's.
"""

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Note = Callable[[int, float], None]
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_NOTES = 2.0
LOG_WIDTH = 80


def progress(
    items: Iterable[T], label: str, total: int, done: int = 0, note: Note | None = None
) -> Iterator[T]:
    """Pass the items on; show how many are done and how long the rest takes.

    `done` of the `total` were done before. Every few seconds `note` is called with the number of
    items that are done and the seconds that are left.
    """
    started = last_line = last_note = time.monotonic()
    terminal = sys.stderr.isatty()
    for count, item in enumerate(_bar(items, label, total, done) if terminal else items, start=1):
        yield item
        now = time.monotonic()
        left = (now - started) / count * (total - done - count)
        if note is not None and now - last_note >= SECONDS_BETWEEN_NOTES:
            note(done + count, left)
            last_note = now
        due = now - last_line >= SECONDS_BETWEEN_LINES and done + count < total
        if due and not terminal:
            print(
                f"{label}: {done + count}/{total}, {left:.0f} s left", file=sys.stderr, flush=True
            )
            last_line = now
    if not terminal:
        took = time.monotonic() - started
        print(f"{label}: {total} done in {took:.0f} s", file=sys.stderr, flush=True)


def _bar(items: Iterable[T], label: str, total: int, done: int) -> Iterable[T]:
    from tqdm import tqdm

    return tqdm(items, desc=label, total=total, initial=done, ncols=LOG_WIDTH)


COLUMNS = 80
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
