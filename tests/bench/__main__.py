"""Speed and memory of an update compared with TRL: `make bench`.

    make bench                                        # on a GPU at the shapes of larger models
    make bench SHAPES="pythia-14m:32:8" RUNS=3        # preset:batch:microbatch
    make bench SHAPES="pythia-14m:32:8:rloo" SET="ppo.num_ppo_epochs=1"

Each measurement is a process of its own, so that its peak memory is its own. Ours and TRL's take
turns, so that a machine that slows down slows both. The page in runs/bench/ is written after each
shape.

case         one update at one shape
compare      runs both in turns
environment  installs TRL
ours         measures our update
trl_update   measures TRL's
meter        seconds and peak memory
lower_bound  the matrix products that an update needs
results      the ratios
page         the table and the page
"""

import argparse
import sys
from datetime import datetime, timezone

import torch

from stages.config import paths
from stages.config.error_messages import Parser, in_one_line
from stages.config.errors import UserError
from stages.config.options import add_overrides
from stages.pipeline import variables
from stages.runs.code import code_version
from stages.runs.machine import cpu_model, library_versions
from tests.bench.case import parse_case
from tests.bench.compare import measure_cases
from tests.bench.page import print_table
from tests.bench.results import Bench

CPU_SHAPES = ("pythia-14m:32:8", "pythia-70m:16:4")
GPU_SHAPES = (
    "pythia-1b:64:16",
    "pythia-1b:64:16:rloo",
    "pythia-410m:128:32",
    "smollm2-full:256:32",
)


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure all shapes, print the table and write the page."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    if args.runs < 1:
        raise UserError(f"RUNS={args.runs}: give at least 1")
    shapes = args.shapes or (GPU_SHAPES if torch.cuda.is_available() else CPU_SHAPES)
    cases = [parse_case(shape, tuple(args.overrides)) for shape in dict.fromkeys(shapes)]
    for case in cases:
        case.make_config()  # raises UserError for a wrong setting before anything is measured

    bench = Bench(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        code_version=code_version(),
        versions=library_versions(),
        machine=cpu_model(),
        runs=args.runs,
        overrides=args.overrides,
    )
    html = measure_cases(bench, cases, paths.RUNS / "bench")
    print_table(bench)
    print(f"report:\n{html}")


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Return shapes, runs and overrides, from SHAPES, RUNS and SET of make or of some words."""
    _, values = variables.read_command(["bench", *words])
    parser = Parser(description="speed and memory compared with TRL")
    parser.add_argument("--shapes", nargs="+", default=[])
    parser.add_argument("--runs", type=int, default=2, help="of each measurement")
    add_overrides(parser)
    return parser.parse_args(variables.option_words("bench", values))


if __name__ == "__main__":
    main()
