"""State of a training loop: one object instead of many parameters.

It holds what changes from update to update (networks, optimizer, the next update, the KL
coefficient) beside what does not (the run, the accelerator, the order of the data).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn

from stages.config import UserError
from stages.runs import Run, progress, stage_folder
from stages.training import NonFiniteError, Order


@dataclass(kw_only=True)
class State:
    """A training loop between two updates."""

    run: Run
    accelerator: Accelerator
    trained: nn.Module
    """The networks that learn, as the accelerator has wrapped them."""
    optimizer: Any
    updates: int
    """Updates of the whole stage."""
    order: Order
    """The order in which the stage goes through its data."""
    kl_coef: float = 0.0
    """PPO's, of the next update, reward units per nat; an adaptive one moves."""
    update: int = 0
    """The next update, counted from 0."""

    def remaining(self, label: str) -> Iterator[int]:
        """The updates that are still to do, with progress shown; each counts once it is over."""
        todo = range(self.update, self.updates)
        for update in progress(todo, label, len(todo)):
            yield update
            self.update = update + 1


@contextmanager
def saving_a_broken_batch(
    state: State, before: str, batch: Callable[[], dict[str, Tensor]]
) -> Iterator[None]:
    """Around a step: where its numbers are not finite, save this process's part of the batch.

    The error then names that file, the update and the weights of the stage `before`.
    """
    run = state.run
    try:
        yield
    except NonFiniteError as error:
        name = f"{run.folder.name}.failed{state.accelerator.process_index}.safetensors"
        path = run.folder.with_name(name)
        save_file({key: x.cpu().contiguous() for key, x in batch().items()}, path)
        raise UserError(
            f"{error} (update {state.update + 1}, its batch is in {path}; the last good weights "
            f"are those in {stage_folder(run.config, before)})"
        ) from None
