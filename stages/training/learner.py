"""Which rows a step learns and on which process, passes that fit into memory, optimizer steps.

Row order depends on (seed, purpose, step) only, never on a generator's past. So the number of
processes and the microbatch size do not change it, and a run can go on from its update number
alone. Batch means are taken over the global batch.

Every pass goes through `fitting`. Where memory is refused, what torch keeps is given back, and the
pass runs once more. Then its size is halved, and other passes of that setting begin with the half.
No result depends on the size, up to rounding: a loss is weighted by tokens or pairs over the whole
batch, and sampling noise belongs to the episode. An optimizer step is never repeated, because it
may have been half done: its moments are made before it.

One process goes on at once. Several that wait for each other in a pass cannot. So the launch ends,
and starts again from its last checkpoint with the smaller size.
"""

import gc
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from stages.models.policy import weights_cast_once
from stages.settings.checks import LESS_MEMORY, UserError, card_memory, is_out_of_memory, say_error
from stages.training.sharding import is_sharded, whole

T = TypeVar("T")
R = TypeVar("R")
FORWARD, MICROBATCH = "memory.forward_batch_size", "memory.microbatch_size"
SLOW = 5
"""A step is slow if it takes so many times the stage's median."""


def stream_seed(seed: int, purpose: str, step: int = 0) -> int:
    """A seed of its own for each use of randomness."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A CPU generator for one use of randomness."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, step))


def batch_rows(
    rows: int,
    batch_size: int,
    update: int,
    seed: int,
    purpose: str,
    together: Sequence[Sequence[int]] = (),
) -> list[int]:
    """The row indices of one global batch: epochs of permutations, laid end to end.

    `together`: groups of all rows; then the groups are permuted, and rows of one are neighbours.
    """
    wanted = range(update * batch_size, (update + 1) * batch_size)
    orders: dict[int, list[int]] = {}
    for epoch in {position // rows for position in wanted}:
        generator = stream(seed, f"{purpose} order", epoch)
        order = torch.randperm(len(together) or rows, generator=generator).tolist()
        orders[epoch] = [row for group in order for row in together[group]] if together else order
    return [orders[position // rows][position % rows] for position in wanted]


def local_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """This process's items of a global batch."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Consecutive pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


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


@dataclass(frozen=True, kw_only=True)
class Size:
    """How many rows a pass holds where memory was never short."""

    rows: int
    least: int = 1
    setting: str = FORWARD
    fixed_by: str = ""
    """The setting by which the result depends on the size, which then is never halved."""
    together: bool = False
    """Whether processes wait for each other in a pass, so that none can repeat it alone."""


