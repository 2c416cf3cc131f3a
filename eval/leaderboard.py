"""All systems of a run side by side, by every judge that is named: `make leaderboard`.

    python -m eval.leaderboard --preset outputs --set outputs.file=outputs.jsonl
        --judges kind=local,model=folder kind=openai,axis=accuracy

makes the judgements that are missing, one judge after the other, then the page of these judges (of
all that have judged the run, where none is named). A judge is written as its settings with commas
between them, and `accept_model`'s names with `+`; each has folders of its own below the run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from stages.driving.grid import Cell, Execution
from stages.pipeline import Maker
from stages.running.launch import launcher
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import UserError

PAGE = "reports.leaderboard_page"


def cells(request: Request, judges: Sequence[str], pairs: bool) -> list[Cell]:
    """One evaluation for each judge, `kind=local,model=folder`; the run's own where none is named.

    Raises UserError for a setting that a judge does not have.
    """
    goals = ("eval", "pairs") if pairs else ("eval",)
    requests = [with_judge(request, judge) for judge in judges or [""]]
    return [Cell(request=each, config=config_of(each), goals=goals) for each in requests]


def with_judge(request: Request, judge: str) -> Request:
    """The request with the settings of one judge of JUDGES. Raises UserError for what is none."""
    own = tuple(f"judge.{setting}" for setting in judge.split(",") if setting)
    if not all("=" in setting for setting in own):
        raise UserError(
            f"JUDGES: {judge!r} is no judge: write kind=local,model=folder"
            " (several names of accept_model: a+b)"
        )
    return replace(request, overrides=(*request.overrides, *own))


def make_leaderboard(maker: Maker, todo: Sequence[Cell], named: bool) -> int:
    """Make what is missing of each judge, then the page; return the exit status.

    The page shows the judges that were `named`, else all on disk. A judge that fails leaves the
    others alone.
    """
    codes = maker.make_all(todo)
    if maker.stopped or maker.execution.dry_run or all(codes):
        return maker.stopped or max(codes)
    words = [sys.executable, "-m", PAGE, *todo[0].request.arguments]
    shown = ["--judges", *(cell.config.judge.folder for cell in todo)] if named else []
    return max(*codes, maker.call([*words, *shown]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description="all systems of a run side by side")
    add_arguments(parser)
    parser.add_argument("--judges", nargs="+", default=[], metavar="KEY=VALUE,KEY=VALUE")
    parser.add_argument("--pairs", action="store_true", help="judge all pairs of systems too")
    parser.add_argument("--launch", default="", help="starts the stages that run models")
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    parser.add_argument("--replace", default="", help="1 or a stage: what is made anew")
    parser.add_argument("--dry-run", action="store_true", help="say what would be made")
    return parser.parse_args(argv)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Make the leaderboard; exits with the status of the first judge that failed."""
    args = parse(argv)
    execution = Execution(
        launch=launcher(args.launch),
        max_cost=args.max_cost,
        replace=args.replace,
        dry_run=args.dry_run,
    )
    todo = cells(request_of(args), args.judges, args.pairs)
    with Maker(execution) as maker:
        code = make_leaderboard(maker, todo, bool(args.judges))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
