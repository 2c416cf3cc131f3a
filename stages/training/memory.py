"""How many rows a forward pass holds, and what happens when memory runs out.

Every pass runs through `MemoryBudget.fit`. When memory runs out, the cache is freed and the pass
runs once more at the same size. If it fails again, its size is halved until it fits, and all later
passes with the same setting start at the smaller size. No result depends on the size, up to
rounding: losses are weighted by tokens or pairs over the whole batch, and each episode has its own
sampling noise. An optimizer step itself is never repeated, because it might have been applied in
part; its moments are allocated before it (`stages/training/optimizer.py`).

If several processes wait for each other in a pass, one of them cannot repeat it. In that case the
run stops, with a message that names the setting and a smaller value.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from stages.config.errors import UserError, say_error
from stages.config.out_of_memory import LESS_MEMORY, gpu_memory_usage, is_out_of_memory
from stages.config.sections import Memory
from stages.models.policy import weights_cast_once
from stages.training.sharding import is_sharded

T = TypeVar("T")
R = TypeVar("R")

FORWARD = "memory.forward_batch_size"
MICROBATCH = "memory.microbatch_size"


@dataclass(frozen=True, kw_only=True)
class PassSize:
    """How many rows one kind of forward pass holds if there is enough memory."""

    rows: int
    smallest: int = 1
    """A pass cannot hold fewer rows than this."""
    setting: str = FORWARD
    """The setting that limits the rows, as messages name it: `FORWARD` or `MICROBATCH`."""
    fixed_by: str = ""
    """The setting, if any, that makes the result depend on the size, so that it is never halved."""
    is_collective: bool = False
    """Whether several processes wait for each other in this pass."""


@dataclass(kw_only=True)
class MemoryBudget:
    """How many sequences fit into the memory of this process, for one stage."""

    forward_batch_size: int
    """Sequences of a pass without gradients, as set."""
    microbatch_size: int
    """Sequences of a forward and backward pass on one device, as set."""
    keeps_copies: bool = True
    """Whether the bf16 copies of weights outlast a pass. They do not if memory is short."""
    halvings: list[dict[str, Any]] = field(default_factory=list)
    """Every halving so far: `setting`, and its value `from` and `to`. The manifest records them."""
    has_reported_retry: bool = False

    @classmethod
    def from_settings(cls, memory: Memory) -> "MemoryBudget":
        """Return the budget with which a stage starts."""
        return cls(
            forward_batch_size=memory.forward_batch_size,
            microbatch_size=memory.microbatch_size,
            keeps_copies=not memory.gradient_checkpointing,
        )

    def sequences(self, setting: str) -> int:
        """Return how many sequences the settings allow in a pass."""
        return self.microbatch_size if setting == MICROBATCH else self.forward_batch_size

    def times_halved(self, setting: str) -> int:
        """Return how often a setting was halved in this stage."""
        return sum(halving["setting"] == setting for halving in self.halvings)

    def rows(self, size: PassSize) -> int:
        """Return how many rows a pass of this size holds now."""
        rows = min(size.rows, self.sequences(size.setting))
        # A process halves only the passes that it runs on its own. It must not change passes in
        # which processes wait for each other: all of them have to make the same number of those.
        if not size.is_collective:
            rows //= 2 ** self.times_halved(size.setting)
        return max(size.smallest, rows)

    def fit(self, size: PassSize, run: Callable[[int], R]) -> R:
        """Return `run(rows)` for the largest number of rows that fits into memory.

        `run` may be called several times and must start from scratch each time. Raises UserError if
        the smallest size does not fit, if the result depends on the size (`size.fixed_by`), or if
        other processes wait in this pass.
        """
        has_retried = False
        while True:
            try:
                return run(self.rows(size))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                gpu_memory = gpu_memory_usage()
            # Free memory outside the `except` block: inside it, the exception's traceback still
            # holds the tensors of the failed pass.
            gc.collect()
            torch.cuda.empty_cache()
            self.keeps_copies = False

            details = f"; {gpu_memory}" if gpu_memory else ""
            if has_retried or size.is_collective:
                self._halve(size, details)
            elif not self.has_reported_retry:
                self.has_reported_retry = True
                say_error(f"out of memory ({size.setting}{details}): trying once more")
            has_retried = True

    def _halve(self, size: PassSize, details: str) -> None:
        """Halve a size for the rest of the stage and say so, or raise UserError."""
        rows = self.rows(size)
        if rows <= size.smallest:
            raise UserError(
                f"out of memory in a pass of {rows}, the smallest possible"
                f" ({size.setting}{details}): {LESS_MEMORY}"
            )

        if size.fixed_by:
            raise UserError(
                f"out of memory in passes of {rows}: set {size.setting}={rows // 2} (it is not"
                f" halved automatically, because with {size.fixed_by} the result depends on it"
                f"{details})"
            )
        if size.is_collective:
            raise UserError(
                f"out of memory in passes of {rows}: set {size.setting}={rows // 2} and run the"
                " command again, which resumes from the last checkpoint (processes that wait for"
                f" each other in a pass cannot halve it{details})"
            )

        value = self.sequences(size.setting) // 2 ** self.times_halved(size.setting)
        half = max(1, value // 2)
        self.halvings.append({"setting": size.setting, "from": value, "to": half})
        say_error(f"out of memory: {size.setting}={half} instead of {value} from here on{details}")

    def measure(
        self, rows: Sequence[T], size: PassSize, measure: Callable[[list[T]], Sequence[R]]
    ) -> list[R]:
        """Return what `measure` returns for each row, in passes that fit into memory."""

        def run(rows_of_pass: int) -> list[R]:
            results: list[R] = []
            for chunk in chunks(rows, rows_of_pass):
                results.extend(measure(list(chunk)))
            return results

        return self.fit(size, run)

    def weights_cast_once(self, network: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which autocast casts each weight once, if there is memory for it."""
        # A sharded network's weights are gathered only for a moment, so no copy can be kept.
        if self.keeps_copies and not is_sharded(network):
            return weights_cast_once(network)
        return nullcontext()


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Return consecutive pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def use_gradient_checkpointing(model: Any, memory: Memory) -> None:
    """Recompute activations in the backward pass if the settings say so: slower, less memory."""
    if not memory.gradient_checkpointing:
        return
    # transformers 5 renamed the method, and warns about the old name.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
