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
from collections.abc import Callable, Sequence
from typing import Any

from stages.driving.grid import (
    KL_COEFS,
    LADDER,
    SEEDS,
    STUDY_GOALS,
    Cell,
    Execution,
    make_ablations,
    make_rivals,
    make_study,
    study_cells,
)
from stages.driving.maker import Maker
from stages.driving.status import help_lines, settings_lines, status
from stages.finished import GOALS, no_part
from stages.running import launch
from stages.settings.checks import Parser, in_one_line, require_packages, show
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import UserError
from stages.settings.presets import ABLATIONS, ablations_named
from stages.settings.stages import TRAINED

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
