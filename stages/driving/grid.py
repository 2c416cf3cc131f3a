"""Grids of runs over seeds: ablations, rivals, and the study over presets. Standard library only.

A cell is one run. Cells are made by the pipeline's maker, a failed one stops no other, and the end
names what failed. `stages.pipeline` calls this.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stages.finished import MISSING, read_manifest, stage_folder
from stages.running.progress import duration
from stages.settings.checks import is_above_0
from stages.settings.command_line import Request, assigned, config_of
from stages.settings.config import Config, UserError
from stages.settings.presets import settings_of_ablation
from stages.settings.stages import SHARED_SECTIONS, STAGES, TRAINED

SEEDS = (44413, 55513, 66613)
LADDER = ("tiny-xs", "tiny-s", "tiny", "tiny-l", "tiny-xl")
STUDY_GOALS = ("ppo", "eval")
RIVALS = ("ppo", "rloo", "grpo")
KL_COEFS = ("0.02", "0.05", "0.1", "0.2")
BEST_OF_N = "1,2,4,8,16,32,64"


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
    """What is made anew: `1` or a stage (`stages.driving.replacing`); empty: nothing."""
    jobs: int = 1
    """Runs that are made at once."""
    dry_run: bool = False
    """Whether to print only what would be made."""

    def __post_init__(self) -> None:
        if self.max_cost and not is_above_0(self.max_cost):
            raise UserError(f"MAX_COST={self.max_cost}: give dollars above 0, such as MAX_COST=20")
        if self.jobs < 1:
            raise UserError(f"--jobs {self.jobs}: give the number of runs to make at once")


Ended = Callable[[Cell, int], None]


class CellMaker(Protocol):
    """What makes the cells of a grid (`stages.maker.Maker`)."""

    execution: Execution
    stopped: int

    def make_all(self, cells: Sequence[Cell], ended: Ended | None = None) -> list[int]:
        """Make several runs; each one's exit status."""

    def missing(self, cell: Cell) -> list[tuple[str, str]]:
        """The stages that a cell lacks, and why."""

    def call(self, words: Sequence[str]) -> int:
        """Run a command to its end; its exit status."""


def name_failed(cells: Sequence[Cell], codes: Sequence[int]) -> None:
    """Print which runs failed, if any did."""
    failed = [cell.label for cell, code in zip(cells, codes, strict=True) if code]
    if failed:
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)


def make_beside(
    maker: CellMaker,
    start: Sequence[Cell],
    others: Sequence[Cell],
    what: Callable[[Cell], str],
    page: Sequence[str],
) -> int:
    """Make the runs that others begin from, then these, then the page that compares them.

    A seed whose own run fails has no others; the other seeds go on. The end names what failed.
    `what` says what a dry run would make of a cell; `page`: its module and its own arguments.
    """
    codes = maker.make_all(start)
    there = {cell.config.seed for cell, code in zip(start, codes, strict=True) if not code}
    if maker.execution.dry_run:
        # What a cell lacks can be looked up only where the run that it begins from is complete.
        there -= {cell.config.seed for cell in start if maker.missing(cell)}
        for cell in others:
            made = cell.config.seed in there and not maker.missing(cell)
            print(f"{cell.label}: {'nothing to do' if made else f'would make {what(cell)}'}")
        return max(codes)
    todo = [cell for cell in others if cell.config.seed in there]
    codes += maker.make_all(todo)
    if maker.stopped:
        return maker.stopped
    name_failed([*start, *todo], codes)
    config, (module, *own) = start[0].config, page
    words = [sys.executable, "-m", f"reports.{module}", "--name", config.name]
    return max(*codes, maker.call([*words, "--judge", config.judge.folder, *own]))


# -- ablations -------------------------------------------------------------------------------------


