"""One interpreter that loads the libraries once, and forks each stage of a run from itself.

To load torch and transformers takes a core some ten seconds, and the run on the built-in world has
six stages that do; the others load numpy and scipy. Nothing but imports happens before the fork,
so a stage finds what a new interpreter would give it. Where there is an accelerator each stage has
an interpreter of its own: a driver that some import has woken does not survive a fork.

The pipeline writes a line of JSON with a stage's module and arguments; the answer is a line with
its exit status.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from stages.driving.start import load
from stages.running.signals import handled_signals
from stages.settings.checks import UserError, fail, in_one_line, what_to_mend

PR_SET_PDEATHSIG = 1  # of Linux, where alone stages are forked
DRIVERS = ("nvidia*", "nvmap", "dxg", "kfd", "accel*")


def can_be_forked() -> bool:
    """Whether stages may be forked on this machine: Linux, and no accelerator."""
    has_driver = any(any(Path("/dev").glob(pattern)) for pattern in DRIVERS)
    return sys.platform == "linux" and not has_driver


# -- the pipeline's side ---------------------------------------------------------------------------


class Warm:
    """The interpreter, as the pipeline sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """It starts at once, and loads what the first stage imports when that is asked for."""
        answers, answer = os.pipe()
        words = [sys.executable, "-m", "stages.driving.warm", str(answer)]
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, pass_fds=[answer]
        )
        os.close(answer)
        self.answers = os.fdopen(answers)

    def run(self, words: Sequence[str]) -> int:
        """Run a stage, given as its module and arguments, to its end; its return code."""
        pipe: Any = self.process.stdin
        with suppress(BrokenPipeError):
            pipe.write(json.dumps(list(words)).encode() + b"\n")
            pipe.flush()
        answer = self.answers.readline()
        return int(answer) if answer else self.process.wait() or 1

    @property
    def ended(self) -> bool:
        """Whether it has ended, so that the next stage needs another one."""
        return self.process.poll() is not None

    def close(self) -> None:
        """End it."""
        with suppress(BrokenPipeError):
            self.process.communicate()
        self.answers.close()


# -- the interpreter's side ------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    """Fork the stages that stdin asks for; the end of each goes to the pipe in the argument."""
    (pipe,) = sys.argv[1:] if argv is None else argv
    try:
        with os.fdopen(int(pipe), "w", buffering=1) as answers:
            stage = serve(answers)
    except KeyboardInterrupt:  # no stage is under way: there is nothing to say
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:  # the pipeline was killed
        return
    if stage is not None:
        module, arguments = stage
        with in_one_line():
            module.main(arguments)


def serve(answers: IO[str]) -> tuple[ModuleType, list[str]] | None:
    """Fork stage after stage; returns in each child what it is to run, and at the end None.

    Ends the process with one line where a package is missing that the stage loads.
    """
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            module = load(name)
        except Exception as error:
            line = what_to_mend(error)
            if line is None:
                raise
            fail(UserError(line))
        sys.stdout.flush()
        # Until it is known who handles them.
        signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())
        parent, child = os.getpid(), os.fork()
        if not child:
            become_stage(parent)
            return module, arguments
        answers.write(f"{status_of(child)}\n")
    return None


def become_stage(parent: int) -> None:
    """Leave the pipeline's requests to the parent: a stage reads nothing from stdin.

    It dies with its parent, because the pipeline would take it for dead.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())


def status_of(child: int) -> int:
    """Wait for a stage's end; its return code as `subprocess` gives it: a signal is negative.

    A Ctrl-C reaches the stage from the terminal; what is sent to this process alone is passed on.
    """

    def pass_on(number: int, frame: Any) -> None:
        if number != signal.SIGINT:
            os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in handled_signals()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
