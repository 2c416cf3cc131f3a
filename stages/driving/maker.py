"""Makes the stages of runs: finds what is missing or stale, and calls each stage as a process.

Content decides everything (`stages.finished.why_not`), the age of a file decides nothing. If the
outputs of a stage's inputs have changed, the stage is made again and the old one moves aside. Other
code makes nothing stale: one line says which stages were made with it. Standard library only.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stages.driving.beforehand import check_rows, check_settings
from stages.driving.grid import Cell, Ended, Execution
from stages.driving.replacing import Replacement, forget_if_done
from stages.driving.status import kept
from stages.driving.warm import Warm, can_be_forked
from stages.finished import (
    MISSING,
    changed_code,
    lock_of,
    partial_of,
    read_manifest,
    stage_folder,
    stages_of,
    wanted_stages,
    why_not,
)
from stages.running import launch
from stages.running.machine import other_code
from stages.running.progress import COLUMNS, folded
from stages.running.signals import (
    CALLER_SAYS_STOP,
    GOES_ON_WITH,
    answer_at_once,
    handled_signals,
    leave_closed_terminal,
    say_if_killed,
)
from stages.runs import halvings, held, put_in_place
from stages.settings.checks import say_error, what_to_mend
from stages.settings.config import Config
from stages.settings.stages import row_of

START = (sys.executable, "-m", "stages.driving.start")


# -- what a run needs ------------------------------------------------------------------------------


def plan(config: Config, stages: Sequence[str], replaced: Sequence[str]) -> list[tuple[str, str]]:
    """The stages that would be made, and why; some depend on the outcome of an earlier one."""
    steps: list[tuple[str, str]] = []
    for stage in stages:
        row = row_of(stage, config.kind)
        read = (*row.inputs, *row.joined_by)
        before = [name for name, _ in steps if name in read]
        problem, partial = why_not(config, stage), partial_of(stage_folder(config, stage))
        if stage in replaced:
            steps.append((stage, "anew, as REPLACE asks"))
        elif problem == MISSING and partial.is_dir():
            steps.append((stage, f"half done, {kept(partial)}"))
        elif problem is not None:
            steps.append((stage, str(problem)))
        elif before:
            steps.append((stage, f"if {before[-1]} puts out something else than before"))
    return steps


# -- making it -------------------------------------------------------------------------------------


class Maker:
    """Runs the stages of cells, stops when told to, and hands a signal on to what is running."""

    def __init__(self, execution: Execution, says_stop: bool = False) -> None:
        """`says_stop`: what calls it says how to go on after a signal, so the stages need not."""
        self.execution, self.says_stop = execution, says_stop
        self.stopped = 0
        self.running: set[subprocess.Popen[bytes]] = set()
        self.warm: Warm | None = None
        self.renewed: set[Path] = set()

    def __enter__(self) -> "Maker":
        self.handlers = {number: signal.signal(number, self._stop) for number in handled_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        self._cool()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        if self.says_stop and not self.stopped:
            answer_at_once(number)
        leave_closed_terminal()
        self.stopped = 128 + number
        if number != signal.SIGINT:  # a Ctrl-C reaches the stages from the terminal itself
            for process in list(self.running):
                launch.hand_on(process, number)

    def make(self, cell: Cell) -> int:
        """Make what is missing or stale of one run; return the status of the first that fails.

        Raises UserError if the run has finished stages that are not as asked.
        """
        config = cell.config
        stages, own = _stages_of(cell)
        if not self.execution.dry_run:
            _settle(config, own)
        replacement = self._replacement(cell, stages, own)
        steps = self._planned(replacement)
        if self.execution.dry_run:
            lines = [f"would make {stage} ({why})" for stage, why in steps] or ["nothing to do"]
            print("\n".join(f"{cell.label}: {line}" for line in lines))
            return 0
        replacement.move_aside()
        made = []
        for number, stage in enumerate(own, start=1):
            why = why_not(config, stage)
            if why is None:
                continue
            if self.stopped:
                return self.stopped
            if stage != "base":
                check_rows(config, own)
            made.append(stage)
            what = row_of(stage, config.kind).what
            start = "\n".join(folded(f"[{number}/{len(own)}] {stage}: {what} ({why})"))
            print(f"\n{start}", flush=True)
            code = self.call_until_it_fits(config, stage, self.command(cell, stage))
            if code:
                say_if_killed(stage, code)
                return code
        forget_if_done(config)
        _say_what_stays(cell, own, made)
        if "report" in own and "report" not in made:  # a new page has printed it already
            print((stage_folder(config, "report") / "headline.txt").read_text(), end="")
        return self.stopped

    def missing(self, cell: Cell) -> list[tuple[str, str]]:
        """The stages that a cell lacks, and why. Raises UserError for what `make` would refuse."""
        stages, own = _stages_of(cell)
        return self._planned(self._replacement(cell, stages, own))

    def _planned(self, replacement: Replacement) -> list[tuple[str, str]]:
        """The stages to make, and why. Raises UserError for settings that one would refuse."""
        steps = plan(replacement.config, replacement.own, replacement.stages)
        processes, capped = self.execution.processes, bool(self.execution.max_cost)
        check_settings(replacement.config, [stage for stage, _ in steps], processes, capped)
        return steps

    def _replacement(self, cell: Cell, stages: list[str], own: list[str]) -> Replacement:
        """What the command replaces. Raises UserError for other stages that are not as asked."""
        of_goals = stages_of(cell.config, cell.goals)
        replacement = Replacement(cell.config, self.execution.replace, own, of_goals, self.renewed)
        replacement.refuse_others(stages)
        return replacement

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

    def call(self, words: Sequence[str], label: str = "") -> int:
        """Run a command to its end; return its exit status, as a shell gives it.

        With a label each line that it prints begins with it, because others print beside it.
        """
        # Tools beside this interpreter, such as `accelerate`, are found by their names.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        how = " ".join(self.execution.started_by)
        environment = {**os.environ, "PATH": path, GOES_ON_WITH: how}
        environment |= {CALLER_SAYS_STOP: "1"} if self.says_stop else {}
        if not label and tuple(words[:3]) == START and can_be_forked():
            return _shell_code(self._warmed(environment).run(words[3:]))
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

    def _warmed(self, environment: Mapping[str, str]) -> Warm:
        """The interpreter that has loaded the libraries for the stages before; else a new one."""
        if self.warm is None or self.warm.ended:
            self._cool()
            self.warm = Warm(environment)
            self.running.add(self.warm.process)
        return self.warm

    def _cool(self) -> None:
        if self.warm is not None:
            self.running.discard(self.warm.process)
            self.warm.close()
            self.warm = None

    def make_all(self, cells: Sequence[Cell], ended: Ended | None = None) -> list[int]:
        """Make several runs, `jobs` at once; each one's status. A failed run stops no other, and
        `ended` is told of each run that has ended by itself.
        """

        def make_cell(cell: Cell) -> int:
            if self.stopped:
                return self.stopped
            try:
                code = self.make(cell)
            except Exception as error:
                line = what_to_mend(error)
                if line is None:
                    raise
                say_error(f"error: {cell.label}: {line}")
                code = 2
            if ended and not self.stopped:
                ended(cell, code)
            return code

        with ThreadPoolExecutor(self.execution.jobs) as pool:
            return list(pool.map(make_cell, cells))


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _stages_of(cell: Cell) -> tuple[list[str], list[str]]:
    """The stages that a cell needs, and those of them that it makes itself."""
    stages = wanted_stages(cell.config, cell.goals)
    return stages, [name for name in stages if not cell.config.is_upstreams(name)]


def _settle(config: Config, stages: Sequence[str]) -> None:
    """Rename stages that had finished when their process was killed, just before the rename."""
    for stage in stages:
        folder = stage_folder(config, stage)
        if read_manifest(partial_of(folder)) is not None:
            with held(lock_of(folder), stage):
                put_in_place(config, stage)


def _say_what_stays(cell: Cell, own: Sequence[str], made: Sequence[str]) -> None:
    """One line: that nothing was to do, and which stages were made with other code, if any were."""
    code = other_code({name: changed_code(cell.config, name) for name in own if name not in made})
    parts = [f"nothing to do, {len(own)} stages are done"] if not made else []
    parts += [f"{code}: REPLACE=1 makes them anew"] if code else []
    if parts:
        print(f"{cell.label}: {'; '.join(parts)}")
