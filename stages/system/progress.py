"""How many items are done and how long the rest takes: a bar on a terminal, lines in a log.

Standard library only, but for the bar, which is tqdm's.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
