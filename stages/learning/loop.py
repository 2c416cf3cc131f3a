"""What the training loops share: accelerator, seeds, optimizer, schedules, batches, sampling.

Row order and sampling noise depend on (seed, purpose, step) only, never on a generator's past. So
the number of processes and the microbatch size do not change them, and a run can go on from its
update number alone. Batch means are taken over the global batch.
"""

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stages.functional import truncate_after
from stages.learning.models import sample
from stages.learning.sharding import new_accelerator
from stages.posts.ragged import Ragged, TokenizedSplit, pad_left, pad_right
from stages.running.files import KeptRows
from stages.running.machine import has_bf16_units, keep_freed_memory
from stages.running.progress import progress
from stages.running.signals import finishing_first, stop_if_asked
from stages.settings.config import Config, Memory, Optimizer, UserError

T = TypeVar("T")


def make_accelerator(config: Config, takes_turns: bool = False) -> Accelerator:
    """The accelerator, with seeds and threads set. Raises UserError as `new_accelerator` does.

    `takes_turns`: the trained module's networks run one after the other, so that a pass uses only
    some of its weights.
    """
    if config.memory.cpu_threads:
        torch.set_num_threads(config.memory.cpu_threads)
    seed = stream_seed(config.seed, "global")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    keep_freed_memory()
    accelerator = new_accelerator(config.memory.mixed_precision, takes_turns)
    if accelerator.mixed_precision == "bf16" and accelerator.is_main_process:
        _say_where_bf16_is_slow(accelerator.device)
    return accelerator


def _say_where_bf16_is_slow(device: torch.device) -> None:
    if device.type == "cpu" and not has_bf16_units():
        print(
            "note: this CPU has no bf16 units: memory.mixed_precision=bf16 works here, slowly",
            file=sys.stderr,
        )


def stream_seed(seed: int, purpose: str, step: int = 0) -> int:
    """A seed of its own for each use of randomness."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A CPU generator for one use of randomness."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, step))


def make_optimizer(parameters: Any, learning_rate: float, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW as in Huang et al. 2024, section B.0 (eps 1e-5, torch's betas and weight decay).

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


def cosine_rate(update: int, updates: int, warmup_fraction: float) -> float:
    """Share of the learning rate at an update counted from 0: linear warm-up, cosine to 0."""
    warmup = round(warmup_fraction * updates)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


def linear_rate(update: int, updates: int) -> float:
    """Share of the learning rate at an update counted from 0; the last one has 1 / updates."""
    return 1 - update / updates


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set it in every parameter group, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def batch_rows(rows: int, batch_size: int, update: int, seed: int, purpose: str) -> list[int]:
    """The row indices of one global batch: epochs of permutations, laid end to end."""
    wanted = range(update * batch_size, (update + 1) * batch_size)
    orders: dict[int, list[int]] = {}
    for epoch in {position // rows for position in wanted}:
        generator = stream(seed, f"{purpose} order", epoch)
        orders[epoch] = torch.randperm(rows, generator=generator).tolist()
    return [orders[position // rows][position % rows] for position in wanted]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which a stage goes through its data, update after update."""

    rows: int
    """Rows of the split."""
    batch_size: int
    """Rows per update, over all processes."""
    seed: int
    purpose: str

    def batch(self, update: int) -> list[int]:
        """The row indices of an update's global batch; updates are counted from 0."""
        return batch_rows(self.rows, self.batch_size, update, self.seed, self.purpose)


