"""Signals that ask a stage to stop: it finishes what is under way, then `Stopped` is raised.

`stages/driving/start.py` sets the handlers. The loops ask here between two updates or parts. One
process has one set of signals, so this module keeps what has been asked.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

SETTLE_SECONDS = 2.0
"""A launcher passes a signal on to processes that already had it from the terminal. Within this
time it counts as the same signal."""
_asked: list[tuple[int, float]] = []  # signal and monotonic time, at most one
_finishing: list[int] = []  # one item for each thing under way that is to be finished first


class Stopped(BaseException):
    """A signal has stopped the stage, which can go on; like KeyboardInterrupt, no Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_asked() -> int:
    """The number of the signal that asked this process to stop, or 0."""
    return _asked[0][0] if _asked else 0


def ask_to_stop(number: int) -> bool:
    """Note a signal; False if it is the second one, which ends the process at once.

    Raises Stopped if nothing is under way that must be finished first.
    """
    if _asked:
        echo = int(os.environ.get("WORLD_SIZE", "1")) > 1
        return echo and time.monotonic() - _asked[0][1] < SETTLE_SECONDS
    _asked.append((number, time.monotonic()))
    if not _finishing:
        raise Stopped(number)
    return True


def forget_signals() -> None:
    """Forget all signals, for the next stage in this process."""
    _asked.clear()
    _finishing.clear()


def stop_if_asked() -> None:
    """Raise Stopped if a signal has come."""
    if stop_asked():
        raise Stopped(stop_asked())


@contextmanager
def finishing_first() -> Iterator[None]:
    """A context that no signal interrupts; the code in it must call `stop_asked` often enough."""
    _finishing.append(1)
    try:
        yield
    finally:
        del _finishing[-1:]
