"""What a run needs, before anything is downloaded: `make plan`. Standard library only.

    python -m reports.needs.plan --preset pythia-6.9b --gpus 8
    python -m reports.needs.plan --presets pythia-1b pythia-2.8b-lora --seeds 1 2 3

Parameters; bytes on each card, stage by stage, and which knob would make them fit; updates, tokens
and hours at an assumed share of the card's peak; disk; what the judge costs.
"""

import argparse
from dataclasses import replace

from reports.needs.gpus import SHARDED, card_of, cards_for
from reports.needs.lengths import lengths_of
from reports.needs.memory import Setting
from reports.needs.shapes import shape_of
from reports.needs.tables import (
    cost_lines,
    grid_lines,
    memory_lines,
    title_lines,
    total_hours,
    work_lines,
)
from reports.needs.work import MFU, Rate
from stages.running.launch import check_numbers
from stages.settings.checks import require
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import UserError, fail


def setting_of(request: Request, args: argparse.Namespace) -> tuple[Setting, str]:
    """What is planned for one preset, and the name of its cards.

    Raises UserError for an unknown preset, setting, card or shape.
    """
    config = config_of(request)
    name, devices = cards_for(request.preset, args.gpu, args.gpus)
    engine = args.engine or ("fsdp2" if request.preset in SHARDED else "ddp")
    check_numbers(devices, args.nodes, engine)
    lengths = lengths_of(config)
    shape, sharded = shape_of(config.base), engine == "fsdp2"
    return Setting(
        config=config, shape=shape, lengths=lengths, devices=devices * args.nodes, sharded=sharded
    ), name


def plan_lines(setting: Setting, gpu: str, args: argparse.Namespace) -> list[str]:
    """The plan of one run, all its seeds."""
    rate, seeds = Rate(card=card_of(gpu), mfu=args.mfu), len(args.seeds)
    hours = total_hours(setting, rate)
    return [
        *title_lines(setting, gpu, args.seeds),
        "",
        *memory_lines(setting, gpu),
        "",
        *work_lines(setting, rate, seeds),
        "",
        *cost_lines(setting, hours, args.price_per_hour, seeds),
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of a plan."""
    parser = argparse.ArgumentParser(description="what a run needs, before anything is downloaded")
    add_arguments(parser)
    parser.add_argument("--presets", nargs="*", default=[], help="a grid: one row a preset")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="default: the one seed")
    parser.add_argument("--gpu", default="", help="name of the card; default: the preset's")
    parser.add_argument("--gpus", type=int, default=0, help="number of cards of a machine")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--engine", default="", help="ddp or fsdp2; default: the preset's")
    parser.add_argument("--mfu", type=float, default=MFU, help="share of the peak, assumed")
    parser.add_argument("--price-per-hour", type=float, default=0.0, help="of one card, USD")
    args = parser.parse_args(argv)
    args.seeds = args.seeds or [args.seed]
    return args


def lines_of(args: argparse.Namespace) -> list[str]:
    """What is printed. Raises UserError as `setting_of` does, and for numbers out of range."""
    require(0 < args.mfu <= 1, "MFU", f"lie above 0 and not above 1, not {args.mfu:g}")
    require(args.price_per_hour >= 0, "PRICE_PER_HOUR", "be at least 0")
    request = request_of(args)
    if not args.presets:
        return plan_lines(*setting_of(request, args), args)
    asked_presets = [replace(request, preset=one) for one in args.presets]
    cells = [setting_of(one, args) for one in asked_presets]
    seeds = len(args.seeds)
    head = f"{seeds} seed{'s' * (seeds > 1)} of each preset, without DPO; hours are ASSUMED: "
    head += f"{args.mfu:.0%} of the peak"
    return [head, "", *grid_lines(cells, args.mfu, seeds)]


def main(argv: list[str] | None = None) -> None:
    """Print the plan."""
    args = parse(argv)
    try:
        print("\n".join(lines_of(args)))
    except UserError as error:
        fail(error)


if __name__ == "__main__":
    main()
