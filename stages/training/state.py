"""The state of a training loop between two updates, and how it is saved, stopped and resumed.

Randomness depends only on seed, purpose and update, so no generator is saved. A killed loop resumes
and reaches exactly the same weights.
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

from stages.config.errors import UserError
from stages.config.ppo import PolicyGradient
from stages.models.sampling import Noise
from stages.runs.files import cut_file, write_json
from stages.runs.run import Run
from stages.runs.signals import Stopped, finishing_first, stop_asked
from stages.training import checkpoints
from stages.training.processes import global_max
from stages.training.random_streams import batch_rows, stream_seed
from stages.training.sharding import SHARDS, is_sharded, load_parts, save_parts
from stages.training.step import Learner

MIN_TRAIN_TO_SAVE_RATIO = 20
"""Seconds of training for each second of saving: saving takes at most 5% of the time."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which a stage goes through its data, update after update."""

    rows: int
    """Rows of the split."""
    batch_size: int
    """Rows per update, over all processes."""
    seed: int
    purpose: str
    groups: Sequence[Sequence[int]] = ()
    """Groups of rows that stay neighbors, as in `batch_rows`."""

    def batch(self, update: int) -> list[int]:
        """Return the row indices of an update's global batch; updates are counted from 0."""
        return batch_rows(
            rows=self.rows,
            batch_size=self.batch_size,
            update=update,
            seed=self.seed,
            purpose=self.purpose,
            groups=self.groups,
        )