def local_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """This process's items of a global batch."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Consecutive pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def check_batch(name: str, batch_size: int, rows: int, accelerator: Accelerator) -> None:
    """Raise UserError if a global batch cannot be filled or divided among the processes."""
    if batch_size > rows:
        raise UserError(f"{name}.batch_size is {batch_size} but there are only {rows} rows")
    if batch_size % accelerator.num_processes:
        raise UserError(f"{name}.batch_size must divide by {accelerator.num_processes} processes")


def synchronized_last(
    accelerator: Accelerator, model: nn.Module, microbatches: Sequence[T]
) -> Iterator[T]:
    """The microbatches of one step; gradients travel between devices with the last one only."""
    for microbatch in microbatches[:-1]:
        with accelerator.no_sync(model):
            yield microbatch
    yield microbatches[-1]


def global_sum(accelerator: Accelerator, *values: float | Tensor) -> list[float]:
    """Each value summed over all processes."""
    # Stacked where they are, so that a GPU is waited for once.
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    wide = [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    stacked = torch.stack(wide)
    if accelerator.num_processes == 1:
        return stacked.tolist()
    return accelerator.reduce(stacked.float().to(accelerator.device), "sum").tolist()


def gather_rows(accelerator: Accelerator, mine: list[T]) -> list[T]:
    """The items of all processes, in the order from which `local_share` dealt them."""
    if accelerator.num_processes == 1:
        return mine
    gathered = gather_object([mine])
    rows = sum(len(share) for share in gathered)
    return [gathered[row % len(gathered)][row // len(gathered)] for row in range(rows)]


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


def batch_tensors(split: TokenizedSplit, rows: Sequence[int]) -> dict[str, Tensor]:
    """Some rows of a split: their numbers, and each column's tokens, -1 after the last."""
    columns = {
        name: pad_right([column[row] for row in rows], -1) for name, column in split.columns.items()
    }
    return {"rows": torch.tensor(rows), **columns}


def use_gradient_checkpointing(model: Any, memory: Memory) -> None:
    """Trade time for memory if the settings say so."""
    if memory.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def sampling_noise(seed: int, purpose: str, step: int, rows: int, length: int) -> Tensor:
    """Uniform numbers [rows, length] in float64, one for each token of a global batch."""
    return torch.rand(rows, length, generator=stream(seed, purpose, step), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn: which noise, how long, how hot, how many at once."""

    seed: int
    purpose: str
    """Names the noise, together with the step."""
    step: int = 0
    length: int
    """Most tokens of a response."""
    temperature: float
    forward_batch_size: int
    """Sequences per forward pass: a memory knob."""


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
    keep: Path | None = None,
) -> list[T]:
    """What `measure` says of each row of this process's share, in the order of `local_share`.

    `measure` gets the rows of one forward pass, at most `size` of similar `lengths`, and returns
    numbers, lists and strings. If there is a folder to `keep` them in, finished parts outlast the
    process: after a restart a part is measured only if one of its rows is unknown. A signal stops
    the measurement after a part: then it raises Stopped.
    """
    known: dict[int, T] = {}
    kept = None
    if keep is not None:
        accelerator.wait_for_everyone()  # the main process may still be making the run's folder
        kept = KeptRows(keep, label, accelerator.process_index)
        known = kept.known
    todo = [
        list(part)
        for part in parts_by_length(accelerator, lengths, size)
        if any(row not in known for row in part)
    ]
    with finishing_first():
        for part in progress(todo, label, len(todo)):
            measured = measure(part)
            known |= dict(zip(part, measured, strict=True))
            if kept is not None:
                kept.add(part, measured)
                stop_if_asked()
    return [known[row] for row in local_share(range(len(lengths)), accelerator)]


def over_rows(
    accelerator: Accelerator,
    lengths: Sequence[int],
    size: int,
    label: str,
    measure: Callable[[list[int]], Sequence[T]],
    keep: Path | None = None,
) -> list[T]:
    """The same for all rows in their order, from all processes."""
    return gather_rows(accelerator, over_share(accelerator, lengths, size, label, measure, keep))


@torch.no_grad()
def respond(
    accelerator: Accelerator,
    policy: nn.Module,
    queries: Ragged,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    keep: Path | None = None,
) -> list[list[int]]:
    """This process's responses to its share of the queries, each cut after its EOS.

    Row order as `local_share`; `keep` as in `over_share`.
    """
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    purpose, length = sampling.purpose, sampling.length
    noise = sampling_noise(sampling.seed, purpose, sampling.step, len(queries), length)

    def answer(rows: list[int]) -> list[list[int]]:
        batch = pad_left([queries[row] for row in rows], pad_id).to(accelerator.device)
        with accelerator.autocast():
            uniforms = noise[rows].to(accelerator.device)
            drawn, _ = sample(policy, batch, uniforms, sampling.temperature, eos_id, pad_id)
        cut = truncate_after(drawn, eos_id, pad_id).tolist()
        return [[token for token in response if token != pad_id] for response in cut]

    lengths = queries.lengths().tolist()
    size = sampling.forward_batch_size
    return over_share(accelerator, lengths, size, purpose, answer, keep)
