"""Finds what is done, stale, half done or missing; makes what is asked for. Standard library only.

    python -m stages.pipeline sft rm ppo eval --preset tiny      what `make sft rm ppo eval` calls
    python -m stages.pipeline ablations --preset tiny --seeds 1 2
    python -m stages.pipeline status | help | settings

Content decides everything (`stages.runs.why_not`), the age of a file decides nothing. Looking
(`--dry-run`, status) writes nothing. If a finished stage has other settings than those asked for,
it is refused with the difference; `--replace` moves it aside. If the outputs of a stage's inputs
have changed, the stage is made again and the old one moves aside.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.finished import (
    MISSING,
    damage,
    lock_of,
    partial_of,
    read_manifest,
    refusal,
    stage_folder,
    why_not,
)
from stages.running.launch import add_launch_arguments, launch_words
from stages.running.status import help_lines, kept, settings_lines, status
from stages.runs import halvings, move_aside, put_in_place
from stages.settings.ablations import ABLATIONS, settings_of_ablation
from stages.settings.checks import unknown
from stages.settings.command_line import GIVEN_BY, Asked, add_arguments, asked_of, config_of
from stages.settings.config import Config, UserError, fail
from stages.settings.stages import NO_PART, SHARED_SECTIONS, STAGES, TRAINED, row_of, with_inputs
from stages.system.locks import held

# Two other commands compare what runs have made.
BESIDE = ("versus", "leaderboard")
GOALS = tuple(dict.fromkeys(one.goal for one in STAGES.values() if one.goal not in BESIDE))
ABLATION_SEEDS = (44413, 55513, 66613)
# Goals that only look -> the lines that they print.
LOOKS: dict[str, Callable[[Asked], list[str]]] = {
    "status": lambda asked: status(asked.name),
    "help": lambda _: help_lines(),
    "settings": lambda asked: settings_lines(config_of(asked)),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run to be made: what was asked, its config, and its goals."""

    asked: Asked
    config: Config
    goals: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.config.name} seed {self.config.seed}"


@dataclass(frozen=True, kw_only=True)
class How:
    """How stages are made: no result depends on it."""

    launch: tuple[str, ...] = ()
    """Command that starts the stages that run models; empty: this interpreter."""
    max_cost: str = ""
    """The most that a judge may cost, USD, for the stages that ask one."""
    replace: bool = False
    """Whether finished stages with other settings move aside."""
    jobs: int = 1
    """Runs that are made at once."""
    dry_run: bool = False
    """Whether to print only what would be made."""


# -- what a run needs ------------------------------------------------------------------------------


def wanted_stages(config: Config, goals: Sequence[str]) -> list[str]:
    """The stages that lead to some goals, in order; an optional one joins if it was made before.

    Raises UserError for an unknown goal, and for training where nothing is trained.
    """
    wanted, no_part = set(), set(NO_PART[config.kind])
    for goal in goals:
        named = {name for name, one in STAGES.items() if goal in (name, one.goal)}
        if not named:
            raise unknown("goal", goal, (*GOALS, *STAGES))
        named = {goal} if goal in STAGES and goal not in GOALS else named
        if named & no_part and goal != "eval":
            raise UserError(_no_part(goal, config.kind))
        wanted |= named - no_part
    if config.outputs.label and "report" in wanted:  # the judge is tried on the file's own labels
        wanted |= {"calibration"}
    found = with_inputs(wanted, config.kind)
    joined = {one for name in found for one in STAGES[name].joined_by} - no_part
    there = {one for one in joined if read_manifest(stage_folder(config, one)) is not None}
    return with_inputs({*found, *there}, config.kind)


def _no_part(goal: str, kind: str) -> str:
    if kind == TRAINED:
        return f"{goal} needs a released policy: add POLICY= (SET=released.policy=...)"
    given = GIVEN_BY[kind]
    return f"{goal} trains, and {given} is judged without training: leave out one of the two"


def refuse_or_move_aside(config: Config, stages: Sequence[str], how: How) -> None:
    """Refuse finished stages that are not as asked, or move them aside.

    Raises UserError that names each difference and the two ways out. Raises it also if an upstream
    has not finished a stage that this run takes from it.
    """
    for stage in stages:
        problem = why_not(config, stage)
        if problem is None and how.replace:
            problem = damage(config, stage)
        if problem is None:
            continue
        theirs = bool(config.upstream) and STAGES[stage].shared
        if theirs or (problem.kept and not how.replace):
            raise refusal(config, stage, problem)
        if problem.kept and not how.dry_run:
            print(f"{stage}: moved to {move_aside(stage_folder(config, stage))}", flush=True)