@dataclass(kw_only=True)
class State:
    """A training loop between two updates.

    The learner, with its networks and the number of the next update, changes from update to update.
    The rest does not: the run, the number of updates, the order of the data.
    """

    run: Run
    learner: Learner
    updates: int
    """Updates of the whole stage."""
    order: Order
    dropout: float = 0.0
    """Probability. If it is above 0, torch's global generator is seeded before each update."""
    update_started: float = 0.0
    """When this update started; times are those of `time.monotonic`."""
    last_save_ended: float = 0.0
    last_save_seconds: float = 0.0

    @property
    def update(self) -> int:
        """The next update, counted from 0."""
        return self.learner.update

    @property
    def accelerator(self) -> Accelerator:
        """The learner's accelerator."""
        return self.learner.accelerator

    @property
    def seconds(self) -> float:
        """The seconds since this update started."""
        return time.monotonic() - self.update_started

    @property
    def minibatch_seed(self) -> int:
        """The seed by which this update's episodes are shuffled into minibatches."""
        return stream_seed(self.order.seed, f"{self.order.purpose} minibatches", self.update)

    @property
    def noise(self) -> Noise:
        """The random numbers used to sample this update's responses."""
        return Noise(
            seed=self.order.seed,
            purpose=self.order.purpose,
            step=self.update,
            length=self.run.config.data.max_summary_tokens,
        )

    # -- the loop ----------------------------------------------------------------------------------

    def remaining(self, label: str) -> Iterator[int]:
        """Yield the remaining updates, and show progress.

        Between two updates the state is saved if it is time to do so, and a signal stops the loop
        by raising Stopped. After the last update the state is saved.
        """
        self.last_save_ended = time.monotonic()
        self.last_save_seconds = 0.0
        todo = range(self.update, self.updates)
        with finishing_first():
            for update in self.run.progress(todo, label, self.updates, self.update):
                if self.dropout:
                    purpose = f"{label} dropout {self.accelerator.process_index}"
                    torch.manual_seed(stream_seed(self.order.seed, purpose, update))

                self.update_started = time.monotonic()
                yield update
                # The caller has finished the update.
                self.learner.update = update + 1

                signal_number, is_due = global_max(
                    self.accelerator, stop_asked(), int(self.is_save_due())
                )
                if is_due or signal_number or self.update == self.updates:
                    self.save()
                if signal_number:
                    raise Stopped(signal_number)

    def is_save_due(self) -> bool:
        """Return whether it is time to save, given the settings and how long the last save took."""
        if not self.run.is_main:
            return False
        interval = self.run.config.memory.save_minutes * 60
        if interval == 0:
            return True
        interval = max(interval, MIN_TRAIN_TO_SAVE_RATIO * self.last_save_seconds)
        return time.monotonic() - self.last_save_ended >= interval

    # -- saving ------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save a checkpoint.

        If that fails, say why on stderr: training continues, and the last good checkpoint is kept.
        """
        started = time.monotonic()
        partial = self.run.resume / f"checkpoint-{self.update:07d}.tmp"
        for write in (self._create_folder, self._write, self._complete):
            fault = ""
            try:
                write(partial)
            except (OSError, RuntimeError, SafetensorError) as error:
                fault = str(error).strip().partition("\n")[0] or type(error).__name__
            # If one process fails, all of them stop here. Otherwise they would wait for each other.
            (has_failed,) = global_max(self.accelerator, int(bool(fault)))
            if has_failed:
                self._give_up(partial, fault)
                break
        self.last_save_ended = time.monotonic()
        self.last_save_seconds = self.last_save_ended - started

    def _create_folder(self, partial: Path) -> None:
        if self.run.is_main:
            checkpoints.remove_leftovers(partial.parent)
            partial.mkdir(parents=True)

    def _write(self, partial: Path) -> None:
        if is_sharded(self.learner.trained):
            save_parts(self.learner.trained, self.learner.optimizer, partial)
        else:
            hook = self.accelerator.register_save_state_pre_hook(_unwrap_weights)
            try:
                self.accelerator.save_state(str(partial))
            finally:
                hook.remove()
        if self.run.is_main:
            record = {
                "update": self.update,
                "updates": self.updates,
                "lengths": checkpoints.record_lengths(self.run.partial),
                "processes": self.accelerator.num_processes,
                "next_rows": self.next_rows_hash(),
            }
            write_json(partial / "state.json", record)

    def _complete(self, partial: Path) -> None:
        if self.run.is_main:
            checkpoints.complete(partial)

    def _give_up(self, partial: Path, fault: str) -> None:
        if not self.run.is_main:
            return
        shutil.rmtree(partial, ignore_errors=True)
        reason = fault or "another process could not write"
        existing = checkpoints.list_checkpoints(partial.parent)
        last = f"{existing[0].name} is kept" if existing else "there is no earlier checkpoint"
        print(f"saving {partial} failed: {reason}; {last}", file=sys.stderr, flush=True)

    def next_rows_hash(self) -> str:
        """Return a hash of the rows of the next update, and of the number of updates."""
        next_rows = (self.order.batch(self.update), self.updates)
        return hashlib.sha256(json.dumps(next_rows).encode()).hexdigest()

    # -- resuming ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Resume from the newest good checkpoint, or start over if there is none.

        The run's records are cut back to their lengths at that checkpoint. Raises UserError if the
        next rows are not those that were next when it was saved.
        """
        self.accelerator.wait_for_everyone()
        newest = [""]
        if self.run.is_main:
            newest = [str(checkpoints.newest_good(self.run.resume, self.run.partial) or "")]
        if self.accelerator.num_processes > 1:
            newest = broadcast_object_list(newest)
        if not newest[0]:
            self._cut_records(dict.fromkeys(checkpoints.RECORDS, 0))
            return

        checkpoint = Path(newest[0])
        record = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        self._read(checkpoint, record["processes"])
        self.learner.update = record["update"]
        if record.get("next_rows") != self.next_rows_hash():
            raise UserError(
                f"{checkpoint} belongs to other data, because its next rows would be different now:"
                f" remove {checkpoint.parent} to start the stage over"
            )
        self._cut_records(record["lengths"])
        if self.run.is_main:
            print(f"{self.run.stage} resumes after update {self.update}", file=sys.stderr)

    def _read(self, checkpoint: Path, processes: int) -> None:
        """Read weights and optimizer.

        Raises UserError for a checkpoint of another engine, or with weights of other names.
        """
        is_of_shards = (checkpoint / SHARDS).is_dir()
        has_same_engine = is_of_shards == is_sharded(self.learner.trained)
        has_same_processes = processes == self.accelerator.num_processes
        if not has_same_engine or (is_of_shards and not has_same_processes):
            saved_with = "ENGINE=ddp or one process"
            if is_of_shards:
                saved_with = f"GPUS={processes} ENGINE=fsdp2"
            raise UserError(
                f"{checkpoint} was saved with {saved_with}: resume in the same way, or remove"
                f" {checkpoint.parent} to start the stage over"
            )
        if is_of_shards:
            load_parts(self.learner.trained, self.learner.optimizer, checkpoint)
            return
        hook = self.accelerator.register_load_state_pre_hook(self._unwrap_models)
        try:
            self.accelerator.load_state(str(checkpoint))
        except RuntimeError as error:
            # torch says so if names or shapes differ, as they may between versions.
            if "loading state_dict" not in str(error):
                raise
            raise UserError(
                f"{checkpoint} has other weights than this stage trains, perhaps because another"
                f" version of the code saved it: remove {checkpoint.parent} to start the stage over"
            ) from error
        finally:
            hook.remove()

    def _unwrap_models(self, models: list[nn.Module], folder: str) -> None:
        """Let accelerate load into the unwrapped models, whose weights have plain names."""
        models[:] = [self.accelerator.unwrap_model(model) for model in models]

    def _cut_records(self, lengths: dict[str, int]) -> None:
        if self.run.is_main:
            for name, size in lengths.items():
                cut_file(self.run.partial / name, size)


def _unwrap_weights(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
    """Name the weights as in a single process, so that any number of processes can resume.

    Safetensors refuses tied weights, which share memory: only the first of them is saved, and
    loading ties them again.
    """
    for index, state in enumerate(weights):
        saved_addresses: set[int] = set()
        unwrapped = {}
        for name, weight in state.items():
            address = weight.data_ptr()
            is_empty = weight.numel() == 0  # all empty tensors have address 0
            if is_empty or address not in saved_addresses:
                unwrapped[name.removeprefix("module.")] = weight.contiguous()
            saved_addresses.add(address)
        weights[index] = unwrapped


def begin(run: Run, learner: Learner, settings: PolicyGradient, rows: int) -> State:
    """Return the loop of a policy-gradient stage, at the update where an earlier attempt left it.

    Queries come from a split of `rows` rows.
    """
    state = State(
        run=run,
        learner=learner,
        updates=settings.num_updates,
        order=Order(
            rows=rows,
            batch_size=settings.batch_size // settings.samples_per_query,
            seed=run.config.seed,
            purpose=run.stage,
        ),
        dropout=settings.dropout,
    )
    state.load()
    return state
