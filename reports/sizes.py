"""How many rows a pass of a stage holds where the settings leave it to the plan: `auto`.

The warm interpreter calls this when a stage begins, because the plan stands above the stages.
"""

import os
import sys
from typing import Any

import torch

from reports.needs.memory import GIB, Setting
from reports.needs.plan import most_bytes, sized
from reports.needs.shapes import Shape, read_shape, shape_of
from stages.config.checks import UserError
from stages.config.config import Config
from stages.config.environment import is_on, launched_processes
from stages.config.stages import row_of
from stages.runs.manifest import stage_folder

UNKNOWN = {"microbatch_size": 4, "forward_batch_size": 16}  # where memory has no plan
OF_MACHINE, OF_CARD = 0.6, 0.9  # shares of their memory that a stage may take


def with_sizes(config: Config, stage: str) -> Config:
    """The config with a number in the place of each `auto`; one line says which, and why.

    Of a stage that runs no model it stays as it is.
    """
    if not row_of(stage, config.kind).computes:
        return config
    processes, on_gpu = launched_processes(), torch.cuda.is_available()
    how: Any = {"devices": processes, "on_gpu": on_gpu, "sharded": is_on("ACCELERATE_USE_FSDP")}
    usable = usable_bytes(processes)
    try:
        setting = sized(Setting(config=config, shape=shape_here(config), **how), usable, stage)
        memory, most = setting.config.memory, most_bytes(setting, stage)
        why = f"{most / GIB:.1f} GiB at most, of {usable / GIB:.1f}"
        if most > usable:
            why = f"{why}: TOO LARGE, add lora.rank=16"
    except UserError:
        rows: Any = {name: vars(config.memory)[name] or least for name, least in UNKNOWN.items()}
        memory, why = config.memory.changed(**rows), "its family has no plan"
    if os.environ.get("RANK", "0") == "0":
        chosen = " ".join(f"memory.{name}={vars(memory)[name]}" for name in UNKNOWN)
        print(f"{stage}: {chosen} ({why})", file=sys.stderr, flush=True)
    return config.changed(memory=memory)


def usable_bytes(processes: int) -> float:
    """Bytes that a stage may take: of what is free on the card, or of the machine's memory.

    Of several processes each must find the same, so there all of a card counts.
    """
    if not torch.cuda.is_available():
        return OF_MACHINE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    free, total = torch.cuda.mem_get_info()
    return OF_CARD * (free if processes == 1 else total)


def shape_here(config: Config) -> Shape:
    """Of the run's base model, or of the checkpoint where there is none yet."""
    saved = stage_folder(config, "base") / "model/config.json"
    return read_shape(saved) if saved.is_file() else shape_of(config.base)
