"""The batch sizes of a pass if memory.microbatch_size or memory.forward_batch_size is `auto`.

They are chosen when a stage begins: as many as fit into free memory, according to the memory plan.
"""

import os
import sys

import torch

from stages.config.config import Config
from stages.config.environment import is_on, launched_processes
from stages.config.errors import UserError
from stages.config.sections import Memory
from stages.config.stages import stage_row
from stages.planning.memory import GIB, Setting
from stages.planning.parts import most_bytes, sized
from stages.planning.shapes import Shape, read_shape, shape_of
from stages.runs.manifest import stage_folder

# For a model whose family has no memory plan.
MICROBATCH_WITHOUT_PLAN = 4
FORWARD_BATCH_WITHOUT_PLAN = 16
# The share of its memory that a stage may take.
SHARE_OF_MACHINE = 0.6
SHARE_OF_GPU = 0.9


def with_sizes(config: Config, stage: str) -> Config:
    """The config with a number in place of each `auto`; one line on stderr says which and why.

    The config of a stage that runs no model is not changed.
    """
    if not stage_row(stage, config.kind).computes:
        return config
    try:
        memory, reason = _planned_sizes(config, stage)
    except UserError:  # the shape is not known
        memory = config.memory.changed(
            microbatch_size=config.memory.microbatch_size or MICROBATCH_WITHOUT_PLAN,
            forward_batch_size=config.memory.forward_batch_size or FORWARD_BATCH_WITHOUT_PLAN,
        )
        reason = "no memory plan for this family"

    if os.environ.get("RANK", "0") == "0":
        sizes = f"memory.microbatch_size={memory.microbatch_size}"
        sizes += f" memory.forward_batch_size={memory.forward_batch_size}"
        print(f"{stage}: {sizes} ({reason})", file=sys.stderr, flush=True)
    return config.changed(memory=memory)


def _planned_sizes(config: Config, stage: str) -> tuple[Memory, str]:
    """The memory section with the sizes that fit, and why. Raises UserError without a plan."""
    processes = launched_processes()
    usable = usable_bytes(processes)
    setting = Setting(
        config=config,
        shape=_shape(config),
        devices=processes,
        on_gpu=torch.cuda.is_available(),
        sharded=is_on("ACCELERATE_USE_FSDP"),
    )
    setting = sized(setting, usable, stage)
    most = most_bytes(setting, stage)
    reason = f"at most {most / GIB:.1f} of {usable / GIB:.1f} GiB"
    if most > usable:
        reason += ": TOO LARGE, add lora.rank=16"
    return setting.config.memory, reason


def usable_bytes(processes: int) -> float:
    """Bytes that a stage may take: a share of the GPU's free memory, or of the machine's memory.

    With several processes a GPU's total memory counts, so that all processes get the same sizes.
    """
    if not torch.cuda.is_available():
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SHARE_OF_MACHINE * machine / processes
    free, total = torch.cuda.mem_get_info()
    return SHARE_OF_GPU * (free if processes == 1 else total)


def _shape(config: Config) -> Shape:
    """The shape of the run's base model; of the checkpoint before the base stage has run."""
    saved = stage_folder(config, "base") / "model/config.json"
    return read_shape(saved) if saved.is_file() else shape_of(config.base)
