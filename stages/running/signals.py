"""Signals that ask a stage to stop: it finishes what is under way, then `Stopped` is raised.

`stages/driving/start.py` sets the handlers. The loops ask here between two updates or parts. One
process has one set of signals, so this module keeps what has been asked.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stages.settings.checks import print_nowhere, say_error

SETTLE_SECONDS = 2.0
"""What drives a process passes a signal on that it already had from the terminal or with its group.
Within this time it counts as the same signal."""
ANSWER = "{}: finishes the update or batch that is under way; a second one stops now\n"
CALLER_SAYS_STOP = "CALLER_SAYS_STOP"
"""Set by a caller that says itself how its whole work goes on, so that a stop is one line."""
GOES_ON_WITH = "GOES_ON_WITH"
"""Set by a caller: make variables that belong to the command with which a stage goes on."""
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


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a stage: Ctrl-C, SIGTERM, and a terminal that closes, unless `nohup`
    has that ignored.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return always if ignored else (*always, signal.SIGHUP)


def ask_to_stop(number: int) -> bool:
    """Note a signal; False if it is the second one, which ends the process at once.

    Raises Stopped if nothing is under way that must be finished first.
    """
    if _asked:
        first, since = _asked[0]
        passed_on = number == first and number != signal.SIGINT  # Ctrl-C may be pressed twice
        echo = passed_on or int(os.environ.get("WORLD_SIZE", "1")) > 1
        return echo and time.monotonic() - since < SETTLE_SECONDS
    _asked.append((number, time.monotonic()))
    if not _finishing:
        raise Stopped(number)
    if os.environ.get("RANK", "0") == "0" and CALLER_SAYS_STOP not in os.environ:
        answer_at_once(number)
    return True


def answer_at_once(number: int) -> None:
    """Say on stderr that a signal has come, and what happens now; in a handler, nothing waits."""
    leave_closed_terminal()
    with suppress(OSError):
        os.write(2, ANSWER.format(signal.Signals(number).name).encode())


def say_if_killed(stage: str, status: int) -> None:
    """Say on stderr that a stage was killed: it could not say so itself."""
    if status == 128 + signal.SIGKILL:
        say_error(
            f"error: stage {stage} was killed (SIGKILL), by somebody or for lack of memory: the"
            " same command, without REPLACE, goes on"
        )


def leave_closed_terminal() -> None:
    """Where the terminal has closed, print nowhere: an error there would end what is finishing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.write(stream.fileno(), b"")
        except OSError:
            print_nowhere(stream)


def forget_signals() -> None:
    """Forget all signals, for the next stage in this process."""
    _asked.clear()
    _finishing.clear()


@contextmanager
def finishing_first() -> Iterator[None]:
    """A context that no signal interrupts; the code in it must call `stop_asked` often enough."""
    _finishing.append(1)
    try:
        yield
    finally:
        del _finishing[-1:]
