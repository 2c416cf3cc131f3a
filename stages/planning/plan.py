"""The memory that a run needs, before anything is downloaded: `make plan`.

    python -m stages.planning.plan --preset pythia-6.9b --gpus 8

It prints the number of parameters, the memory on each GPU part by part, and settings that make a
run fit. It does not estimate hours: `make sft rm ppo REHEARSE=1` measures them.
"""

import argparse
import textwrap
from collections.abc import Sequence

from stages.config.command_line import config_of
from stages.config.error_messages import Parser, in_one_line, show
from stages.config.errors import UserError, unknown
from stages.config.options import add_arguments, request_of
from stages.pipeline.launch import launcher_words
from stages.planning.memory import GIB, Bytes, Setting, setting_of
from stages.planning.parts import part_bytes, sized
from stages.planning.shapes import parameters

# Fields of `Bytes` -> their titles in the table.
COLUMNS = {
    "weights": "weight",
    "gradients": "grad",
    "optimizer": "optim",
    "copies": "copy",
    "activations": "activ",
    "logits": "logit",
    "cache": "cache",
    "other": "other",
    "total": "total",
}
WIDTH = 80

# GiB of each GPU, as `nvidia-smi` shows it.
GPUS = {
    "h200-141gb": 140.4,
    "h100-80gb": 79.6,
    "a100-80gb": 80.0,
    "a100-40gb": 40.0,
    "l40s-48gb": 45.0,
    "rtx4090-24gb": 23.99,
    "rtx3090-24gb": 24.0,
    "a10-24gb": 22.5,
    "l4-24gb": 22.5,
}
# GiB of the CUDA context, cuBLAS and NCCL, and the share that the allocator can use. Both are
# assumptions; a rehearsal measures what is left.
CONTEXT_GIB = 1.0
USABLE_SHARE = 0.94

# The GPUs that a preset is meant for, and their number.
MADE_FOR = {
    "pythia-1b-24gb": ("rtx4090-24gb", 1),
    "pythia-2.8b": ("h200-141gb", 1),
    "pythia-6.9b": ("h100-80gb", 8),
    "pythia-6.9b-lora": ("h100-80gb", 8),
}
USUAL = ("h100-80gb", 1)
# Presets whose networks do not fit on one GPU: several GPUs share them.
SHARDED = ("pythia-6.9b",)


def gpus_for(preset: str, gpu: str = "", gpus: int = 0) -> tuple[str, int]:
    """Name and number of the GPUs to plan for: the requested ones, or else those of the preset.

    Raises UserError for an unknown GPU, with the nearest name, and for a negative number.
    """
    if gpu and gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS)
    if gpus < 0:
        raise UserError(f"GPUS={gpus} is below 1: give the number of GPUs")
    usual_gpu, usual_gpus = MADE_FOR.get(preset, USUAL)
    return gpu or usual_gpu, gpus or usual_gpus


def usable_bytes(gpu: str) -> float:
    """Bytes of a GPU that are available for tensors."""
    return (GPUS[gpu] * USABLE_SHARE - CONTEXT_GIB) * GIB


def gib(count: float) -> str:
    """Bytes as GiB with three digits; a dash for none."""
    value = count / GIB
    if not value:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def title_lines(setting: Setting, gpu: str) -> list[str]:
    """Lines that name the run, its model and the GPUs."""
    config = setting.config
    policy = parameters(setting.shape)
    scorer = parameters(setting.shape, is_scalar=True)
    engine = ", ENGINE=fsdp2" if setting.sharded else ""
    precision = "bf16 autocast, float32 weights" if setting.half else "float32"
    lines = [
        f"{config.name}, seed {config.seed}",
        f"  starts from {config.base.checkpoint} ({setting.shape.family})",
        f"  {policy:,} parameters; reward model and critic {scorer:,}",
        f"  {setting.devices} x {gpu}{engine}, {precision}",
        f"  {gib(usable_bytes(gpu))} of the {GPUS[gpu]:.1f} GiB of a GPU are for tensors: "
        f"{USABLE_SHARE:.0%}, minus {CONTEXT_GIB:g} for CUDA",
    ]
    return [line[:WIDTH] for line in lines]


def memory_lines(setting: Setting, gpu: str) -> list[str]:
    """A row for every part of every stage, and whether all of them fit."""
    parts = part_bytes(setting)
    usable = usable_bytes(gpu)
    memory = setting.config.memory
    lines = [
        "peak GiB, with passes of "
        f"{memory.microbatch_size} rows in training and {memory.forward_batch_size} elsewhere",
        _row("", list(COLUMNS.values())),
    ]
    for name, held in parts.items():
        fits = "ok" if held.total <= usable else "NO"
        lines.append(_row(name, _cells(held), fits))

    too_large = [name for name, held in parts.items() if held.total > usable]
    if too_large:
        lines += textwrap.wrap(f"does not fit: {', '.join(too_large)}", WIDTH)
        if setting.devices > setting.shards:
            lines.append("ENGINE=fsdp2 shares the weights")
        lines.append("smaller memory.* settings or lora.rank=16 need less")
    else:
        largest = max(parts, key=lambda name: parts[name].total)
        lines.append(f"everything fits; the peak is {gib(parts[largest].total)} GiB ({largest})")
    return lines


def _cells(held: Bytes) -> list[str]:
    return [gib(getattr(held, name)) for name in COLUMNS]


def _row(name: str, cells: Sequence[str], end: str = "") -> str:
    numbers = "".join(f"{cell:>6} " for cell in cells)
    return f"{name:14}{numbers}{end}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of a plan."""
    parser = Parser(description="print the memory that a run needs, before anything is downloaded")
    add_arguments(parser)
    parser.add_argument("--gpu", default="", help="name of the GPU; default: the preset's")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs on all machines")
    parser.add_argument("--engine", default="", help="ddp or fsdp2; default: the preset's")
    return parser.parse_args(argv)


def lines_of(args: argparse.Namespace) -> list[str]:
    """The text of the plan.

    Raises UserError for an unknown preset, setting, GPU or shape, and for numbers out of range.
    """
    request = request_of(args)
    gpu, devices = gpus_for(request.preset, args.gpu, args.gpus)
    launcher_words(devices, args.engine, launch="")  # raises UserError for what cannot be started
    engine = args.engine
    if not engine:
        engine = "fsdp2" if request.preset in SHARDED else "ddp"

    setting = setting_of(config_of(request), devices=devices, sharded=engine == "fsdp2")
    setting = sized(setting, usable_bytes(gpu))
    # PRESET=own has added its choices to SET, so what was typed there is no longer known.
    has_only_a_preset = not args.overrides and not args.data
    if has_only_a_preset:
        command = f"make sft rm ppo PRESET={request.preset} REHEARSE=1"
    else:
        command = "make sft rm ppo REHEARSE=1 with the same variables"
    measure = f"to measure its hours: {command}"
    return [*title_lines(setting, gpu), "", *memory_lines(setting, gpu), "", measure]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print the plan."""
    show(lines_of(parse(argv)))


if __name__ == "__main__":
    main()
