"""What the training loops share: accelerator, optimizer, schedules, measuring row by row."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from stages.running.files import KeptRows
from stages.running.machine import check_threads, keep_freed_memory
from stages.running.progress import Stopped, finishing_first, progress, stop_asked
from stages.settings.config import Config
from stages.settings.sections import Memory, Optimizer
from stages.training.learner import (
    FORWARD,
    MICROBATCH,
    Size,
    T,
    chunks,
    in_pieces,
    local_share,
    room_of,
    stream_seed,
)
from stages.training.sharding import new_accelerator


def make_accelerator(config: Config, takes_turns: bool = False) -> Accelerator:
    """The accelerator, with seeds and threads set. Raises UserError as `new_accelerator` does, and
    for more threads than there are cores.

    `takes_turns`: the trained module's networks run one after the other, so that a pass uses only
    some of its weights.
    """
    check_threads(config.memory.cpu_threads)
    if config.memory.cpu_threads:
        torch.set_num_threads(config.memory.cpu_threads)
    seed = stream_seed(config.seed, "global")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    keep_freed_memory()
    accelerator = new_accelerator(config.memory.mixed_precision, takes_turns)
    sizes = (config.memory.forward_batch_size, config.memory.microbatch_size)
    room = room_of(accelerator)
    room.settings = dict(zip((FORWARD, MICROBATCH), sizes, strict=True))
    room.keeps_copies = not config.memory.gradient_checkpointing
    return accelerator


def make_optimizer(parameters: Any, learning_rate: float, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW as in Huang et al. 2024 (eps 1e-5, torch's betas and weight decay).

    The fused kernel makes no temporary tensors.
    """
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set it in every parameter group, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def use_gradient_checkpointing(model: Any, memory: Memory) -> None:
    """Trade time for memory if the settings say so."""
    if memory.gradient_checkpointing:
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        getattr(model, new if hasattr(model, new) else old)({"use_reentrant": False})


def parts_by_length(
    accelerator: Accelerator, lengths: Sequence[int], size: int
) -> list[Sequence[int]]:
    """This process's rows in parts of at most `size` rows of similar length.

    So little of a forward pass is padding. Rows of equal length stay in their order.
    """
    share = local_share(range(len(lengths)), accelerator)
    return chunks(sorted(share, key=lambda row: lengths[row]), size)


def over_share(
    accelerator: Accelerator,
    lengths: Sequence[int],
    size: int,
    label: str,
    measure: Callable[[list[int]], Sequence[T]],
    keep: Path | None,
) -> list[T]:
    """What `measure` says of each row of this process's share, in the order of `local_share`.

    `measure` gets the rows of one forward pass, at most `size` of similar `lengths`, or fewer where
    memory is short, and returns numbers, lists and strings. If there is a folder to `keep` them in,
    finished parts outlast the process: after a restart a part is measured only if one of its rows
    is unknown. A signal stops the measurement after a part: then it raises Stopped.
    """
    kept = None
    if keep is not None:
        accelerator.wait_for_everyone()  # the main process may still be making the run's folder
        kept = KeptRows(keep, label, accelerator.process_index)
    known: dict[int, T] = kept.known if kept else {}
    todo = [
        list(part)
        for part in parts_by_length(accelerator, lengths, size)
        if any(row not in known for row in part)
    ]
    stop = 0
    with finishing_first():
        for part in progress(todo, label, len(todo)):
            measured = in_pieces(accelerator, Size(rows=size), part, measure)
            known |= dict(zip(part, measured, strict=True))
            if kept is not None:
                kept.add(part, measured)
                stop = stop_asked()
                if stop:
                    break
    # All stop, or none: one that has finished would wait for rows that never come.
    if kept is not None and (number := max(gather_object([stop]))):
        raise Stopped(number)
    return [known[row] for row in local_share(range(len(lengths)), accelerator)]


def gather_rows(accelerator: Accelerator, share: list[T]) -> list[T]:
    """The items of all processes, in the order from which `local_share` dealt them."""
    if accelerator.num_processes == 1:
        return share
    gathered = gather_object([share])
    rows = sum(len(part) for part in gathered)
    return [gathered[row % len(gathered)][row // len(gathered)] for row in range(rows)]


def over_rows(
    accelerator: Accelerator,
    lengths: Sequence[int],
    size: int,
    label: str,
    measure: Callable[[list[int]], Sequence[T]],
    keep: Path | None,
) -> list[T]:
    """The same for all rows in their order, from all processes."""
    return gather_rows(accelerator, over_share(accelerator, lengths, size, label, measure, keep))
