"""The command line that all stages share: arguments, errors of one line, signals, trackers.

    python -m stages.pipeline.start stages.sft:sft --preset tiny

Exit codes: 2 for what the user can mend, 128 + its number after a signal (130 after a Ctrl-C).
"""

import importlib
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from stages.config.checks import (
    UserError,
    card_memory,
    first_line,
    is_out_of_memory,
    launched_processes,
    say_error,
)
from stages.config.command_line import config_from_arguments
from stages.config.config import Config, public_settings
from stages.config.faults import VisibleStream, in_one_line, what_to_mend
from stages.config.judge import file_name
from stages.config.stages import STAGES
from stages.rl.algorithms import ALGORITHMS
from stages.runs.files import read_json, write_json
from stages.runs.machine import code_version
from stages.runs.manifest import make_command, partial_of, stage_folder
from stages.runs.progress import (
    CALLER_SAYS_STOP,
    GOES_ON_WITH,
    Stopped,
    ask_to_stop,
    forget_signals,
    handled_signals,
    leave_closed_terminal,
)
from stages.runs.run import TRACKED, Show, tracking

# Whether wandb is online is its own WANDB_MODE.
WANDB, BOARD = "wandb", "tensorboard"
SETTINGS = {WANDB: "WANDB_PROJECT", BOARD: "TENSORBOARD_LOGGING_DIR"}
# What wandb would send beside what is logged: output of the terminal, command line, host, folder,
# and the address of the repository. Each of them can hold a name, a server or a key.
QUIET: dict[str, Any] = {
    "console": "off",
    "x_disable_meta": True,
    "disable_git": True,
    "disable_code": True,
    "host": "not shown",
    "init_timeout": 30.0,
}

T = TypeVar("T")
OTHER_DIED = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("ncclRemoteError", "remote process exited"),  # NCCL's other errors are one's own
)


def run_stage(
    stage: str,
    function: Callable[[Config], T],
    argv: list[str] | None,
    description: str,
    read: Callable[[list[str] | None, str], Config] = config_from_arguments,
) -> T:
    """Run a stage as its command line asks; `read` makes a config of the command line.

    An error that the user can mend ends the process with one line, and so does a signal.
    """
    with in_one_line():
        launched_processes()
        config = read(argv, description)
        if 0 in (config.memory.microbatch_size, config.memory.forward_batch_size):
            config = importlib.import_module("reports.sizes").with_sizes(config, stage)
    command = os.environ.get(GOES_ON_WITH) or make_command(config, stage)
    try:
        tracking.set(tracked)
        with ended_by_signal(command), redirect_stdout(VisibleStream(sys.stdout)):
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
            say_error(f"{module} was stopped before it began: the same command begins it")
        raise SystemExit(128 + signal.SIGINT) from None


def run_module(module: ModuleType, arguments: list[str], stage: str = "") -> None:
    """Run a stage of a module as a command line asks; the module's first one if none is named.

    A module without a stage function has a `main` that parses its own command line.
    """
    names = [name for name, row in STAGES.items() if row.module == module.__name__]
    stage = stage or (names[0] if names else "")
    row = STAGES.get(stage)
    if row is None or row.module != module.__name__ or not row.function:
        module.main(arguments)
        return
    function = getattr(module, row.function)
    if row.policy_gradient:
        function = partial(function, algorithm=ALGORITHMS[stage])
    run_stage(stage, function, arguments, row.what)


@contextmanager
def tracked(config: Config, stage: str) -> Iterator[Show]:
    """What takes a stage's metrics, and its results as those of no step, for wandb and TensorBoard
    if the environment asks for them.

    The record stays metrics.jsonl and the manifests: what goes wrong there is printed in one line,
    and the stage goes on. Raises UserError for a package that is missing.
    """
    key = f"{stage}/{config.judge.folder}" if STAGES[stage].per_judge else stage
    wanted = [library for library, setting in SETTINGS.items() if os.environ.get(setting)]
    begun = {library: begin(config, stage, library) for library in wanted}
    trackers = {library: tracker for library, tracker in begun.items() if tracker}

    def call(method: str, *values: Any, **more: Any) -> None:
        for library in [*trackers]:
            try:
                getattr(trackers[library], method)(*values, **more)
            except Exception as error:
                del trackers[library]
                text = f"{method} failed ({first_line(error)}): the stage goes on without it"
                print(f"{library}: {text}", file=sys.stderr, flush=True)

    def show(step: int | None, values: Mapping[str, Any]) -> None:
        start = f"results/{key}/" if step is None else ""
        numbers = {f"{start}{name}": x for name, x in values.items() if isinstance(x, int | float)}
        call("log", numbers, step=step)

    try:
        yield show
    finally:
        call("finish")


def begin(config: Config, stage: str, library: str) -> Any:
    """accelerate's tracker of a stage; None if it cannot begin."""
    setting = SETTINGS[library]
    try:
        importlib.import_module(library)
        tracker = make_tracker(config, stage, library, os.environ[setting])
        tracker.start()
        return tracker
    except ImportError:
        line = f"{library} is missing: run `pip install {library}`, or unset it"
        raise UserError(f"{setting} is set but {line}") from None
    except Exception as error:
        why = " ".join(f"{error}".split())[:300]  # it may take several lines
        say_error(f"{library} cannot begin ({why}): the stage goes on without it")
        return None


def make_tracker(config: Config, stage: str, library: str, place: str) -> Any:
    """accelerate's tracker of a stage. A stage that goes on goes on in its run at wandb, by an id
    that lies in its partial folder.
    """
    from accelerate import PartialState, tracking

    PartialState()  # accelerate's trackers log through it
    run = f"{config.name}/seed{config.seed}/{stage}"
    if library == BOARD:
        return tracking.TensorBoardTracker(run, place)
    note = partial_of(stage_folder(config, stage)) / TRACKED
    number = read_json(note) or f"{file_name(config.name)[:60]}-{stage}-{secrets.token_hex(4)}"
    write_json(note, number)
    import wandb

    # After an hour what was not sent stays on this disk, and the pipeline goes on.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "3600")
    names = {"group": config.name, "job_type": stage, "name": run, "id": number}
    settings = {**public_settings(config), "code_version": code_version()}
    quiet = wandb.Settings(**QUIET, allow_val_change=True)
    return tracking.WandBTracker(place, resume="allow", config=settings, settings=quiet, **names)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Run the stage that the first argument names, `module:stage`, with the other arguments."""
    address, *arguments = sys.argv[1:] if argv is None else argv
    module, _, stage = address.partition(":")
    run_module(load(module), arguments, stage)
    end_process()


if __name__ == "__main__":
    main()
