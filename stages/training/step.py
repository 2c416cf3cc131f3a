"""The learner, and one optimizer step on a global batch, in microbatches that fit into memory."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.config.errors import UserError, say_error
from stages.config.out_of_memory import gpu_memory_usage
from stages.training.memory import MICROBATCH, MemoryBudget, PassSize
from stages.training.optimizer import gradient_norm, make_moments
from stages.training.processes import global_sum

T = TypeVar("T")

SLOW_STEP = 5
"""A step that takes this many times the stage's median is slow."""


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite; raised before it can spoil the weights."""


@dataclass(kw_only=True)
class StepTimes:
    """The durations of a stage's steps. Warns once if a step was slow because memory was short."""

    seconds: list[float] = field(default_factory=list)
    has_reported: bool = False

    def add(self, seconds: float, retries: int) -> None:
        """Count a step. `retries`: how often torch had to free its cache and allocate again."""
        usual = median(self.seconds) if self.seconds else math.inf
        if retries > 0 and seconds > SLOW_STEP * usual and not self.has_reported:
            self.has_reported = True
            say_error(
                f"a step took {seconds:.1f} s (median {usual:.1f}) because GPU memory was short"
                f" ({gpu_memory_usage()}): leave more of it free, or lower {MICROBATCH}"
            )
        self.seconds.append(seconds)


@dataclass(kw_only=True)
class Learner:
    """Everything that an optimizer step needs, without a run, settings or files."""

    stage: str
    """The name of what learns, in messages and settings."""
    accelerator: Accelerator
    budget: MemoryBudget
    trained: Any
    """The networks that learn, as one module that the accelerator has wrapped."""
    optimizer: Any
    fixed_by: str = ""
    """The setting that makes the result depend on the microbatch size, as in `PassSize`."""
    update: int = 0
    """The next update, counted from 0."""
    times: StepTimes = field(default_factory=StepTimes)


def optimizer_step(
    learner: Learner,
    split: Callable[[int], Sequence[T]],
    losses: Callable[[T], Iterable[tuple[Tensor, dict[str, Tensor]]]],
    smallest: int = 1,
    clip: Callable[[], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Take one optimizer step; return each statistic summed over the global batch.

    `split(size)` returns this process's microbatches of at most `size` sequences; `smallest` is the
    smallest size that it accepts. `losses(microbatch)` yields losses, each with its statistics. A
    loss is the microbatch's share of the mean over the global batch: losses and statistics add up.
    `clip` may clip the gradients before the step, and returns their norms as more statistics.
    Raises NonFiniteError before the step if a statistic or the gradient is not finite.
    """
    accelerator = learner.accelerator
    started = time.monotonic()
    retries_before = _allocation_retries()

    def accumulate_gradients(size: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the statistics, and what else must be finite."""
        learner.optimizer.zero_grad()  # gradients of an attempt that ran out of memory
        local_sums: dict[str, Tensor] = {}
        microbatches = split(size)
        with learner.budget.weights_cast_once(learner.trained):
            for number, microbatch in enumerate(microbatches, start=1):
                # Processes exchange gradients with the last microbatch only.
                is_last = number == len(microbatches)
                with nullcontext() if is_last else accelerator.no_sync(learner.trained):
                    for loss, statistics in losses(microbatch):
                        # DDP averages gradients over processes; the global mean needs their sum.
                        accelerator.backward(loss * accelerator.num_processes)
                        for key, value in statistics.items():
                            value = value.detach().double()
                            local_sums[key] = local_sums.get(key, 0.0) + value

        sums = global_sum(accelerator, *local_sums.values())
        totals = dict(zip(local_sums, sums, strict=True))
        norms: dict[str, float] = {}
        if clip is None:
            norms["gradient"] = gradient_norm(learner.trained)
        else:
            totals |= clip()
        make_moments(learner.optimizer)
        return totals, norms

    pass_size = PassSize(
        rows=learner.budget.microbatch_size,
        smallest=smallest,
        setting=MICROBATCH,
        fixed_by=learner.fixed_by,
        is_collective=accelerator.num_processes > 1,
    )
    totals, norms = learner.budget.fit(pass_size, accumulate_gradients)
    _check_finite(learner, totals | norms)

    learner.optimizer.step()
    learner.optimizer.zero_grad()
    learner.times.add(
        seconds=time.monotonic() - started,
        retries=_allocation_retries() - retries_before,
    )
    return totals


def _check_finite(learner: Learner, statistics: dict[str, float]) -> None:
    not_finite = [key for key, value in statistics.items() if not math.isfinite(value)]
    if not_finite:
        raise NonFiniteError(
            f"{learner.stage} stopped before an optimizer step of update {learner.update + 1},"
            f" because these are not finite: {', '.join(not_finite)}: try a smaller"
            f" {learner.stage}.learning_rate"
        )


def _allocation_retries() -> int:
    """Return how often torch ran out of GPU memory, freed its cache and allocated again."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
