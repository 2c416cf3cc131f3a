"""Runs commands to their end, each in a process of its own, and hands signals on to them.

To load torch and transformers takes a core some ten seconds, and the run on the built-in world has
six stages that do; the others load numpy and scipy. So this process loads them once, and forks each
stage. It does no work with them, so a stage finds what a new interpreter would give it. Where there
is an accelerator each stage has an interpreter of its own: a driver that some import has woken does
not survive a fork. Standard library only, until a stage is forked.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.driving.start import load, run_module
from stages.running import launch
from stages.running.progress import (
    CALLER_SAYS_STOP,
    GOES_ON_WITH,
    answer_at_once,
    handled_signals,
    leave_closed_terminal,
)
from stages.settings.faults import in_one_line

START = (sys.executable, "-m", "stages.driving.start")
PR_SET_PDEATHSIG = 1  # of Linux, where alone stages are forked
DRIVERS = ("nvidia*", "nvmap", "dxg", "kfd", "accel*")


def can_be_forked() -> bool:
    """Whether stages may be forked on this machine: Linux, and no accelerator."""
    has_driver = any(any(Path("/dev").glob(pattern)) for pattern in DRIVERS)
    return sys.platform == "linux" and not has_driver


class Caller:
    """Calls one command after the other, and stops when told to."""

    def __init__(self, started_by: Sequence[str] = ()) -> None:
        """`started_by`: make variables that belong to the command with which a stage goes on."""
        self.started_by = started_by
        self.stopped = 0
        self.says_stop = False
        """Whether who calls this says how its whole work goes on, so that stages need not."""
        self.running: subprocess.Popen[bytes] | None = None
        self.forked: BaseProcess | None = None
        # Where torch has worked already, a fork would lack its threads.
        self.forks = can_be_forked() and "torch" not in sys.modules

    def __enter__(self) -> Any:
        self.handlers = {number: signal.signal(number, self._stop) for number in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        if self.says_stop and not self.stopped:
            answer_at_once(number)
        leave_closed_terminal()
        self.stopped = 128 + number
        if number != signal.SIGINT:  # a Ctrl-C reaches the stages from the terminal itself
            if self.running is not None:
                launch.hand_on(self.running, number)
            if self.forked is not None and self.forked.pid is not None:
                os.kill(self.forked.pid, number)

    def call(self, words: Sequence[str]) -> int:
        """Run a command to its end; return its exit status, as a shell gives it."""
        # Tools beside this interpreter, such as `accelerate`, are found by their names.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        environment = {**os.environ, "PATH": path, GOES_ON_WITH: " ".join(self.started_by)}
        environment |= {CALLER_SAYS_STOP: "1"} if self.says_stop else {}
        if tuple(words[:3]) == START and self.forks:
            code = self._call_forked(words[3], words[4:], environment)
        else:
            self.running = subprocess.Popen(words, env=environment)
            code, self.running = self.running.wait(), None
        return code if code >= 0 else 128 - code

    def _call_forked(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        """Run a stage in a fork of this process, which loads what it imports."""
        # A Ctrl-C while libraries load ends this process with one line.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            module = load(name)
        finally:
            signal.signal(signal.SIGINT, handler)
        if self.stopped:
            return self.stopped
        stage = (module, arguments, environment, os.getpid())
        self.forked = multiprocessing.get_context("fork").Process(target=_run, args=stage)
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())  # until the stage handles them
        self.forked.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
        self.forked.join()
        code, self.forked = self.forked.exitcode, None
        return code or 0


def _run(
    module: ModuleType, arguments: Sequence[str], environment: Mapping[str, str], parent: int
) -> None:
    """A stage, in its process. It dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    os.environ.update(environment)
    for number in handled_signals():
        is_ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
    with in_one_line():
        run_module(module, [*arguments])
