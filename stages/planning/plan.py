"""What a run needs, before anything is downloaded: `make plan`. Standard library only.

    python -m stages.planning.plan --preset pythia-6.9b --gpus 8

Parameters; bytes on each GPU, stage by stage, and which knob would make them fit. Hours are not
counted but measured: `make rehearse`.
"""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stages.config.checks import UserError, unknown
from stages.config.command_line import add_arguments, config_of, request_of
from stages.config.faults import Parser, in_one_line, show
from stages.pipeline.launch import launcher_words
from stages.planning.memory import (
    FULL,
    GIB,
    HALF,
    Batch,
    Bytes,
    Network,
    Setting,
    passing,
    sampling,
    setting_of,
    training,
)
from stages.planning.shapes import parameters, rows_of
from stages.rl.algorithms import ALGORITHMS

COLUMNS = ("weights", "gradients", "optimizer", "copies", "activations", "logits", "cache", "other")
HEADS = ("weight", "grad", "optim", "copy", "activ", "logit", "cache", "other", "total")

PAPER_MICROBATCH = 16
# Rows of a pass that are tried first, on a card or not. On a CPU more gain nothing.
MOST_ROWS = {
    True: {"microbatch_size": 64, "forward_batch_size": 512},
    False: {"microbatch_size": 8, "forward_batch_size": 32},
}


