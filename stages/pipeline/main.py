"""Makes what is asked for, or shows its settings.

    python -m stages.pipeline.main sft rm ppo eval --preset tiny     as `make sft rm ppo eval` calls
    python -m stages.pipeline.main ablations --preset tiny --seeds 1 2          or algorithms
    python -m stages.pipeline.main study --presets tiny-s tiny --seeds 1 2
    python -m stages.pipeline.main settings --preset tiny

Looking (`--dry-run`) writes nothing. If a finished stage has other settings than those asked for,
it is refused with the difference; `--replace` moves it aside.
"""

import argparse
from collections.abc import Callable
from typing import Any

from stages.config.command_line import Request, add_arguments, config_of, request_of
from stages.config.config import UserError
from stages.config.faults import Parser, in_one_line, is_above_0, require_packages, show
from stages.config.listing import settings_lines
from stages.config.presets import ABLATIONS, ablations_named
from stages.pipeline import grid, launch
from stages.pipeline.maker import Cell, Maker
from stages.pipeline.wanted import GOALS

GRIDS: dict[str, Callable[[Request, argparse.Namespace], grid.Grid]] = {
    "study": lambda request, args: grid.study(request, args.presets, args.seeds, args.job),
    "ablations": lambda request, args: grid.ablations(
        request, args.seeds, ablations_named(args.ablations)
    ),
    "algorithms": lambda request, args: grid.algorithms(request, args.seeds, args.kl_coefs),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of the pipeline."""
    parser = Parser(description="make the stages of runs, or look at them")
    parser.add_argument("goals", nargs="+", help=f"{', '.join((*GOALS, *GRIDS))}, or a stage")
    add_arguments(parser)
    launch.add_launch_arguments(parser)
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    parser.add_argument("--replace", default="", help="1, or stages: what is made anew")
    parser.add_argument("--dry-run", action="store_true", help="say what would be made")
    parser.add_argument("--seeds", type=int, nargs="+", default=grid.SEEDS, help="of a grid")
    parser.add_argument("--presets", nargs="+", default=grid.LADDER, help="sizes of a study")
    parser.add_argument("--job", nargs="+", default=grid.STUDY_GOALS, help="goals of its cells")
    parser.add_argument("--ablations", nargs="+", default=list(ABLATIONS))
    parser.add_argument("--kl-coefs", nargs="+", default=grid.KL_COEFS, help="of the algorithms")
    return parser.parse_args(argv)


@in_one_line()
def main(argv: list[str] | None = None, **hooks: Any) -> None:
    """Make what is asked for; exits with the status of the stage that failed, if any.

    hooks: fields of the `Maker` that the caller chooses.
    """
    args = parse(argv)
    request = request_of(args)
    alone = next((goal for goal in args.goals if goal in ("settings", *GRIDS)), None)
    if alone and len(args.goals) > 1:
        raise UserError(f"{alone} stands alone: give the other goals in a command of their own")
    if alone == "settings":
        show(settings_lines(config_of(request, whole=False)))
        return
    if code := make_goals(request, args, **hooks):
        raise SystemExit(code)


def make_goals(request: Request, args: argparse.Namespace, **hooks: Any) -> int:
    """Make what a command line asks for; return the exit status."""
    if not args.dry_run:
        require_packages()
    if args.max_cost and not is_above_0(args.max_cost):
        raise UserError(f"MAX_COST={args.max_cost}: give dollars above 0, such as MAX_COST=20")
    if args.gpus * args.nodes > 1:  # what one process took tells nothing of several
        hooks.pop("time_left", None)
    maker = Maker(
        launch=launch.launch_words(args.gpus, args.nodes, args.engine),
        processes=args.gpus * args.nodes,
        max_cost=args.max_cost,
        replace=args.replace,
        dry_run=args.dry_run,
        **hooks,
    )
    with maker:
        goal, *_ = goals = tuple(args.goals)
        if goal in GRIDS:
            return grid.make_grid(maker, GRIDS[goal](request, args))
        cell = Cell(request=request, config=config_of(request), goals=goals)
        code = maker.make(cell)
        if not (code or maker.dry_run):
            maker.end(cell)
        return code


if __name__ == "__main__":
    main()