def plan(config: Config, stages: Sequence[str]) -> list[tuple[str, str]]:
    """The stages that would be made, and why; some depend on the outcome of an earlier one."""
    found: list[tuple[str, str]] = []
    for stage in stages:
        row = row_of(stage, config.kind)
        read = (*row.inputs, *row.joined_by)
        before = [name for name, _ in found if name in read]
        problem, partial = why_not(config, stage), partial_of(stage_folder(config, stage))
        if problem == MISSING and partial.is_dir():
            found.append((stage, f"half done, {kept(partial)}"))
        elif problem is not None:
            found.append((stage, str(problem)))
        elif before:
            found.append((stage, f"if {before[-1]} puts out something else than before"))
    return found


# -- making it -------------------------------------------------------------------------------------


class Maker:
    """Runs the stages of cells, stops when told to, and hands a signal on to what is running."""

    def __init__(self, how: How) -> None:
        self.how = how
        self.stopped = 0
        self.running: set[subprocess.Popen[bytes]] = set()

    def __enter__(self) -> "Maker":
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _stop(self, number: int, _: Any) -> None:
        self.stopped = 128 + number
        if number == signal.SIGTERM:  # a Ctrl-C reaches the stages from the terminal itself
            for process in list(self.running):
                process.send_signal(number)

    def make(self, cell: Cell) -> int:
        """Make what is missing or stale of one run; return the status of the first that fails.

        Raises UserError if the run has finished stages that are not as asked.
        """
        config = cell.config
        stages = wanted_stages(config, cell.goals)
        own = [name for name in stages if not (config.upstream and STAGES[name].shared)]
        if not self.how.dry_run:
            _settle(config, own)
        refuse_or_move_aside(config, stages, self.how)
        if self.how.dry_run:
            _say_plan(cell, plan(config, own))
            return 0
        made = []
        for number, stage in enumerate(own, start=1):
            why = why_not(config, stage)
            if why is None:
                continue
            if self.stopped:
                return self.stopped
            made.append(stage)
            what = row_of(stage, config.kind).what
            print(f"\n[{number}/{len(own)}] {stage}: {what} ({why})", flush=True)
            code = self.call_until_it_fits(config, stage, self.command(cell, stage))
            if code:
                return code
        if not made:
            print(f"{cell.label}: nothing to do, {len(own)} stages are done")
        if "report" in own and "report" not in made:  # a new page has printed it already
            print((stage_folder(config, "report") / "headline.txt").read_text(), end="")
        return self.stopped

    def command(self, cell: Cell, stage: str) -> list[str]:
        """The command line that makes one stage."""
        row = row_of(stage, cell.config.kind)
        launch = self.how.launch if row.computes else ()
        capped = "judge" in row.sections and self.how.max_cost
        start = [*(launch or (sys.executable,)), "-m", "stages.running.start", row.module]
        words = [*start, *cell.asked.arguments]
        return [*words, "--max-cost", self.how.max_cost] if capped else words

    def call_until_it_fits(self, config: Config, stage: str, words: Sequence[str]) -> int:
        """`call`, and once more each time that several processes have halved their microbatches."""
        folder = stage_folder(config, stage)
        while True:
            before = halvings(folder)
            code = self.call(words)
            if not code or self.stopped or halvings(folder) == before:
                return code
            print(f"{stage} starts again with smaller microbatches", flush=True)

    def call(self, words: Sequence[str]) -> int:
        """Run a command to its end; return its exit status, as a shell gives it."""
        # Tools beside this interpreter, such as `accelerate`, are found by their names.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        process = subprocess.Popen(words, env={**os.environ, "PATH": path})
        self.running.add(process)
        code = process.wait()
        self.running.discard(process)
        return code if code >= 0 else 128 - code

    def make_all(self, cells: Sequence[Cell]) -> list[int]:
        """Make several runs, `jobs` at once; each one's status. A failed run stops no other."""

        def one(cell: Cell) -> int:
            if self.stopped:
                return self.stopped
            try:
                return self.make(cell)
            except UserError as error:
                print(f"error: {cell.label}: {error}", file=sys.stderr, flush=True)
                return 2

        with ThreadPoolExecutor(self.how.jobs) as pool:
            return list(pool.map(one, cells))