@dataclass(kw_only=True)
class Room:
    """How much less than the settings say fits into the memory of one process, in one stage."""

    processes: int = 1
    settings: dict[str, int] = field(default_factory=dict)
    """Sequences of a pass, by the setting that says so."""
    halvings: Counter[str] = field(default_factory=Counter)
    """How often each was halved. Of several processes each halves alone what it runs alone, which
    must not change the passes in which they wait for each other."""
    note: Callable[[dict[str, Any]], None] = lambda halving: None
    """Gets each halving: `setting`, and its value `from` and `to`."""
    refused: bool = False
    """Whether a line has said that a pass runs once more."""
    keeps_copies: bool = True
    """Whether the copies of weights in bf16 outlast a pass; not where memory is short."""

    def rows(self, size: Size) -> int:
        """How many rows a pass of this size holds now; no more than its setting says."""
        most = min(size.rows, self.settings.get(size.setting, size.rows))
        return max(size.least, most // 2 ** self.halvings[self._key(size)])

    def recall(self, halvings: Iterable[dict[str, Any]]) -> None:
        """Begin where an earlier attempt at the stage ended; `halvings` as `note` got them."""
        for halving in halvings:
            setting = halving["setting"]
            while self.settings[setting] // 2 ** self.halvings[setting] > halving["to"]:
                self.halvings[setting] += 1

    def halve(self, size: Size, held: str) -> None:
        """Halve it for the rest of the stage, and say so. Raises UserError where that cannot be."""
        rows, key = self.rows(size), self._key(size)
        value = self.settings.get(size.setting, size.rows) // 2 ** self.halvings[key]
        if rows <= size.least:
            fewest = f"out of memory in a pass of {rows}, the fewest ({size.setting}{held})"
            raise UserError(f"{fewest}: {LESS_MEMORY}")
        if size.fixed_by:
            raise UserError(
                f"out of memory in passes of {rows}: set {size.setting}={value // 2} (it is not "
                f"halved, because with {size.fixed_by} the result depends on it{held})"
            )
        half = max(1, value // 2)
        self.note({"setting": size.setting, "from": value, "to": half})
        self.halvings[key] += 1
        line = f"out of memory: {size.setting}={half}, not {value}, from here on{held}"
        if size.together:
            raise UserError(f"{line}; all processes start again from the last checkpoint")
        say_error(line)

    def _key(self, size: Size) -> str:
        alone = self.processes > 1 and not size.together
        return f"{size.setting} alone" if alone else size.setting


def room_of(accelerator: Accelerator) -> Room:
    """The room of this process. It lasts as long as its accelerator, which is one stage."""
    new = Room(processes=accelerator.num_processes)
    room: Room = accelerator.__dict__.setdefault("room", new)
    return room


def fitting(accelerator: Accelerator, size: Size, run: Callable[[int], R]) -> R:
    """What `run` returns when it is called with as many rows a pass as fit into memory.

    It must begin anew at each call. Raises UserError if the fewest rows do not fit, if the result
    depends on their number, or if all processes must start again.
    """
    room, again = room_of(accelerator), size.together
    while True:
        try:
            return run(room.rows(size))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            held = f"; {card}" if (card := card_memory()) else ""
            # outside this block the failed pass is no longer held by its error
        gc.collect()
        torch.cuda.empty_cache()
        room.keeps_copies = False
        if again:
            room.halve(size, held)
        elif not room.refused:
            room.refused = True
            say_error(f"out of memory ({size.setting}{held}): trying once more")
        again = True


def casting_once(accelerator: Accelerator, network: nn.Module) -> AbstractContextManager[None]:
    """`weights_cast_once` where memory is not short. What is sharded is whole for a moment only."""
    keeps = room_of(accelerator).keeps_copies and not is_sharded(network)
    return weights_cast_once(network) if keeps else nullcontext()


def in_pieces(
    accelerator: Accelerator,
    size: Size,
    rows: Sequence[T],
    measure: Callable[[list[T]], Sequence[R]],
) -> list[R]:
    """What `measure` says of each row, of as many rows at once as fit into memory."""

    def run(most: int) -> list[R]:
        return [measured for piece in chunks(rows, most) for measured in measure(list(piece))]

    return fitting(accelerator, size, run)


@dataclass(kw_only=True)
class StepTimes:
    """How long a stage's steps take; it says once that one is slow because memory is short."""

    seconds: list[float] = field(default_factory=list)
    reported: bool = False

    def add(self, seconds: float, retries: int) -> None:
        """Count a step; `retries`: how often in it torch gave memory back and asked again."""
        usual = median(self.seconds) if self.seconds else math.inf
        if retries and not self.reported and seconds > SLOW * usual:
            self.reported = True
            say_error(
                f"a step took {seconds:.1f} s (median {usual:.1f}) and waited for the card's "
                f"memory ({card_memory()}): leave more of it free, or lower {MICROBATCH}"
            )
        self.seconds.append(seconds)


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
    """Sequences per forward and backward pass on one device, where memory was never short."""
    fixed_by: str = ""
    """As in `Size`."""
    update: int = 0
    """The next update, counted from 0."""
    times: StepTimes = field(default_factory=StepTimes)

    def size(self, least: int = 1) -> Size:
        """Of the passes that learn."""
        return Size(
            rows=self.microbatch_size,
            least=least,
            setting=MICROBATCH,
            fixed_by=self.fixed_by,
            together=self.accelerator.num_processes > 1,
        )


class NonFiniteError(UserError):
    """A loss or gradient is not a finite number; raised before it can spoil the weights."""


def refuse_non_finite(stage: str, update: int, stats: dict[str, float]) -> None:
    """Raise NonFiniteError if a statistic of a step in `update`, counted from 0, is not finite."""
    bad = [key for key, value in stats.items() if not math.isfinite(value)]
    if bad:
        raise NonFiniteError(
            f"{stage} stopped before a step of update {update + 1}: {', '.join(bad)} not finite: "
            f"try a smaller {stage}.learning_rate"
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
    accelerator, optimizer = learner.accelerator, learner.optimizer
    began, retried = time.monotonic(), _retries()

    def gradients(size: int) -> tuple[dict[str, float], dict[str, float]]:
        optimizer.zero_grad()
        sums: dict[str, Tensor | float] = {}
        with casting_once(accelerator, learner.trained):
            for part in synchronized_last(accelerator, learner.trained, parts(size)):
                for loss, stats in losses(part):
                    # Devices average their gradients; the global mean needs their sum.
                    accelerator.backward(loss * accelerator.num_processes)
                    detached = {key: x.detach().double() for key, x in stats.items()}
                    sums |= {key: sums.get(key, 0.0) + x for key, x in detached.items()}
        totals = dict(zip(sums, global_sum(accelerator, *sums.values()), strict=True))
        own = [x.grad for x in learner.trained.parameters() if x.grad is not None]
        norm = {} if clip else {"gradient": whole(get_total_norm(own)).item()}
        totals |= clip() if clip else {}
        make_moments(optimizer)
        return totals, norm

    stats, norm = fitting(accelerator, learner.size(least), gradients)
    refuse_non_finite(learner.stage, learner.update, stats | norm)
    optimizer.step()
    optimizer.zero_grad()
    learner.times.add(time.monotonic() - began, _retries() - retried)
    return stats


def _retries() -> int:
    """How often torch, refused memory of the card, gave back what it kept and asked again."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def make_moments(optimizer: Any) -> None:
    """Give each weight that has a gradient, and no moments yet, those of AdamW's first step: zeros.

    AdamW makes them in that step, so one that is refused memory would be half done.
    """
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        if weight.grad is not None and weight not in optimizer.state:
            zeros = partial(torch.zeros_like, weight, memory_format=torch.preserve_format)
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            first_state = {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}
            optimizer.state[weight] = first_state  # all, or none
