"""What a run needs, before anything is downloaded: `make plan`. Standard library only.

    python -m reports.needs.plan --preset pythia-6.9b --gpus 8

Parameters; bytes on each GPU, stage by stage, and which knob would make them fit; updates, tokens
and hours at an assumed share of the GPU's peak.
"""

import argparse
import textwrap
from collections.abc import Sequence

from reports.needs import gpus, work
from reports.needs.memory import Setting, setting_of
from reports.needs.parts import part_bytes, too_large
from reports.needs.shapes import parameters
from stages.running.launch import check_numbers
from stages.settings.checks import require
from stages.settings.command_line import add_arguments, config_of, request_of
from stages.settings.faults import Parser, in_one_line, show

COLUMNS = ("weights", "gradients", "optimizer", "copies", "activations", "logits", "cache", "other")
HEADS = ("weight", "grad", "optim", "copy", "activ", "logit", "cache", "other", "total")


def gib(count: float) -> str:
    """Bytes as GiB: three digits."""
    value = count / gpus.GIB
    return "-" if not count else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def title_lines(setting: Setting, gpu_name: str) -> list[str]:
    """Which run, which model, which GPUs."""
    config, gpu = setting.config, gpus.GPUS[gpu_name]
    policy, scorer = parameters(setting.shape), parameters(setting.shape, scalar=True)
    shared = ", ENGINE=fsdp2" if setting.sharded else ""
    precision = "bf16 autocast, float32 weights" if setting.half else "float32"
    return [
        f"{config.name}, seed {config.seed}"[:80],
        f"  starts from {config.base.checkpoint} ({setting.shape.family})"[:80],
        f"  {policy:,} parameters; reward model and critic {scorer:,}",
        f"  {setting.devices} x {gpu_name}{shared}, {precision}",
        f"  of {gpu.memory_gib:.1f} GiB a card {gib(gpu.usable)} are for tensors: "
        f"{gpus.USABLE:.0%} less {gpus.CONTEXT_GIB:g} for CUDA",
    ]


def memory_lines(setting: Setting, gpu: gpus.Gpu) -> list[str]:
    """A row for every part of every stage; whether all fit, or what would need less."""

    def row(name: str, cells: Sequence[str], end: str) -> str:
        return f"{name:14}" + "".join(f"{cell:>6} " for cell in cells) + end

    parts = part_bytes(setting)
    large = too_large(parts, gpu)
    lines = ["GiB on one card, at the worst moment of each part", row("", HEADS, "")]
    for name, held in parts.items():
        cells = [gib(getattr(held, column)) for column in COLUMNS] + [gib(held.total)]
        lines.append(row(name, cells, "NO" if name in large else "ok"))
    worst = max(parts, key=lambda name: parts[name].total)
    if not large:
        return [*lines, f"everything fits; the most is {worst}, {gib(parts[worst].total)} GiB"]
    lines += textwrap.wrap(f"does not fit: {', '.join(large)}", 80)
    if setting.devices > setting.shards:
        lines.append("ENGINE=fsdp2 shares the weights")
    return [*lines, "smaller memory.* settings need less, and lora.rank=16"]


def work_lines(setting: Setting, gpu: gpus.Gpu, mfu: float, price: float) -> list[str]:
    """Updates, tokens and hours of every stage and of the whole run, and its price."""
    updates, hours = work.updates_of(setting), work.hours_by_stage(setting, gpu, mfu)
    tokens = work.totals((each.stage, each.tokens) for each in work.work_of(setting))
    lines = [f"{'stage':12}{'updates':>10}{'million tokens':>16}{'hours':>10}"]
    for stage, spent in hours.items():
        count = f"{updates[stage]:,}" if stage in updates else "-"
        lines.append(f"{stage:12}{count:>10}{tokens[stage] / 1e6:>16,.0f}{spent:>10.2f}")
    needed = sum(hours.values())
    cards = needed * setting.devices
    paid = f", ${cards * price:,.0f} at ${price:g} an hour" if price else ""
    return [
        *lines,
        f"{'together':38}{needed:>10.2f}",
        f"at {mfu:.0%} of {gpu.teraflops:g} Tflop/s: ASSUMED, not measured. "
        "`make rehearse` measures.",
        f"cards: {cards:,.1f} hours of one card{paid}",
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of a plan."""
    parser = Parser(description="what a run needs, before anything is downloaded")
    add_arguments(parser)
    parser.add_argument("--gpu", default="", help="name of the GPU; default: the preset's")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs of a machine")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--engine", default="", help="ddp or fsdp2; default: the preset's")
    parser.add_argument("--mfu", type=float, default=work.MFU, help="share of the peak, assumed")
    parser.add_argument("--price-per-hour", type=float, default=0.0, help="of one GPU, USD")
    return parser.parse_args(argv)


def lines_of(args: argparse.Namespace) -> list[str]:
    """What is printed. Raises UserError for an unknown preset, setting, GPU or shape, and for
    numbers out of range.
    """
    require(0 < args.mfu <= 1, "MFU", f"lie above 0 and not above 1, not {args.mfu:g}")
    require(args.price_per_hour >= 0, "PRICE_PER_HOUR", "be at least 0")
    request = request_of(args)
    name, cards = gpus.gpus_for(request.preset, args.gpu, args.gpus)
    engine = args.engine or ("fsdp2" if request.preset in gpus.SHARDED else "ddp")
    check_numbers(cards, args.nodes, engine)
    devices, sharded = cards * args.nodes, engine == "fsdp2"
    setting = setting_of(config_of(request), devices=devices, sharded=sharded)
    gpu = gpus.GPUS[name]
    return [
        *title_lines(setting, name),
        "",
        *memory_lines(setting, gpu),
        "",
        *work_lines(setting, gpu, args.mfu, args.price_per_hour),
    ]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print the plan."""
    show(lines_of(parse(argv)))


if __name__ == "__main__":
    main()
