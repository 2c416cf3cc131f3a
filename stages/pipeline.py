"""Finds what is done, stale, half done or missing; makes what is asked for. Standard library only.

    python -m stages.pipeline sft rm ppo eval --preset tiny      what `make sft rm ppo eval` calls
    python -m stages.pipeline ablations --preset tiny --seeds 1 2         or rivals
    python -m stages.pipeline study --presets tiny-s tiny --seeds 1 2
    python -m stages.pipeline status | help | settings

Content decides everything (`stages.finished.why_not`), the age of a file decides nothing. Looking
(`--dry-run`, status) writes nothing. If a finished stage has other settings than those asked for,
it is refused with the difference; `--replace` moves it aside. If the outputs of a stage's inputs
have changed, the stage is made again and the old one moves aside. Other code makes nothing stale:
one line says which stages were made with it.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stages.driving.beforehand import check_rows, check_settings
from stages.driving.grid import (
    KL_COEFS,
    LADDER,
    SEEDS,
    STUDY_GOALS,
    Cell,
    Ended,
    Execution,
    make_ablations,
    make_rivals,
    make_study,
    study_cells,
)
from stages.driving.replacing import Replacement, forget_if_done
from stages.driving.status import help_lines, kept, settings_lines, status
from stages.driving.warm import Warm, can_be_forked
from stages.finished import (
    GOALS,
    MISSING,
    changed_code,
    lock_of,
    no_part,
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
from stages.settings.checks import (
    Parser,
    in_one_line,
    require_packages,
    say_error,
    show,
    what_to_mend,
)
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import Config, UserError
from stages.settings.presets import ABLATIONS, ablations_named
from stages.settings.stages import TRAINED, row_of

START = (sys.executable, "-m", "stages.driving.start")
# Goals that only look -> the lines that they print.
LOOKS: dict[str, Callable[[Request], list[str]]] = {
    "status": lambda request: status(request.name),
    "help": lambda _: help_lines(),
    "settings": lambda request: settings_lines(config_of(request, whole=False)),
}
# Goals that make several runs -> the options that they alone read, with the defaults.
GRIDS: dict[str, dict[str, Sequence[Any]]] = {
    "study": {"seeds": SEEDS, "presets": LADDER, "job": STUDY_GOALS},
    "ablations": {"seeds": SEEDS, "ablations": tuple(ABLATIONS)},
    "rivals": {"seeds": SEEDS, "kl_coefs": KL_COEFS},
}


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


# -- command line ----------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of the pipeline."""
    parser = Parser(description="make the stages of runs, or look at them")
    parser.add_argument("goals", nargs="+", help=f"{', '.join((*GOALS, *GRIDS))}, or a stage")
    add_arguments(parser)
    parser.add_argument("--launch", default="", help="starts the stages that run models")
    launch.add_launch_arguments(parser)
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    parser.add_argument("--replace", default="", help="1, or stages: what is made anew")
    parser.add_argument("--dry-run", action="store_true", help="say what would be made")
    parser.add_argument("--jobs", type=int, nargs="?", default=1, const=os.cpu_count())
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--presets", nargs="+", help="sizes of a study")
    parser.add_argument("--job", nargs="+", help="goals of its cells")
    parser.add_argument("--ablations", nargs="+")
    parser.add_argument("--kl-coefs", nargs="+", help="of the rivals")
    parser.set_defaults(seed=None)
    return _filled(parser.parse_args(argv))


def _filled(args: argparse.Namespace) -> argparse.Namespace:
    """With the defaults of what the goals read. Raises UserError for what they do not read."""
    goals = " ".join(args.goals)
    read = {name: value for goal in args.goals for name, value in GRIDS.get(goal, {}).items()}
    for option in ("seeds", "presets", "job", "ablations", "kl_coefs"):
        if getattr(args, option) is None:
            setattr(args, option, list(read.get(option, ())))
        elif option not in read:
            raise UserError(f"{goals} takes no --{option.replace('_', '-')}: leave it out")
    for option, several in (("seed", "seeds"), ("preset", "presets")):
        if several in read and getattr(args, option) not in (None, ""):
            raise UserError(f"{goals} takes no --{option}: give --{several}")
    args.seed = Request.seed if args.seed is None else args.seed
    return args


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Make what is asked for; exits with the status of the stage that failed."""
    args = parse(argv)
    request = request_of(args)
    alone = next((goal for goal in args.goals if goal in (*LOOKS, *GRIDS)), None)
    if alone and len(args.goals) > 1:
        raise UserError(f"{alone} stands alone: give the other goals in a command of their own")
    if alone in LOOKS:
        show(LOOKS[alone](request))
        return
    raise SystemExit(make_goals(request, args))


def make_goals(request: Request, args: argparse.Namespace) -> int:
    """Make what a command line asks for; return the exit status."""
    if not args.dry_run and not args.launch:
        require_packages()
    execution = Execution(
        launch=launch.launch_words(args.gpus, args.nodes, args.engine, args.launch),
        started_by=tuple(launch.launch_variables(args)),
        processes=launch.processes_of(args.gpus, args.nodes, args.launch),
        max_cost=args.max_cost,
        replace=args.replace,
        jobs=args.jobs,
        dry_run=args.dry_run,
    )
    if execution.jobs > 1 and execution.launch and {*GRIDS} & {*args.goals}:
        raise UserError("-j and GPUS: every run takes all cards: leave out -j")
    with Maker(execution, says_stop="study" in args.goals) as maker:
        if "study" in args.goals:
            cells = study_cells(request, args.presets, args.seeds, args.job)
            return make_study(maker, request, cells)
        if "ablations" in args.goals:
            if (kind := config_of(request).kind) != TRAINED:
                raise UserError(no_part("ablations", kind))
            return make_ablations(maker, request, args.seeds, ablations_named(args.ablations))
        if "rivals" in args.goals:
            return make_rivals(maker, request, args.seeds, args.kl_coefs)
        cell = Cell(request=request, config=config_of(request), goals=tuple(args.goals))
        return maker.make(cell)


if __name__ == "__main__":
    main()
