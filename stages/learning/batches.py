"""Which rows a step learns and on which process, and sums over all processes.

Row order depends on (seed, purpose, step) only, never on a generator's past. So the number of
processes and the microbatch size do not change it, and a run can go on from its update number
alone. Batch means are taken over the global batch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from stages.posts.ragged import TokenizedSplit, pad_right
from stages.settings.checks import check_dealt, check_filled

T = TypeVar("T")


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


def local_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """This process's items of a global batch."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Consecutive pieces of at most `size` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def check_batch(name: str, batch_size: int, rows: int, accelerator: Accelerator) -> None:
    """Raise UserError if a global batch cannot be filled or divided among the processes."""
    check_filled(name, batch_size, rows)
    check_dealt(name, batch_size, accelerator.num_processes)


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


def gather_rows(accelerator: Accelerator, share: list[T]) -> list[T]:
    """The items of all processes, in the order from which `local_share` dealt them."""
    if accelerator.num_processes == 1:
        return share
    gathered = gather_object([share])
    rows = sum(len(part) for part in gathered)
    return [gathered[row % len(gathered)][row // len(gathered)] for row in range(rows)]


def batch_tensors(split: TokenizedSplit, rows: Sequence[int]) -> dict[str, Tensor]:
    """Some rows of a split: their numbers, and each column's tokens, -1 after the last."""
    columns = {
        name: pad_right([column[row] for row in rows], -1) for name, column in split.columns.items()
    }
    return {"rows": torch.tensor(rows), **columns}


def parts_by_length(
    accelerator: Accelerator, lengths: Sequence[int], size: int
) -> list[Sequence[int]]:
    """This process's rows in parts of at most `size` rows of similar length.

    So little of a forward pass is padding. Rows of equal length stay in their order.
    """
    share = local_share(range(len(lengths)), accelerator)
    return chunks(sorted(share, key=lambda row: lengths[row]), size)
