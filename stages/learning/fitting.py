"""Out of memory: the microbatch is halved, and the step's gradients are computed again.

A loss is weighted by tokens or pairs over the whole batch, so smaller microbatches give the same
gradient up to rounding. An optimizer step is never repeated: it may have been half done.

One process goes on at once. Several cannot: while one is out of memory, the others wait in a
collective call for it. So the launch ends, and starts again from its last checkpoint with the
smaller microbatch.
"""

import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from stages.learning.state import State
from stages.settings.checks import UserError

T = TypeVar("T")


def in_memory(state: State, gradients: Callable[[int], T], least: int = 1) -> T:
    """What `gradients` returns when it is called with a size of microbatches that fits.

    It must start from no gradients, and take no optimizer step. `least` is the smallest size. The
    size stays for the rest of the stage; the manifest names each that did not fit. Raises UserError
    if even the smallest does not fit, or if the result depends on the size.
    """
    while True:
        try:
            return gradients(state.microbatch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # outside this block the failed pass is no longer held by its error
        state.optimizer.zero_grad()
        _halve(state, least)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory was short. cuBLAS, which takes some of its own, says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)


def _halve(state: State, least: int) -> None:
    run, size = state.run, state.microbatch_size
    half = max(least, size // 2)
    if run.stage == "ppo" and run.config.ppo.loss_mean == "microbatches":
        raise UserError(
            f"out of memory in microbatches of {size}: set memory.microbatch_size={half} (they are "
            "not halved, because with ppo.loss_mean=microbatches the result depends on their size)"
        )
    if size <= least:
        raise UserError(
            f"out of memory in the smallest microbatches, of {size}: try "
            "memory.gradient_checkpointing=true, lora.rank=16, or GPUS= with ENGINE=fsdp2"
        )
    update = state.update + 1
    run.note_halving({"update": update, "from": size, "to": half})
    line = f"out of memory in update {update}: microbatches of {half}, not {size}, from here on"
    if state.accelerator.num_processes > 1:
        raise UserError(f"{line}; all processes start again from the last checkpoint")
    print(line, file=sys.stderr, flush=True)
    state.microbatch_size = half
