"""The command line that all stages share: arguments, errors of one line, signals.

    python -m stages.driving.start stages.sft --preset tiny

Exit codes: 2 for what the user can mend, 128 + its number after a signal (130 after a Ctrl-C).
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from stages.driving.trackers import open_trackers
from stages.finished import make_command
from stages.running.progress import (
    CALLER_SAYS_STOP,
    GOES_ON_WITH,
    Stopped,
    ask_to_stop,
    forget_signals,
    handled_signals,
    leave_closed_terminal,
)
from stages.runs import mirrored_by
from stages.settings.checks import (
    UserError,
    card_memory,
    is_out_of_memory,
    launched_processes,
    say_error,
)
from stages.settings.command_line import config_from_arguments
from stages.settings.config import Config
from stages.settings.faults import VisibleStream, in_one_line, what_to_mend
from stages.settings.stages import STAGES

T = TypeVar("T")
Read = Callable[[list[str] | None, str], Config]
OTHER_DIED = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("ncclRemoteError", "remote process exited"),  # NCCL's other errors are one's own
)


def run_stage(
    stage: str,
    function: Callable[[Config], T],
    argv: list[str] | None,
    description: str,
    read: Read = config_from_arguments,
) -> T:
    """Run a stage as its command line asks; `read` makes a config of the command line.

    An error that the user can mend ends the process with one line, and so does a signal.
    """
    with in_one_line():
        launched_processes()
        config = read(argv, description)
    command = f"{make_command(config, stage)} {os.environ.get(GOES_ON_WITH, '')}".rstrip()
    try:
        visible = redirect_stdout(VisibleStream(sys.stdout))
        with ended_by_signal(command), visible, mirrored_by(open_trackers):
            return function(config)
    except UserError as error:
        leave(f"error: {error}")
    except Exception as error:
        line = what_to_mend(error)
        if line is None and is_about_another_process(error):
            line = "another process of this launch has died: look at its error"
        if line is not None:
            if is_out_of_memory(error) and (card := card_memory()):
                line = f"{line} ({card})"
            leave(f"error: stage {stage}: {line}, then run `{command}`")
        if not has_others():
            raise
        leave(traceback.format_exc(), 1)


def leave(text: str, status: int = 2) -> NoReturn:
    """Say why on stderr and end the process."""
    say_error(text)
    end_process(status)
    raise SystemExit(status)


def end_process(status: int = 0) -> None:
    """End a process of a launch of several at once; return if there is only this one.

    An ordinary exit may wait in torch's threads for the others, while they wait for this process,
    and those threads may abort it (status 134): a finished stage would count as failed.
    """
    if has_others():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def has_others() -> bool:
    """Whether this process is one of several of a launch."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def signals_handled(command: str) -> Iterator[None]:
    """Signals stop the stage, which can go on later; a second one ends it at once."""

    def handle(number: int, frame: Any) -> None:
        if not ask_to_stop(number):
            say_how_to_go_on(number, command)
            os._exit(128 + number)  # what was saved before stays good

    forget_signals()
    before = {number: signal.signal(number, handle) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_signal(command: str) -> Iterator[None]:
    """As `run_stage` does, end the process with one line when a signal has stopped the work.

    The line is printed while signals are still handled: the same signal comes again where what
    drives the process passes it on, and would end it without a word.
    """
    with signals_handled(command):
        try:
            yield
        except Stopped as stopped:
            say_how_to_go_on(stopped.number, command)
            end_process(128 + stopped.number)
            raise SystemExit(128 + stopped.number) from None


def say_how_to_go_on(number: int, command: str) -> None:
    """Print how a stage goes on that a signal has stopped; only the main process prints it."""
    leave_closed_terminal()
    if os.environ.get("RANK", "0") == "0" and CALLER_SAYS_STOP not in os.environ:
        name = signal.Signals(number).name
        print(f"stopped by {name}: `{command}` goes on from here", file=sys.stderr, flush=True)


def is_about_another_process(error: Exception) -> bool:
    """Whether an error says that another process of a launch of several is gone."""
    dead = isinstance(error, RuntimeError) and any(x in str(error) for x in OTHER_DIED)
    return has_others() and dead


def load(module: str) -> ModuleType:
    """Import a stage's module; a Ctrl-C meanwhile ends the process with one line."""
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        if CALLER_SAYS_STOP not in os.environ:
            text = f"{module} was stopped before it began: the same command begins it"
            print(text, file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


def run_module(module: ModuleType, arguments: list[str]) -> None:
    """Make the stage of a module as a command line asks; a module may have one of its own."""
    for stage, row in STAGES.items():
        if row.module == module.__name__ and row.function:
            run_stage(stage, getattr(module, row.function), arguments, row.what)
            return
    module.main(arguments)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Load the module that the first argument names; run it with the other arguments."""
    module, *arguments = sys.argv[1:] if argv is None else argv
    run_module(load(module), arguments)
    end_process()


if __name__ == "__main__":
    main()
