"""Signals that ask a stage to stop: what is under way is finished first, then `Stopped` is raised.

The handlers are set in `start.py`; the loops ask here between two updates or parts. One
process has one set of signals, so what has been asked is kept in this module.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

SETTLE_SECONDS = 2.0
"""A launcher passes a signal on to processes that the terminal has signalled already."""
_asked: list[tuple[int, float]] = []  # signal and monotonic time, at most one
_finishing: list[int] = []  # one item for each thing under way that is to be finished first


class Stopped(BaseException):
    """A signal has ended the stage where it can go on; not an Exception, as KeyboardInterrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_asked() -> int:
    """The number of the signal that asked this process to stop, or 0."""
    return _asked[0][0] if _asked else 0


def ask_to_stop(number: int) -> bool:
    """Note a signal; False where one had been noted before, so that this one ends all at once.

    Raises Stopped where nothing is under way that should be finished first.
    """
    if _asked:
        echo = int(os.environ.get("WORLD_SIZE", "1")) > 1
        return echo and time.monotonic() - _asked[0][1] < SETTLE_SECONDS
    _asked.append((number, time.monotonic()))
    if not _finishing:
        raise Stopped(number)
    return True


def forget_signals() -> None:
    """As if no signal had come: for the next stage in this process."""
    _asked.clear()
    _finishing.clear()


def stop_if_asked() -> None:
    """Raise Stopped where a signal has come."""
    if stop_asked():
        raise Stopped(stop_asked())


@contextmanager
def finishing_first() -> Iterator[None]:
    """Around what a signal must not interrupt; whoever uses it asks `stop_asked` in time."""
    _finishing.append(1)
    try:
        yield
    finally:
        del _finishing[-1:]
