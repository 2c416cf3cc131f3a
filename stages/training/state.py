"""State of a training loop: one object instead of many parameters, saved between two updates.

It holds what changes from update to update (the learner with its networks, the next update) beside
what does not (the run, the accelerator, the order of the data). Randomness depends on seed, purpose
and update only, so no generator is saved. A loop that was killed goes on to exactly the same
weights.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import nn

from stages.models.sampling import Noise
from stages.running.files import cut_file, write_json
from stages.running.progress import Stopped, finishing_first, stop_asked
from stages.runs import Run, halvings
from stages.settings.checks import UserError
from stages.settings.ppo import PolicyGradient
from stages.training import checkpoints
from stages.training.learner import Learner, batch_rows, room_of, stream_seed
from stages.training.sharding import SHARDS, is_sharded, load_parts, save_parts

LEAST_RATIO = 20
"""Seconds of training for each second that saving takes: saving costs at most 5 % of the time."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which a stage goes through its data, update after update."""

    rows: int
    """Rows of the split."""
    batch_size: int
    """Rows per update, over all processes."""
    seed: int
    purpose: str
    together: Sequence[Sequence[int]] = ()
    """Rows that stay neighbours, as in `batch_rows`."""

    def batch(self, update: int) -> list[int]:
        """The row indices of an update's global batch; updates are counted from 0."""
        row = self.rows, self.batch_size, update, self.seed, self.purpose
        return batch_rows(*row, self.together)


