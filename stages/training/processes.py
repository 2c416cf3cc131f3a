"""Distributing rows over the processes of a launch, and combining their results."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

T = TypeVar("T")


def local_share(items: Sequence[T], accelerator: Accelerator) -> list[T]:
    """Return this process's items: items are dealt to the processes in turn, like cards."""
    return list(items[accelerator.process_index :: accelerator.num_processes])


def gather_rows(accelerator: Accelerator, share: list[T]) -> list[T]:
    """Return the items of all processes, in the order from which `local_share` dealt them."""
    if accelerator.num_processes == 1:
        return share
    shares = gather_object([share])
    items = []
    for row in range(sum(len(share) for share in shares)):
        process = row % len(shares)
        items.append(shares[process][row // len(shares)])
    return items


def global_sum(accelerator: Accelerator, *values: float | Tensor) -> list[float]:
    """Return each value summed over all processes."""
    # Stack the values on the device that they are on, so that a GPU is waited for only once.
    device = next((value.device for value in values if isinstance(value, Tensor)), None)
    stacked = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    )
    if accelerator.num_processes == 1:
        return stacked.tolist()
    return accelerator.reduce(stacked.float().to(accelerator.device), "sum").tolist()


def global_max(accelerator: Accelerator, *values: int) -> list[int]:
    """Return the largest of each value over all processes, so that all of them decide alike."""
    if accelerator.num_processes == 1:
        return list(values)
    local = torch.tensor([values], device=accelerator.device)
    return accelerator.gather(local).max(dim=0).values.tolist()