def part_bytes(setting: Setting) -> dict[str, Bytes]:
    """The worst moment of every part, by the part's name, which begins with its stage's."""
    config, data = setting.config, setting.config.data
    small, large = config.memory.microbatch_size, config.memory.forward_batch_size
    alone = replace(setting, sharded=False)  # what learns nothing is loaded whole by every process
    policy, scorer = (Network(shape=setting.shape, scalar=scalar) for scalar in (False, True))
    sft, rm = [_learner(setting, "sft", scalar=False)], [_learner(setting, "rm", scalar=True)]
    longest = data.max_query_summary_tokens
    positions = longest if config.sft.loss_on_query else data.max_summary_tokens
    sft_size = min(small, share_of(config.sft.batch_size, setting))
    # Rows of the reward model hold a query with both summaries, and have no logits.
    pair = data.max_query_comparison_tokens + data.max_comparison_tokens
    pairs = min(max(1, small // 2), share_of(config.rm.batch_size, setting))
    references = config.normalize.posts or rows_of(setting.config)["sft_train"] or large
    scored = (min(large, references), longest, 0)
    summaries = (large, data.max_query_tokens, data.max_summary_tokens)
    return {
        "sft step": training(setting, sft, (sft_size, longest, positions)),
        "sft validation": passing(setting, sft, (small, longest, positions)),
        "rm step": training(setting, rm, (pairs, pair, 0)),
        "rm validation": passing(setting, rm, (max(1, large // 2), pair, 0)),
        "normalize": passing(alone, [scorer], scored),
        "ppo rollout": _rollout(setting),
        "ppo learn": _ppo_learn(setting),
        "summaries": sampling(alone, [policy, scorer], summaries),
    }


def sized(setting: Setting, usable: float, stage: str = "") -> Setting:
    """The setting with a number where memory.* says `auto`: the largest power of two with which
    every part of a stage, or else of all, fits into so many bytes; 1 where none does. A microbatch
    that decides what is learned (`loss_mean`) is the paper's at 1B.
    """
    config, memory = setting.config, vars(setting.config.memory)
    means = {each.loss_mean for each in map(partial(getattr, config), ALGORITHMS)}
    if "microbatches" in means and not memory["microbatch_size"]:
        return sized(with_rows(setting, microbatch_size=PAPER_MICROBATCH), usable, stage)
    most = {name: size for name, size in MOST_ROWS[setting.on_gpu].items() if not memory[name]}
    sizes = dict.fromkeys(most, 1)
    for name, size in most.items():
        while size > 1 and most_bytes(with_rows(setting, **sizes | {name: size}), stage) > usable:
            size //= 2
        sizes[name] = size
    return with_rows(setting, **sizes)


def with_rows(setting: Setting, **sizes: Any) -> Setting:
    """The setting with other sequences of a pass."""
    memory = setting.config.memory.changed(**sizes)
    return replace(setting, config=setting.config.changed(memory=memory))


def most_bytes(setting: Setting, stage: str = "") -> float:
    """The most that a part of a stage needs; of any, where the stage has no plan of its own."""
    parts = part_bytes(setting)
    own = [held.total for part, held in parts.items() if part.split()[0] == stage]
    return max(own or [held.total for held in parts.values()])


def share_of(batch: int, setting: Setting) -> int:
    """Rows of a global batch that one device gets."""
    return max(1, batch // setting.devices)


def _learner(setting: Setting, stage: str, scalar: bool) -> Network:
    rank = setting.rank(stage)
    return Network(shape=setting.shape, scalar=scalar, adapter=rank, trained=True)


def _episode_rows(setting: Setting, size: int) -> Batch:
    """Rows of a pass over `size` of PPO's episodes, their tokens, and the positions of responses.

    A query stands once before its samples, which no pass parts.
    """
    query, response = setting.config.data.max_query_tokens, setting.config.data.max_summary_tokens
    group = setting.config.ppo.samples_per_query
    return max(1, size // group), query + group * response, group * response


def _ppo_networks(setting: Setting) -> list[Network]:
    """Policy and critic, which learn; the reward model and, without LoRA, the reference policy."""
    shape, each = setting.shape, HALF if setting.config.memory.frozen_dtype == "bf16" else FULL
    policy, critic = (_learner(setting, "ppo", scalar=scalar) for scalar in (False, True))
    scorer = Network(shape=shape, scalar=True, frozen=True, each=each)
    reference = Network(shape=shape, frozen=True, each=each)
    return [policy, critic, scorer] + ([] if setting.rank("ppo") else [reference])


def _rollout(setting: Setting) -> Bytes:
    """What measures holds copies of policy and critic, and where they are kept of the reference."""
    data, networks = setting.config.data, _ppo_networks(setting)
    large = setting.config.memory.forward_batch_size
    size = min(large, share_of(setting.config.ppo.batch_size, setting))
    sampled = sampling(setting, networks, (size, data.max_query_tokens, data.max_summary_tokens))
    batch = _episode_rows(setting, size)
    measured = passing(setting, networks, batch, together=True)
    readers = [networks[1], *networks[3:] * setting.keeps]
    casts = sum(setting.half * network.cast_bytes(setting.keeps) for network in readers)
    measured = replace(measured, copies=measured.copies + casts)
    return max(sampled, measured, key=lambda moment: moment.total)


def _ppo_learn(setting: Setting) -> Bytes:
    ppo = setting.config.ppo
    minibatch = max(1, share_of(ppo.batch_size, setting) // ppo.num_minibatches)
    batch = _episode_rows(setting, min(setting.config.memory.microbatch_size, minibatch))
    return training(setting, _ppo_networks(setting), batch)


# -- does it fit -----------------------------------------------------------------------------------

# What the CUDA context, cuBLAS and NCCL take, and what the allocator cannot use between blocks.
# An assumption; `make rehearse` measures what is left.
CONTEXT_GIB = 1.0
USABLE = 0.94
# GiB of each card, as `nvidia-smi` shows it.
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
# The GPUs that a preset is made for, and how many.
MADE_FOR = {
    "pythia-1b-24gb": ("rtx4090-24gb", 1),
    "pythia-2.8b": ("h200-141gb", 1),
    "pythia-6.9b": ("h100-80gb", 8),
    "pythia-6.9b-lora": ("h100-80gb", 8),
}
USUAL = ("h100-80gb", 1)
# Presets whose networks one GPU cannot hold: several share them.
SHARDED = ("pythia-6.9b",)


def gpus_for(preset: str, gpu: str = "", gpus: int = 0) -> tuple[str, int]:
    """Name and number of the GPUs to plan for: as asked, or else those of the preset.

    Raises UserError for an unknown GPU, with the nearest name, or a negative number.
    """
    name, number = MADE_FOR.get(preset, USUAL)
    if gpu and gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS)
    if gpus < 0:
        raise UserError(f"GPUS={gpus}: give the number of cards, at least 1")
    return gpu or name, gpus or number


def usable_bytes(gpu: str) -> float:
    """Bytes of a GPU that are for tensors."""
    return (GPUS[gpu] * USABLE - CONTEXT_GIB) * GIB


def gib(count: float) -> str:
    """Bytes as GiB: three digits."""
    value = count / GIB
    return "-" if not count else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def title_lines(setting: Setting, gpu: str) -> list[str]:
    """Which run, which model, which GPUs."""
    config = setting.config
    policy, scorer = parameters(setting.shape), parameters(setting.shape, scalar=True)
    shared = ", ENGINE=fsdp2" if setting.sharded else ""
    precision = "bf16 autocast, float32 weights" if setting.half else "float32"
    return [
        f"{config.name}, seed {config.seed}"[:80],
        f"  starts from {config.base.checkpoint} ({setting.shape.family})"[:80],
        f"  {policy:,} parameters; reward model and critic {scorer:,}",
        f"  {setting.devices} x {gpu}{shared}, {precision}",
        f"  of {GPUS[gpu]:.1f} GiB a card {gib(usable_bytes(gpu))} are for tensors: "
        f"{USABLE:.0%} less {CONTEXT_GIB:g} for CUDA",
    ]


def memory_lines(setting: Setting, gpu: str) -> list[str]:
    """A row for every part of every stage; whether all fit, or what would need less."""

    def row(name: str, cells: Sequence[str], end: str) -> str:
        return f"{name:14}" + "".join(f"{cell:>6} " for cell in cells) + end

    parts = part_bytes(setting)
    large = [name for name, held in parts.items() if held.total > usable_bytes(gpu)]
    rows = "passes of {microbatch_size} rows, {forward_batch_size} where nothing learns"
    what = f"GiB at the worst moment; {rows.format(**vars(setting.config.memory))}"
    lines = [what, row("", HEADS, "")]
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line of a plan."""
    parser = Parser(description="what a run needs, before anything is downloaded")
    add_arguments(parser)
    parser.add_argument("--gpu", default="", help="name of the GPU; default: the preset's")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs, of all machines")
    parser.add_argument("--engine", default="", help="ddp or fsdp2; default: the preset's")
    return parser.parse_args(argv)


def lines_of(args: argparse.Namespace) -> list[str]:
    """What is printed. Raises UserError for an unknown preset, setting, GPU or shape, and for
    numbers out of range.
    """
    request = request_of(args)
    name, cards = gpus_for(request.preset, args.gpu, args.gpus)
    engine = args.engine or ("fsdp2" if request.preset in SHARDED else "ddp")
    launcher_words(cards, engine, launch="")  # raises UserError for what cannot be started
    setting = setting_of(config_of(request), devices=cards, sharded=engine == "fsdp2")
    setting = sized(setting, usable_bytes(name))
    measure = f"its hours, measured: make rehearse PRESET={request.preset}"
    return [*title_lines(setting, name), "", *memory_lines(setting, name), "", measure]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print the plan."""
    show(lines_of(parse(argv)))


if __name__ == "__main__":
    main()