def _settle(config: Config, stages: Sequence[str]) -> None:
    """Rename stages that had finished when their process was killed, just before the rename."""
    for stage in stages:
        folder = stage_folder(config, stage)
        if read_manifest(partial_of(folder)) is not None:
            with held(lock_of(folder), stage):
                put_in_place(config, stage)


def _say_plan(cell: Cell, steps: Sequence[tuple[str, str]]) -> None:
    if not steps:
        print(f"{cell.label}: nothing to do")
    for stage, why in steps:
        print(f"{cell.label}: would make {stage} ({why})")


# -- ablations -------------------------------------------------------------------------------------


def ablation_cells(
    asked: Asked, seeds: Sequence[int], names: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The runs to compare with, one per seed, and each of them with one switch turned.

    An ablation is compared with a run, and takes the stages before PPO and their settings from it.
    Raises UserError for an unknown ablation.
    """
    switches = {name: settings_of_ablation(name) for name in names}
    default, turned = [], []
    for seed in seeds:
        base = replace(asked, seed=seed)
        config = config_of(base)
        default.append(Cell(asked=base, config=config, goals=("eval",)))
        own = tuple(one for one in asked.overrides if one.split(".")[0] not in SHARED_SECTIONS)
        for name, switch in switches.items():
            one = replace(
                base,
                name=f"{config.name}-{name}",
                upstream=asked.upstream or config.name,
                overrides=(*own, *switch),
            )
            turned.append(Cell(asked=one, config=config_of(one, config), goals=("eval",)))
    return default, turned


def make_ablations(maker: Maker, asked: Asked, seeds: Sequence[int], names: Sequence[str]) -> int:
    """Make the runs and their ablations, then the page that compares them.

    A seed whose own run fails has no ablations; the others go on. The end names what failed.
    """
    default, turned = ablation_cells(asked, seeds, names)
    codes = maker.make_all(default)
    if maker.how.dry_run:
        for cell in turned:
            what = " ".join(cell.asked.overrides)
            print(f"{cell.label}: would make ppo and what follows, {what}")
        return max(codes)
    there = {cell.config.seed for cell, code in zip(default, codes, strict=True) if not code}
    todo = [cell for cell in turned if cell.config.seed in there]
    codes += maker.make_all(todo)
    if maker.stopped:
        return maker.stopped
    made = zip([*default, *todo], codes, strict=True)
    failed = [cell.label for cell, code in made if code]
    if failed:
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    config = default[0].config
    page = [sys.executable, "-m", "reports.ablations_page", "--name", config.name]
    code = maker.call([*page, "--judge", config.judge.folder, "--ablations", *names])
    return max(*codes, code)


# -- command line ----------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of the pipeline."""
    parser = argparse.ArgumentParser(description="make the stages of runs, or look at them")
    parser.add_argument("goals", nargs="+", help=f"{', '.join(GOALS)}, ablations, or a stage")
    add_arguments(parser)
    parser.add_argument("--launch", default="", help="starts the stages that run models")
    add_launch_arguments(parser)
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    parser.add_argument("--replace", action="store_true", help="move what differs aside")
    parser.add_argument("--dry-run", action="store_true", help="say what would be made")
    parser.add_argument("--jobs", type=int, nargs="?", default=1, const=os.cpu_count())
    parser.add_argument("--seeds", type=int, nargs="+", default=list(ABLATION_SEEDS))
    parser.add_argument("--ablations", nargs="+", default=list(ABLATIONS))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Make what is asked for; exits with the status of the stage that failed."""
    args = parse(argv)
    try:
        asked = asked_of(args)
        if args.goals[0] in LOOKS:
            print("\n".join(LOOKS[args.goals[0]](asked)))
            return
        code = make_goals(asked, args)
    except UserError as error:
        fail(error)
    raise SystemExit(code)


def make_goals(asked: Asked, args: argparse.Namespace) -> int:
    """Make what a command line asks for; return the exit status."""
    how = How(
        launch=launch_words(args.gpus, args.nodes, args.engine, args.launch),
        max_cost=args.max_cost,
        replace=args.replace,
        jobs=args.jobs,
        dry_run=args.dry_run,
    )
    with Maker(how) as maker:
        if "ablations" in args.goals:
            if (kind := config_of(asked).kind) != TRAINED:
                raise UserError(_no_part("ablations", kind))
            return make_ablations(maker, asked, args.seeds, args.ablations)
        cell = Cell(asked=asked, config=config_of(asked), goals=tuple(args.goals))
        return maker.make(cell)


if __name__ == "__main__":
    main()