def ablation_cells(
    request: Request, seeds: Sequence[int], names: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The runs to compare with, one per seed, and each of them with one switch turned.

    An ablation is compared with a run, and takes the stages before the first one that its switch
    changes from it, or from its upstream.
    Raises UserError for an unknown ablation.
    """
    switches = {name: settings_of_ablation(name) for name in names}
    default, turned = [], []
    for seed in dict.fromkeys(seeds):
        base = replace(request, seed=seed)
        config = config_of(base)
        default.append(Cell(request=base, config=config, goals=("eval",)))
        # What the run itself changes in shared stages it has on record; its upstream has not.
        own = request.overrides if request.upstream else _not_shared(request.overrides)
        for name, switch in switches.items():
            turn = replace(
                base,
                name=f"{config.name}-{name}",
                upstream=request.upstream or config.name,
                overrides=overridden(own, switch),
            )
            made = config_of(turn, None if request.upstream else config)
            turned.append(Cell(request=turn, config=made, goals=("eval",)))
    return default, turned


def _not_shared(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if text.split(".")[0] not in SHARED_SECTIONS]


def overridden(own: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Overrides with others after them, which stand for those of the same key."""
    keys = {text.partition("=")[0] for text in others}
    return (*(text for text in own if text.partition("=")[0] not in keys), *others)


def distinct_ablations(
    request: Request, seed: int, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The ablations that make runs of their own here, and a line on each other one.

    A switch may stand already where it would be turned, or two may come to the same settings.
    Raises UserError where none is left.
    """
    default, turned = ablation_cells(request, [seed], names)
    seen = {"the run itself": _settings_alone(default[0].config)}
    kept, lines = [], []
    for name, cell in zip(dict.fromkeys(names), turned, strict=True):
        own = _settings_alone(cell.config)
        twin = next((label for label, other in seen.items() if other == own), "")
        if twin:
            lines.append(f"ablation {name} is left out: with these settings it is {twin}")
        else:
            seen[name] = own
            kept.append(name)
    if names and not kept:
        raise UserError("; ".join(lines))
    return kept, lines


def _settings_alone(config: Config) -> Config:
    """A config without what names it."""
    return replace(config, name="run", upstream="", own_from="", overrides=())


def make_ablations(
    maker: CellMaker, request: Request, seeds: Sequence[int], names: Sequence[str]
) -> int:
    """Make the runs and their ablations, then the page that compares them (`make_beside`)."""
    names, lines = distinct_ablations(request, seeds[0], names)
    print("".join(f"{line}\n" for line in lines), end="")
    default, turned = ablation_cells(request, seeds, names)

    def what(cell: Cell) -> str:
        return (
            f"{cell.config.own_from or 'ppo'} and what follows, {' '.join(cell.request.overrides)}"
        )

    return make_beside(maker, default, turned, what, ["ablations_page", "--ablations", *names])


# -- rivals ----------------------------------------------------------------------------------------


def rival_cells(
    request: Request, seeds: Sequence[int], kl_coefs: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The runs that give SFT and reward model, one per seed; and from each, for every coefficient
    of the KL penalty, one with all rivals. The first of these has best-of-n and DPO too, on which
    the penalty has no effect. Summaries are sampled as PPO samples, which is what KL is of.

    Raises UserError for coefficients that are no numbers, and for a run that trains nothing.
    """
    start, rivals = [], []
    coefs = list(dict.fromkeys(kl_coefs))
    for seed in dict.fromkeys(seeds):
        base = replace(request, seed=seed)
        config = config_of(base)
        if config.kind != TRAINED:
            raise UserError(f"rivals are trained, and {config.preset} trains nothing")
        start.append(Cell(request=base, config=config, goals=("rm",)))
        own = request.overrides if request.upstream else _not_shared(request.overrides)
        for coef in coefs:
            beside = [f"eval.best_of={BEST_OF_N}"] if coef == coefs[0] else []
            hot = f"eval.temperature={config.ppo.temperature:g}"
            turn = replace(
                base,
                name=f"{config.name}-kl{coef}",
                upstream=request.upstream or config.name,
                overrides=overridden(own, [*(f"{x}.kl_coef={coef}" for x in RIVALS), hot, *beside]),
            )
            goals = (*RIVALS, *(["dpo"] if beside else []), "eval")
            made = config_of(turn, None if request.upstream else config)
            rivals.append(Cell(request=turn, config=made, goals=goals))
    return start, rivals


def make_rivals(
    maker: CellMaker, request: Request, seeds: Sequence[int], kl_coefs: Sequence[str]
) -> int:
    """Make the rivals of a run, then the page that compares them at equal KL (`make_beside`)."""
    start, rivals = rival_cells(request, seeds, kl_coefs)
    page = ["rivals_page", "--kl-coefs", *kl_coefs]
    return make_beside(maker, start, rivals, lambda cell: ", ".join(cell.goals), page)


# -- the study -------------------------------------------------------------------------------------


def study_cells(
    request: Request, presets: Sequence[str], seeds: Sequence[int], goals: Sequence[str] = ()
) -> list[Cell]:
    """A cell for each preset and seed, a whole row of sizes before the next seed.

    With a name each run is called after its preset and that name, such as tiny-xs-other.
    Raises UserError for an unknown preset, a setting without a name, and an upstream.
    """
    if request.upstream:
        raise UserError("a study trains every size from its own start: leave out UPSTREAM=")
    cells = []
    for seed in dict.fromkeys(seeds):
        for preset in dict.fromkeys(presets):
            name = f"{preset}-{request.name}" if request.name else ""
            part = replace(request, preset=preset, seed=seed, name=name)
            config = config_of(part)
            if config.kind != TRAINED:
                raise UserError(f"a study trains what it compares, and {preset} trains nothing")
            cells.append(Cell(request=part, config=config, goals=tuple(goals) or STUDY_GOALS))
    return cells


def make_study(maker: CellMaker, request: Request, cells: Sequence[Cell]) -> int:
    """Make every cell that is missing, then the page about all sizes; returns the exit status.

    A cell that fails stops no other. Raises UserError if the goals are unknown.
    """
    todo = Todo(maker, cells)
    if maker.execution.dry_run:
        print("\n".join(todo.lines()))
        return 2 if todo.refused else 0
    codes = maker.make_all(cells, todo.ended)
    if maker.stopped:
        name = signal.Signals(maker.stopped - 128).name
        command = study_command(request, cells, maker.execution)
        print(f"stopped by {name}: {todo.counted()}; `{command}` goes on", file=sys.stderr)
        return maker.stopped
    name_failed(cells, codes)
    names = [cell.config.name for cell, code in zip(cells, codes, strict=True) if not code]
    if "eval" not in cells[0].goals or not names:
        return max(codes)
    page = [sys.executable, "-m", "reports.scaling_page", "--names", *dict.fromkeys(names)]
    return max(*codes, maker.call([*page, "--judge", cells[0].config.judge.folder]))


class Todo:
    """What of a study is done, and how long the rest takes."""

    def __init__(self, maker: CellMaker, cells: Sequence[Cell]) -> None:
        """Look at all cells. Raises UserError for an unknown goal."""
        self.jobs, self.cells = maker.execution.jobs, cells
        self.missing: dict[str, list[tuple[str, str]]] = {}
        self.refused: dict[str, str] = {}
        self.failed = 0
        self.lock, self.begun = threading.Lock(), time.monotonic()
        for cell in cells:
            try:
                self.missing[cell.label] = maker.missing(cell)
            except UserError as error:
                self.refused[cell.label] = str(error)
        if len(self.refused) == len(cells):
            raise UserError(next(iter(self.refused.values())))
        self.left = [cell for cell in cells if self.missing.get(cell.label, True)]

    def lines(self) -> list[str]:
        """One line a cell: what it lacks."""
        lines = []
        for label in (cell.label for cell in self.cells):
            steps = ", ".join(
                stage if why == str(MISSING) else f"{stage} ({why})"
                for stage, why in self.missing.get(label, [])
            )
            if label in self.refused:
                lines.append(f"{label}: refused: {self.refused[label]}")
            else:
                lines.append(f"{label}: would make {steps}" if steps else f"{label}: done")
        return [*lines, f"{self.counted()}{self.rest()}"]

    def ended(self, cell: Cell, code: int) -> None:
        """Say, in one line, that a cell has ended, what is done and how long the rest takes."""
        with self.lock:
            made = cell in self.left
            self.left = [other for other in self.left if other is not cell]
            self.failed += bool(code)
            if made:
                outcome = f"FAILED with status {code}" if code else "is done"
                took = duration(time.monotonic() - self.begun)
                news = f"study, after {took}: {cell.label} {outcome}; {self.counted()}{self.rest()}"
                print(f"\n{news}", flush=True)

    def counted(self) -> str:
        """How many cells are done and failed."""
        done = len(self.cells) - len(self.left) - self.failed
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{done} of {len(self.cells)} cells are done{failed}"

    def rest(self) -> str:
        """How long the rest takes, from the times that runs of the same size have recorded."""
        if not self.left:
            return ""
        known: dict[str, list[float]] = {}
        for cell in self.cells:
            if cell not in self.left and (seconds := seconds_of(cell.config)):
                known.setdefault(cell.config.name, []).append(seconds)
        names = [cell.config.name for cell in self.left]
        total = sum(sum(known[name]) / len(known[name]) for name in names if name in known)
        unknown = list(dict.fromkeys(name for name in names if name not in known))
        if not total:
            return "; no run of the sizes that are left has finished, so their time is unknown"
        bound = f", without {', '.join(unknown)}, unknown so far" if unknown else ""
        return f"; about {duration(total / self.jobs)} left{bound}"


def seconds_of(config: Config) -> float:
    """Seconds that the finished stages of a run took, by their manifests."""
    manifests = [read_manifest(stage_folder(config, stage)) for stage in STAGES]
    return float(sum(manifest["seconds"] for manifest in manifests if manifest))


def study_command(request: Request, cells: Sequence[Cell], execution: Execution) -> str:
    """The `make` command of a study."""
    presets = dict.fromkeys(cell.request.preset for cell in cells)
    seeds = dict.fromkeys(str(cell.config.seed) for cell in cells)
    words = [f'make study PRESETS="{" ".join(presets)}" SEEDS="{" ".join(seeds)}"']
    values = {
        "NAME": request.name,
        "SET": " ".join(request.overrides),
        "DATA": request.data,
        "TOKENIZER": request.tokenizer,
        "MAX_COST": execution.max_cost,
        "REPLACE": execution.replace,
    }
    words += assigned(values)
    goals, how = cells[0].goals, execution.started_by
    return " ".join([*words, *how, *([f'JOB="{" ".join(goals)}"'] if goals != STUDY_GOALS else [])])
