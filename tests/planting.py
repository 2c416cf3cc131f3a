"""Makes runs with known errors planted in them, and the page about what betrays each.

    make planted                                            what calls this
    python -m tests.planting --preset tiny --seeds 1 2 3 --errors kl-rewarded swapped-pairs

For each seed the run itself, then for each error a run `<name>-planted-<error>`. It takes the
stages before the error's first one from the run: as from an upstream if the error is PPO's, else by
hard links, because an upstream supplies all stages of its settings, and an error is no setting.
What a check refuses is noted, and the run goes on to its verdicts: the page shows both. A seed
whose own run fails has no planted runs; the others go on.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stages.driving.grid import SEEDS, Cell, CellMaker, Execution, name_failed
from stages.finished import partial_of, read_manifest, stage_folder, wanted_stages, why_not
from stages.pipeline import Maker
from stages.running.files import write_json
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line, unknown
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import Config, UserError
from stages.settings.stages import SHARED_SECTIONS, STAGES, TRAINED, row_of
from tests.planted import PLANTED, refused_file

GOALS = ("eval",)


def cells_of(
    request: Request, seeds: Sequence[int], names: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The runs to compare with, one per seed, and each of them with one error planted.

    Raises UserError for an unknown error, and for a run that does not train all its stages.
    """
    for name in names:
        if name not in PLANTED:
            raise unknown("error", name, PLANTED)
    if request.upstream:
        raise UserError("errors are planted in SFT and reward model too: leave out UPSTREAM=")
    default, planted = [], []
    for seed in dict.fromkeys(seeds):
        base = replace(request, seed=seed)
        config = config_of(base)
        if config.kind != TRAINED:
            raise UserError(f"errors are planted in training, and {config.preset} trains nothing")
        default.append(Cell(request=base, config=config, goals=GOALS))
        for name in dict.fromkeys(names):
            wrong = replace(base, name=run_of(config, name))
            if not STAGES[PLANTED[name].stage].shared:
                own = [x for x in request.overrides if x.split(".")[0] not in SHARED_SECTIONS]
                wrong = replace(wrong, upstream=config.name, overrides=tuple(own))
            made = config_of(wrong, config if wrong.upstream else None)
            planted.append(Cell(request=wrong, config=made, goals=GOALS))
    return default, planted


def run_of(config: Config, error: str) -> str:
    """The name of a run with an error."""
    return f"{config.name}-planted-{error}"


class Planter(Maker):
    """A maker that plants errors in the stages of some runs."""

    def __init__(self, execution: Execution, errors: Mapping[str, str]) -> None:
        """`errors`: the name of a run -> the error in it."""
        super().__init__(execution)
        self.errors = errors

    def error_of(self, config: Config) -> str:
        """The error in a run; empty: none."""
        return self.errors.get(config.name, "")

    def command(self, cell: Cell, stage: str) -> list[str]:
        """The command line that makes one stage, with the error planted where models run."""
        words, error = super().command(cell, stage), self.error_of(cell.config)
        if not error or not row_of(stage, cell.config.kind).computes:
            return words
        return [sys.executable, "-m", "tests.planted", error, *words[1:]]

    def make(self, cell: Cell) -> int:
        """As a maker does. What a check said of an earlier attempt is forgotten."""
        config, error = cell.config, self.error_of(cell.config)
        if not error:
            return super().make(cell)
        if self.execution.dry_run:
            print(f"{cell.label}: {self.plan_of(cell)}")
            return 0
        take_over(config, self.before(config))
        first = PLANTED[error].stage
        begun = partial_of(stage_folder(config, first)).exists()
        if self.execution.replace or (why_not(config, first) and not begun):
            refused_file(config).unlink(missing_ok=True)
        return super().make(cell)

    def before(self, config: Config) -> list[str]:
        """The stages that a run takes from the one without the error by links."""
        first = PLANTED[self.error_of(config)].stage
        names = list(STAGES)
        return [] if config.upstream else names[: names.index(first)]

    def plan_of(self, cell: Cell) -> str:
        """What would be made of a run with an error."""
        config, error = cell.config, self.error_of(cell.config)
        if all(why_not(config, stage) is None for stage in wanted_stages(config, cell.goals)):
            return "nothing to do"
        return f"would make {PLANTED[error].stage} and what follows, with {error} planted"


def take_over(config: Config, stages: Sequence[str]) -> None:
    """Link finished stages of the run without the error, where they are not the same already."""
    default = replace(config, name=config.name.rpartition("-planted-")[0])
    for stage in stages:
        theirs, own = stage_folder(default, stage), stage_folder(config, stage)
        right, there = read_manifest(theirs), read_manifest(own)
        if right is None or (there and there["content"] == right["content"]):
            continue
        half = own.with_name(f"{own.name}.taken")
        for old in (half, own):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(theirs, half, copy_function=os.link)
        half.rename(own)


# -- all of them -----------------------------------------------------------------------------------


def make_planted(
    maker: CellMaker, default: Sequence[Cell], planted: Sequence[Cell], names: Sequence[str]
) -> int:
    """Make the runs, those with errors, and the page; returns the exit status."""
    codes = maker.make_all(default)
    there = {cell.config.seed for cell, code in zip(default, codes, strict=True) if not code}
    todo = [cell for cell in planted if cell.config.seed in there]
    codes += maker.make_all(todo)
    if maker.execution.dry_run or maker.stopped:
        return maker.stopped or max(codes)
    name_failed([*default, *todo], codes)
    config = default[0].config
    path = settings.RUNS / config.name / "planted-errors.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path, {name: {"stage": PLANTED[name].stage, "what": PLANTED[name].what} for name in names}
    )
    page = [sys.executable, "-m", "reports.planted_page", "--name", config.name]
    code = maker.call([*page, "--errors", str(path), "--judge", config.judge.folder])
    return max(*codes, code)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line: a run, its seeds, and the errors."""
    parser = Parser(description="runs with known errors, and what betrays them")
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--errors", nargs="+", default=list(PLANTED))
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    parser.add_argument("--replace", default="", help="1 or a stage: what is made anew")
    parser.add_argument("--dry-run", action="store_true", help="say what would be made")
    parser.add_argument("--jobs", type=int, nargs="?", default=1, const=os.cpu_count())
    return parser.parse_args(argv)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Make what is asked for; exits with the status of a stage that failed."""
    args = parse(argv)
    execution = Execution(
        max_cost=args.max_cost,
        replace=args.replace,
        jobs=1 if args.dry_run else args.jobs,  # lines in the order of the runs
        dry_run=args.dry_run,
    )
    default, planted = cells_of(request_of(args), args.seeds, args.errors)
    errors = {run_of(default[0].config, name): name for name in args.errors}
    with Planter(execution, errors) as maker:
        code = make_planted(maker, default, planted, args.errors)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
