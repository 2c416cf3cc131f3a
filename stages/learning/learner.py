"""Networks that learn, and microbatches of them that fit into memory.

When memory is short the microbatch is halved, and the step's gradients are computed again. A loss
is weighted by tokens or pairs over the whole batch, so smaller microbatches give the same gradient
up to rounding. An optimizer step is never repeated: it may have been half done.

One process goes on at once. Several cannot: while one is out of memory, the others wait in a
collective call for it. So the launch ends, and starts again from its last checkpoint with the
smaller microbatch.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from stages.learning.batches import global_sum, synchronized_last
from stages.learning.sharding import whole
from stages.settings.checks import UserError, is_out_of_memory

T = TypeVar("T")


@dataclass(kw_only=True)
class Learner:
    """What an optimizer step needs, and nothing else: no run, no settings, no files."""

    stage: str
    """How messages and settings name what learns."""

    accelerator: Accelerator
    trained: Any
    """The networks that learn, a module as the accelerator has wrapped it."""
    optimizer: Any
    microbatch_size: int
    """Sequences per forward and backward pass on one device; halved when memory is short."""
    fixed_by: str = ""
    """The setting by which the result depends on that size, which then is never halved."""
    update: int = 0
    """The next update, counted from 0."""
    note_halving: Callable[[dict[str, int]], None] | None = None
    """Is told of each size that did not fit: `update` (from 1), `from`, `to`."""


class NonFiniteError(UserError):
    """A loss or gradient is not a finite number; raised before it can spoil the weights."""


def refuse_non_finite(stage: str, stats: dict[str, float]) -> None:
    """Raise NonFiniteError if a statistic of the step about to be taken is not finite."""
    bad = [key for key, value in stats.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"{stage} stopped before a step: {', '.join(bad)} not finite: try a smaller "
            f"{stage}.learning_rate"
        )


def optimizer_step(
    learner: Learner,
    parts: Callable[[int], Sequence[T]],
    losses: Callable[[T], Iterable[tuple[Tensor, dict[str, Tensor]]]],
    least: int = 1,
    clip: Callable[[], dict[str, float]] | None = None,
) -> dict[str, float]:
    """One optimizer step; returns each statistic summed over the global batch.

    `parts(size)` gives the microbatches of an attempt, `losses(part)` the losses of one, each with
    its statistics. A loss is this part's share of the global mean. `least` is the smallest size;
    `clip` is called before the step and adds the norms of the gradients. Raises NonFiniteError
    instead of a step if a statistic or the gradient is not finite.
    """
    accelerator = learner.accelerator

    def gradients(size: int) -> dict[str, float]:
        sums: dict[str, Tensor | float] = {}
        for part in synchronized_last(accelerator, learner.trained, parts(size)):
            for loss, stats in losses(part):
                # Devices average their gradients; the global mean needs their sum.
                accelerator.backward(loss * accelerator.num_processes)
                sums |= {key: sums.get(key, 0.0) + x.detach().double() for key, x in stats.items()}
        return dict(zip(sums, global_sum(accelerator, *sums.values()), strict=True))

    stats = in_memory(learner, gradients, least) | (clip() if clip else {})
    norm = {} if clip else {"gradient": gradient_norm(learner.trained)}
    refuse_non_finite(learner.stage, stats | norm)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return stats


def gradient_norm(trained: nn.Module) -> float:
    """Of all weights that have a gradient, with the parts that other processes hold."""
    gradients = [weight.grad for weight in trained.parameters() if weight.grad is not None]
    return whole(get_total_norm(gradients)).item()


def in_memory(learner: Learner, gradients: Callable[[int], T], least: int = 1) -> T:
    """What `gradients` returns when it is called with a size of microbatches that fits.

    It must start from no gradients, and take no optimizer step. `least` is the smallest size. The
    smaller size stays. Raises UserError if even the smallest does not fit, or if the result depends
    on the size.
    """
    while True:
        try:
            return gradients(learner.microbatch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # outside this block the failed pass is no longer held by its error
        learner.optimizer.zero_grad()
        _halve(learner, least)


def _halve(learner: Learner, least: int) -> None:
    size, update = learner.microbatch_size, learner.update + 1
    half = max(least, size // 2)
    if size <= least:  # a pass then holds `least`, whatever the setting says
        raise UserError(
            f"out of memory in the smallest microbatches, of {max(size, least)}: try "
            "memory.gradient_checkpointing=true, lora.rank=16, or GPUS= with ENGINE=fsdp2"
        )
    if learner.fixed_by:
        raise UserError(
            f"out of memory in microbatches of {size}: set memory.microbatch_size={half} (they are "
            f"not halved, because with {learner.fixed_by} the result depends on their size)"
        )
    if learner.note_halving is not None:
        learner.note_halving({"update": update, "from": size, "to": half})
    line = f"out of memory in update {update}: microbatches of {half}, not {size}, from here on"
    if learner.accelerator.num_processes > 1:
        raise UserError(f"{line}; all processes start again from the last checkpoint")
    print(line, file=sys.stderr, flush=True)
    learner.microbatch_size = half
