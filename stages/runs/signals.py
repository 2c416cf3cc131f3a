"""Signals that stop the work: the first one saves, the second one ends the process at once.

Training and measuring run inside `finishing_first()`. There a signal is only noted; the loop checks
for it (`stop_asked`) between two updates or batches, saves, and raises `Stopped`. Anywhere else a
signal raises `Stopped` immediately. Ctrl-C, SIGTERM and a closing terminal (SIGHUP, unless `nohup`
ignores it) are treated alike.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from stages.config.environment import is_one_of_several
from stages.config.errors import discard_output

SETTLE_SECONDS = 2.0
"""Make forwards a SIGTERM that this process may already have received, and a launcher forwards
every signal. Within this time a repeated signal counts as the first one."""


class Stopped(BaseException):
    """A signal has stopped the work, which can be resumed. Not an Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Received:
    """The signals that this process has received; a process has one set of signal handlers."""

    first: int = 0
    """The number of the first signal; 0 before any."""
    since: float = 0.0
    """When it came, by the monotonic clock."""
    unfinished: int = 0
    """How many `finishing_first` contexts are open."""
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Running launchers, to which SIGTERM and SIGHUP are forwarded."""


RECEIVED = Received()


def stop_asked() -> int:
    """Return the number of the signal that asked this process to stop, or 0."""
    return RECEIVED.first


def forget_signals() -> None:
    """Forget all signals that this process has received."""
    RECEIVED.first = 0
    RECEIVED.unfinished = 0
    RECEIVED.children.clear()


@contextmanager
def finishing_first() -> Iterator[None]:
    """Let no signal interrupt the block, which must call `stop_asked` regularly."""
    RECEIVED.unfinished += 1
    try:
        yield
    finally:
        RECEIVED.unfinished = max(0, RECEIVED.unfinished - 1)


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop the work; SIGHUP only if `nohup` does not ignore it."""
    always = (signal.SIGINT, signal.SIGTERM)
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return always if is_ignored else (*always, signal.SIGHUP)


def note_signal(number: int) -> bool:
    """Note a signal; return False if it must end the process at once.

        the first signal                               finish what is under way, and save
        the same again at once, but not Ctrl-C         ignored: make has passed it on
        any within SETTLE_SECONDS, in a launch         ignored: the launcher has passed it on
        any other second signal                        end the process at once

    Raises Stopped if nothing is under way that must be finished first.
    """
    if RECEIVED.first == 0:
        RECEIVED.first = number
        RECEIVED.since = time.monotonic()
        if not RECEIVED.unfinished:
            raise Stopped(number)
        return True

    is_passed_on = number == RECEIVED.first and number != signal.SIGINT
    is_recent = time.monotonic() - RECEIVED.since < SETTLE_SECONDS
    return is_recent and (is_one_of_several() or is_passed_on)


@contextmanager
def signals_handled(resume_command: str) -> Iterator[None]:
    """Handle signals as this module says; `Stopped` passes through.

    If `resume_command` is empty, nothing is printed: another process, which started this one, does.
    """

    def handle(number: int, _: Any) -> None:
        is_first = RECEIVED.first == 0
        for child in RECEIVED.children:
            if number != signal.SIGINT:  # a Ctrl-C reaches the child from the terminal
                child.send_signal(number)
        if not note_signal(number):
            say_stopped(number, resume_command)
            os._exit(128 + number)  # the last save remains valid
        if is_first and resume_command:
            say_at_once(number)

    forget_signals()
    before = {number: signal.signal(number, handle) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stopping_on_signals(resume_command: str) -> Iterator[None]:
    """Like `signals_handled`, and end the process with one line when a signal has stopped the work.

    The line is printed while signals are still handled, because the same signal may come again.
    """
    with signals_handled(resume_command):
        try:
            yield
        except Stopped as stopped:
            say_stopped(stopped.number, resume_command)
            raise SystemExit(128 + stopped.number) from None


def say_at_once(number: int) -> None:
    """Print to stderr, unbuffered, that a signal has arrived and what happens now."""
    leave_closed_terminal()
    name = signal.Signals(number).name
    line = f"\n{name}: finishing the current update or batch; a second signal stops at once\n"
    with suppress(OSError):
        os.write(2, line.encode())


def say_stopped(number: int, resume_command: str) -> None:
    """Print to stderr which command resumes the work; nothing if no command is given."""
    leave_closed_terminal()
    if resume_command:
        name = signal.Signals(number).name
        print(f"stopped by {name}: `{resume_command}` resumes", file=sys.stderr, flush=True)


def leave_closed_terminal() -> None:
    """Discard output if the terminal has closed: an error would interrupt the work being saved."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.write(stream.fileno(), b"")
        except OSError:
            discard_output(stream)
