"""Makes the stages of runs: each in a process of its own, to which signals are handed on.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.config.checks import say_error
from stages.config.command_line import Request
from stages.config.config import Config
from stages.config.faults import in_one_line, what_to_mend
from stages.config.stages import row_of
from stages.pipeline import launch
from stages.pipeline.start import load, run_module
from stages.pipeline.wanted import (
    ANEW,
    check_rows,
    check_settings,
    lacking,
    reason,
    wanted_stages,
    warnings,
)
from stages.runs.manifest import lock_of, partial_of, read_manifest, stage_folder, why_not
from stages.runs.progress import (
    CALLER_SAYS_STOP,
    GOES_ON_WITH,
    answer_at_once,
    folded,
    handled_signals,
    leave_closed_terminal,
    say_if_killed,
)
from stages.runs.run import held, move_aside, put_in_place

START = (sys.executable, "-m", "stages.pipeline.start")
PR_SET_PDEATHSIG = 1  # of Linux, where alone stages are forked
DRIVERS = ("nvidia*", "nvmap", "dxg", "kfd", "accel*")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to be made: what was asked, its config, and its goals."""

    request: Request
    config: Config
    goals: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.config.name} seed {self.config.seed}"


@dataclass(kw_only=True)
class Maker:
    """Makes the stages of cells, one after the other, and stops when told to."""

    launch: tuple[str, ...] = ()  # what starts stages that run models; empty: this interpreter
    processes: int = 1  # of such a stage
    goes_on_with: str = ""  # the command that a stage that stops prints; empty: its own
    max_cost: str = ""  # the most that a judge may cost, USD
    replace: str = ""  # `1` or stages (`stages.pipeline.wanted`)
    dry_run: bool = False  # print only what would be made
    ended: Callable[[Config, str], None] = lambda *_: None  # called for each finished stage
    end: Callable[[Cell], None] = lambda _: None  # called when a command has made its one run
    time_left: Callable[[Config, Sequence[str]], str] = lambda *_: ""  # of stages, for a heading
    says_stop: bool = False  # who calls this says how its whole work goes on, so stages need not
    stopped: int = 0  # the exit status after a signal
    # Where torch has worked already, a fork would lack its threads.
    forks: bool = field(default_factory=lambda: can_be_forked() and "torch" not in sys.modules)
    hand_on: Callable[[int], None] = lambda _: None  # to the stage that is under way

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
            self.hand_on(number)

    def make_all(self, cells: Sequence[Cell]) -> list[int]:
        """Make several runs in turn; each one's status. A failed run stops no other, and what a
        user can mend of it is one line.
        """
        codes: list[int] = []
        for cell in cells:
            try:
                codes.append(self.stopped or self.make(cell))
            except Exception as error:
                line = what_to_mend(error)
                if line is None:
                    raise
                say_error(f"error: {cell.label}: {line}")
                codes.append(2)
            if not (self.stopped or self.dry_run):
                outcome = f"FAILED with status {codes[-1]}" if codes[-1] else "is done"
                news = f"{cell.label} {outcome}; {len(codes)} of {len(cells)} runs are through"
                print(f"\n{news}", flush=True)
        return codes

    def make(self, cell: Cell) -> int:
        """Make what is missing or stale of one run; return the status of the first that fails.

        Raises UserError if the run has finished stages that are not as asked.
        """
        config = cell.config
        wanted = wanted_stages(config, cell.goals)
        own = [stage for stage in wanted if not config.is_upstreams(stage)]
        if not self.dry_run:
            settle(config, own)
        steps = lacking(config, cell.goals, self.replace)
        check_settings(config, [*steps], self.processes, capped=self.max_cost != "")
        for line in warnings(config, [stage for stage in wanted if stage not in steps]):
            print(f"{cell.label}: {line}", file=sys.stderr, flush=True)
        if self.dry_run:
            lines = [f"would make {stage} ({why})" for stage, why in steps.items()]
            print("\n".join(f"{cell.label}: {line}" for line in lines or ["nothing to do"]))
            return 0
        move_all_aside(config, [stage for stage, why in steps.items() if why == ANEW])
        for number, stage in enumerate(own, start=1):
            problem = why_not(config, stage)
            if problem is None:
                continue
            if self.stopped:
                return self.stopped
            if stage != "base":
                check_rows(config, own)
            what, why = row_of(stage, config.kind).what, reason(config, stage, problem)
            left = self.time_left(config, [name for name in own[number - 1 :] if name in steps])
            heading = folded(f"[{number}/{len(own)}] {stage}: {what} ({why}){left}")
            print("", *heading, sep="\n", flush=True)
            code = self.call(self.command(cell, stage))
            if code:
                say_if_killed(stage, code)
                return code
            self.ended(config, stage)
        return self.stopped

    def command(self, cell: Cell, stage: str) -> list[str]:
        """The command line that makes one stage."""
        row = row_of(stage, cell.config.kind)
        launcher = self.launch if row.computes else ()
        capped = "judge" in row.sections and self.max_cost
        address = f"{row.module}:{stage}"
        start = [*launcher, *START[1:], address] if launcher else [*START, address]
        words = [*start, *cell.request.arguments]
        return [*words, "--max-cost", self.max_cost] if capped else words

    def call(self, words: Sequence[str]) -> int:
        """Run a command to its end; return its exit status, as a shell gives it."""
        environment = {**os.environ, GOES_ON_WITH: self.goes_on_with}
        environment |= {CALLER_SAYS_STOP: "1"} if self.says_stop else {}
        if tuple(words[:3]) == START and self.forks:
            code = self._call_forked(words[3], words[4:], environment)
        else:
            process = subprocess.Popen(words, env=environment)
            self.hand_on = partial(launch.hand_on, process)
            code = process.wait()
        self.hand_on = lambda _: None
        return code if code >= 0 else 128 - code

    def _call_forked(
        self, address: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        """Run a stage, `module:stage`, in a fork of this process, which loads what it imports."""
        name, _, stage_name = address.partition(":")
        # A Ctrl-C while libraries load ends this process with one line.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            module = load(name)
        finally:
            signal.signal(signal.SIGINT, handler)
        if self.stopped:
            return self.stopped
        stage = (module, stage_name, arguments, environment, os.getpid())
        process = multiprocessing.get_context("fork").Process(target=_run, args=stage)
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())  # until the stage handles them
        process.start()
        assert process.pid is not None
        self.hand_on = partial(os.kill, process.pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled_signals())
        process.join()
        return process.exitcode or 0