@dataclass(kw_only=True)
class State:
    """A training loop between two updates."""

    run: Run
    learner: Learner
    updates: int
    """Updates of the whole stage."""
    order: Order
    """The order in which the stage goes through its data."""
    dropout: float = 0.0
    """Probability. If it is above 0, torch's own generator is seeded before each update."""
    _update_started: float = 0.0
    _last: tuple[float, float] = (0.0, 0.0)  # when the last save ended, and what it took

    def __post_init__(self) -> None:
        def note(halving: dict[str, Any]) -> None:
            self.run.note_halving({"update": self.update + 1, **halving})

        room_of(self.accelerator).note = note

    @property
    def update(self) -> int:
        """The next update, counted from 0."""
        return self.learner.update

    @property
    def accelerator(self) -> Accelerator:
        """The learner's."""
        return self.learner.accelerator

    @property
    def seconds(self) -> float:
        """Since this update began."""
        return time.monotonic() - self._update_started

    @property
    def minibatch_seed(self) -> int:
        """Of how this update's episodes are dealt into minibatches."""
        return stream_seed(self.order.seed, f"{self.order.purpose} minibatches", self.update)

    @property
    def noise(self) -> Noise:
        """What this update's responses are drawn with."""
        length = self.run.config.data.max_summary_tokens
        order = self.order
        return Noise(seed=order.seed, purpose=order.purpose, step=self.update, length=length)

    def remaining(self, label: str) -> Iterator[int]:
        """The updates that are still to do, with progress shown; an update counts when it is over.

        Between two updates the state is saved if that is due, and a signal stops the loop. After
        the last update the state is saved. Raises Stopped after a signal.
        """
        self._last = time.monotonic(), 0.0
        todo = range(self.update, self.updates)
        with finishing_first():
            for update in self.run.progress(todo, label, self.updates, self.update):
                if self.dropout:
                    purpose = f"{label} dropout {self.accelerator.process_index}"
                    torch.manual_seed(stream_seed(self.order.seed, purpose, update))
                self._update_started = time.monotonic()
                yield update
                self.learner.update = update + 1
                number, due = self.agreed(stop_asked(), self.is_due())
                if due or number or self.update == self.updates:
                    self.save()
                if number:
                    raise Stopped(number)

    def agreed(self, *numbers: int) -> list[int]:
        """The largest of each number over all processes, so that all do the same."""
        if self.accelerator.num_processes == 1:
            return list(numbers)
        own = torch.tensor([numbers], device=self.accelerator.device)
        return self.accelerator.gather(own).max(dim=0).values.tolist()

    def is_due(self) -> bool:
        """Whether a save is due by the settings, and would not cost too much after the last one."""
        if not self.run.main:
            return False
        wanted = self.run.config.memory.save_minutes * 60
        ended, took = self._last
        return not wanted or time.monotonic() - ended >= max(wanted, LEAST_RATIO * took)

    def save(self) -> None:
        """Save. If that fails, say why on stderr; training goes on with the last good save kept."""
        began = time.monotonic()
        partial = self.run.resume / f"checkpoint-{self.update:07d}.tmp"
        for step in (self._begin, self._write, self._seal):
            fault = ""
            try:
                step(partial)
            except (OSError, RuntimeError, SafetensorError) as error:
                fault = str(error).strip().partition("\n")[0] or type(error).__name__
            (failed,) = self.agreed(bool(fault))
            if failed:
                self._give_up(partial, fault)
                break
        now = time.monotonic()
        self._last = now, now - began

    def _begin(self, partial: Path) -> None:
        if self.run.main:
            checkpoints.remove_leftovers(partial.parent)
            partial.mkdir(parents=True)

    def _write(self, partial: Path) -> None:
        if is_sharded(self.learner.trained):
            save_parts(self.learner.trained, self.learner.optimizer, partial)
        else:
            handle = self.accelerator.register_save_state_pre_hook(_without_wrapping)
            try:
                self.accelerator.save_state(str(partial))
            finally:
                handle.remove()
        if self.run.main:
            record = {
                "update": self.update,
                "updates": self.updates,
                "lengths": checkpoints.record_lengths(self.run.partial),
                "processes": self.accelerator.num_processes,
                "next_rows": self.next_rows(),
            }
            write_json(partial / "state.json", record)

    def _seal(self, partial: Path) -> None:
        if self.run.main:
            checkpoints.seal(partial)

    def _give_up(self, partial: Path, fault: str) -> None:
        if not self.run.main:
            return
        shutil.rmtree(partial, ignore_errors=True)
        kept = checkpoints.checkpoints(partial.parent)
        last = f"{kept[0].name} is kept" if kept else "there is none yet"
        why = fault or "another process could not write"
        print(f"saving {partial} failed: {why}; {last}", file=sys.stderr, flush=True)

    def next_rows(self) -> str:
        """A hash of the rows that the next update learns, and of how many updates there are."""
        rows = self.order.batch(self.update), self.updates
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def load(self) -> None:
        """Go on from the newest good checkpoint, or start over if there is none.

        The run's records are cut back to what they were then. Raises UserError if the next rows
        are not those that were next when it was saved.
        """
        folder, newest = self.run.resume, [""]
        self.accelerator.wait_for_everyone()
        room_of(self.accelerator).recall(halvings(self.run.folder))
        if self.run.main:
            newest = [str(checkpoints.newest_good(folder, self.run.partial) or "")]
        if self.accelerator.num_processes > 1:
            newest = broadcast_object_list(newest)
        if not newest[0]:
            self._cut_records(dict.fromkeys(checkpoints.RECORDS, 0))
            return
        checkpoint = Path(newest[0])
        recorded = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        self._read(checkpoint, recorded["processes"])
        self.learner.update = recorded["update"]
        if recorded.get("next_rows") != self.next_rows():
            raise UserError(
                f"{checkpoint} would go on with other rows than it was made for: remove "
                f"{checkpoint.parent} to start the stage over"
            )
        self._cut_records(recorded["lengths"])
        if self.run.main:
            print(f"{self.run.stage} goes on after update {self.update}", file=sys.stderr)

    def _read(self, checkpoint: Path, processes: int) -> None:
        """Weights and optimizer. Raises UserError if the checkpoint is of another engine."""
        sharded = (checkpoint / SHARDS).is_dir()
        now = self.accelerator.num_processes
        if sharded != is_sharded(self.learner.trained) or (sharded and processes != now):
            how = f"GPUS={processes} ENGINE=fsdp2" if sharded else "ENGINE=ddp or one process"
            raise UserError(
                f"{checkpoint} was saved with {how}: go on with it, or remove {checkpoint.parent} "
                "to start the stage over"
            )
        if sharded:
            load_parts(self.learner.trained, self.learner.optimizer, checkpoint)
            return
        handle = self.accelerator.register_load_state_pre_hook(self._unwrapped)
        try:
            self.accelerator.load_state(str(checkpoint))
        finally:
            handle.remove()

    def _cut_records(self, lengths: dict[str, int]) -> None:
        for name, size in lengths.items() if self.run.main else ():
            cut_file(self.run.partial / name, size)

    def _unwrapped(self, models: list[nn.Module], folder: str) -> None:
        models[:] = [self.accelerator.unwrap_model(model) for model in models]


def _without_wrapping(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
    """Name weights as one process names them, so that any number of processes can go on.

    Safetensors stores only one of tied weights; loading ties them again.
    """
    for index, state in enumerate(weights):
        first = {x.data_ptr(): name for name, x in reversed(state.items())}
        weights[index] = {
            name.removeprefix("module."): x.contiguous()
            for name, x in state.items()
            if first[x.data_ptr()] == name or not x.numel()
        }


def begin(run: Run, learner: Learner, settings: PolicyGradient, rows: int) -> State:
    """The loop of a policy-gradient stage, where it was left; queries come from a split of `rows`
    rows.
    """
    queries = settings.batch_size // settings.samples_per_query
    state = State(
        run=run,
        learner=learner,
        updates=settings.num_updates,
        order=Order(rows=rows, batch_size=queries, seed=run.config.seed, purpose=run.stage),
        dropout=settings.dropout,
    )
    state.load()
    return state
