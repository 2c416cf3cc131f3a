"""Makes the stages of runs: finds what is missing or stale, and calls each stage as a process.

Content decides everything (`stages.finished.why_not`), the age of a file decides nothing. If the
outputs of a stage's inputs have changed, the stage is made again and the old one moves aside. Other
code makes nothing stale: one line says which stages were made with it. Standard library only.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stages.driving.beforehand import check_rows, check_settings
from stages.driving.replacing import Replacement
from stages.driving.status import kept
from stages.driving.warm import can_be_forked, fork, loaded
from stages.finished import (
    MISSING,
    changed_code,
    lock_of,
    partial_of,
    read_manifest,
    refusal,
    stage_folder,
    wanted_stages,
    why_not,
)
from stages.running import launch
from stages.running.machine import other_code
from stages.running.progress import COLUMNS, folded
from stages.running.signals import (
    GOES_ON_WITH,
    handled_signals,
    leave_closed_terminal,
    say_if_killed,
)
from stages.runs import halvings, held, put_in_place
from stages.settings.checks import say_error, what_to_mend
from stages.settings.command_line import Request
from stages.settings.config import Config
from stages.settings.stages import row_of

START = (sys.executable, "-m", "stages.driving.start")
Ended = Callable[[Config, str], None]


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

    def stages(self) -> list[str]:
        """The stages that it makes itself, in their order."""
        stages = wanted_stages(self.config, self.goals)
        return [name for name in stages if not self.config.is_upstreams(name)]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How stages are made: no result depends on it."""

    launch: tuple[str, ...] = ()
    """Command that starts the stages that run models; empty: this interpreter."""
    started_by: tuple[str, ...] = ()
    """The make variables that say the same as `launch`, for commands that are printed."""
    processes: int = 1
    """Of a stage that runs models."""
    max_cost: str = ""
    """The most that a judge may cost, USD, for the stages that ask one."""
    replace: str = ""
    """What is made anew: `1` or stages (`stages.driving.replacing`); empty: nothing."""
    jobs: int = 1
    """Runs that are made at once."""
    dry_run: bool = False
    """Whether to print only what would be made."""
    ended: Ended | None = None
    """Called with the config and the name of each stage that has finished."""