def can_be_forked() -> bool:
    """Whether stages may be forked on this machine: Linux, and no accelerator."""
    has_driver = any(any(Path("/dev").glob(pattern)) for pattern in DRIVERS)
    return sys.platform == "linux" and not has_driver


def _run(
    module: ModuleType,
    stage: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    parent: int,
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
        run_module(module, [*arguments], stage)


def settle(config: Config, stages: Sequence[str]) -> None:
    """Rename stages that had finished when their process was killed, just before the rename."""
    for stage in stages:
        folder = stage_folder(config, stage)
        if read_manifest(partial_of(folder)) is not None:
            with held(lock_of(folder), stage):
                put_in_place(config, stage)


def move_all_aside(config: Config, stages: Sequence[str]) -> None:
    """Move stages aside, finished or half done.

    Raises UserError, and moves nothing, if one of them is under way elsewhere.
    """
    folders = {stage: stage_folder(config, stage) for stage in stages}
    with ExitStack() as locks:
        for stage, folder in folders.items():
            if folder.parent.is_dir():
                locks.enter_context(held(lock_of(folder), stage))
        for stage, folder in folders.items():
            for path in (path for path in (folder, partial_of(folder)) if path.is_dir()):
                print(f"{stage}: moved to {move_aside(path)}", flush=True)