class Maker:
    """Runs the stages of cells, stops when told to, and hands a signal on to what is running."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.stopped = 0
        self.running: set[subprocess.Popen[bytes]] = set()
        # Where torch has worked already, a fork would lack its threads.
        self.forks = can_be_forked() and "torch" not in sys.modules
        self.forked: BaseProcess | None = None

    def __enter__(self) -> "Maker":
        self.handlers = {number: signal.signal(number, self._stop) for number in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        leave_closed_terminal()
        self.stopped = 128 + number
        if number != signal.SIGINT:  # a Ctrl-C reaches the stages from the terminal itself
            for process in list(self.running):
                launch.hand_on(process, number)
            if self.forked is not None and self.forked.pid is not None:
                os.kill(self.forked.pid, number)

    # -- one run -----------------------------------------------------------------------------------

    def make(self, cell: Cell) -> int:
        """Make what is missing or stale of one run; return the status of the first that fails.

        Raises UserError if the run has finished stages that are not as asked.
        """
        config, own = cell.config, cell.stages()
        if not self.execution.dry_run:
            _settle(config, own)
        replacement, steps = self._planned(cell)
        if self.execution.dry_run:
            lines = [f"would make {stage} ({why})" for stage, why in steps] or ["nothing to do"]
            print("\n".join(f"{cell.label}: {line}" for line in lines))
            return 0
        replacement.move_aside()
        renewed = []
        for number, stage in enumerate(own, start=1):
            why = why_not(config, stage)
            if why is None:
                continue
            if self.stopped:
                return self.stopped
            if stage != "base":
                check_rows(config, own)
            renewed.append(stage)
            what = row_of(stage, config.kind).what
            start = "\n".join(folded(f"[{number}/{len(own)}] {stage}: {what} ({why})"))
            print(f"\n{start}", flush=True)
            code = self.call_until_it_fits(config, stage, self.command(cell, stage))
            if code:
                say_if_killed(stage, code)
                return code
            if self.execution.ended:
                self.execution.ended(config, stage)
        replacement.forget_if_done()
        _say_what_stays(cell, own, renewed)
        if "report" in own and "report" not in renewed:  # a new page has printed it already
            print((stage_folder(config, "report") / "headline.txt").read_text(), end="")
        return self.stopped

    def missing(self, cell: Cell) -> list[tuple[str, str]]:
        """The stages that a cell lacks, and why. Raises UserError for what `make` would refuse."""
        return self._planned(cell)[1]

    def _planned(self, cell: Cell) -> tuple[Replacement, list[tuple[str, str]]]:
        """What is replaced, and the stages that would be made, with the reason.

        Some depend on the outcome of an earlier one. Raises UserError for settings that a stage
        would refuse, for a stage that only REPLACE may touch, and for one that an upstream lacks.
        """
        config, own = cell.config, cell.stages()
        replacement = Replacement(config, self.execution.replace, cell.goals, own)
        for stage in wanted_stages(config, cell.goals):
            problem = None if stage in replacement.stages else why_not(config, stage)
            if problem and (problem.needs_replace or stage not in own):
                raise refusal(config, stage, problem)
        steps: dict[str, str] = {}
        for stage in own:
            row = row_of(stage, config.kind)
            before = [name for name in steps if name in (*row.inputs, *row.joined_by)]
            problem, partial = why_not(config, stage), partial_of(stage_folder(config, stage))
            if stage in replacement.stages:
                steps[stage] = "anew, as REPLACE asks"
            elif problem == MISSING and partial.is_dir():
                steps[stage] = f"half done, {kept(partial)}"
            elif problem is not None:
                steps[stage] = str(problem)
            elif before:
                steps[stage] = f"if {before[-1]} puts out something else than before"
        check_settings(config, list(steps), self.execution.processes, self.execution.max_cost != "")
        return replacement, list(steps.items())

    def command(self, cell: Cell, stage: str) -> list[str]:
        """The command line that makes one stage."""
        row = row_of(stage, cell.config.kind)
        launcher = self.execution.launch if row.computes else ()
        capped = "judge" in row.sections and self.execution.max_cost
        start = [*launcher, *START[1:], row.module] if launcher else [*START, row.module]
        words = [*start, *cell.request.arguments]
        return [*words, "--max-cost", self.execution.max_cost] if capped else words

    def call_until_it_fits(self, config: Config, stage: str, words: Sequence[str]) -> int:
        """`call`, and once more each time that several processes have halved what did not fit."""
        folder, alone = stage_folder(config, stage), self.execution.processes == 1
        while True:
            before = halvings(folder)
            label = f"{config.name} seed {config.seed}" if self.execution.jobs > 1 else ""
            code = self.call(words, label)
            if not code or self.stopped or alone or halvings(folder) == before:
                return code
            print(f"{stage} starts again with smaller passes", flush=True)

    # -- processes ---------------------------------------------------------------------------------

    def call(self, words: Sequence[str], label: str = "") -> int:
        """Run a command to its end; return its exit status, as a shell gives it.

        With a label each line that it prints begins with it, because others print beside it.
        """
        # Tools beside this interpreter, such as `accelerate`, are found by their names.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        how = " ".join(self.execution.started_by)
        environment = {**os.environ, "PATH": path, GOES_ON_WITH: how}
        if not label and tuple(words[:3]) == START and self.forks:
            return self._call_forked(words[3], words[4:], environment)
        if label:  # there are runs beside: threads that wait must not spin
            environment["COLUMNS"] = str(COLUMNS - len(f"{label}| "))
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        out, err = (subprocess.PIPE, subprocess.STDOUT) if label else (None, None)
        process = subprocess.Popen(words, env=environment, stdout=out, stderr=err)
        self.running.add(process)
        for line in process.stdout or ():
            print(f"{label}| {line.decode(errors='replace').rstrip()}", flush=True)
        code = process.wait()
        self.running.discard(process)
        return _shell_code(code)

    def _call_forked(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        """`call` of a stage in a fork of this process, which has loaded what the stage imports."""
        module = loaded(name)
        if self.stopped:
            return self.stopped
        self.forked = fork(module, arguments, environment)
        self.forked.join()
        code, self.forked = self.forked.exitcode, None
        return _shell_code(code or 0)

    # -- several runs ------------------------------------------------------------------------------

    def make_all(self, cells: Sequence[Cell]) -> list[int]:
        """Make several runs, `jobs` at once; each one's status. A failed run stops no other."""

        def make_cell(cell: Cell) -> int:
            if self.stopped:
                return self.stopped
            try:
                return self.make(cell)
            except Exception as error:
                line = what_to_mend(error)
                if line is None:
                    raise
                say_error(f"error: {cell.label}: {line}")
                return 2

        codes: list[int] = []
        with ThreadPoolExecutor(self.execution.jobs) as pool:  # a fork is the main thread's
            several = pool.map if self.execution.jobs > 1 else map
            for cell, code in zip(cells, several(make_cell, cells), strict=True):
                codes.append(code)
                if not (self.stopped or self.execution.dry_run):
                    outcome = f"FAILED with status {code}" if code else "is done"
                    news = f"{cell.label} {outcome}; {len(codes)} of {len(cells)} runs are through"
                    print(f"\n{news}", flush=True)
        return codes


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _settle(config: Config, stages: Sequence[str]) -> None:
    """Rename stages that had finished when their process was killed, just before the rename."""
    for stage in stages:
        folder = stage_folder(config, stage)
        if read_manifest(partial_of(folder)) is not None:
            with held(lock_of(folder), stage):
                put_in_place(config, stage)


def _say_what_stays(cell: Cell, own: Sequence[str], renewed: Sequence[str]) -> None:
    """One line: that nothing was to do, and which stages were made with other code, if any were."""
    kept_stages = [name for name in own if name not in renewed]
    code = other_code({name: changed_code(cell.config, name) for name in kept_stages})
    parts = [] if renewed else [f"nothing to do, {len(own)} stages are done"]
    parts += [f"{code}: REPLACE=1 makes them anew"] if code else []
    if parts:
        print(f"{cell.label}: {'; '.join(parts)}")
