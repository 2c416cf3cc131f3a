"""Randomness as a pure function of (seed, purpose, step).

No generator is carried from one update to the next. So a run can resume from just its update
number, and neither the microbatch size nor the number of processes changes what is drawn.
"""

import hashlib
from collections.abc import Sequence

import torch


def stream_seed(seed: int, purpose: str, step: int = 0) -> int:
    """Return the seed for one use of randomness, in [0, 2^63)."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """Return a CPU generator for one use of randomness."""
    return torch.Generator().manual_seed(stream_seed(seed, purpose, step))


def epoch_order(
    rows: int, epoch: int, seed: int, purpose: str, groups: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Return all row indices in the order of one epoch.

    `groups` partition the rows. If there are any, the groups are shuffled instead of the rows, and
    the rows of a group stay neighbors.
    """
    generator = stream(seed, f"{purpose} order", epoch)
    if not groups:
        return torch.randperm(rows, generator=generator).tolist()

    order: list[int] = []
    for group in torch.randperm(len(groups), generator=generator).tolist():
        order.extend(groups[group])
    return order


def batch_rows(
    rows: int,
    batch_size: int,
    update: int,
    seed: int,
    purpose: str,
    groups: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Return the row indices of the global batch of an update, counted from 0.

    The data are epochs laid end to end, each in its own order (`epoch_order`). So a batch may
    contain the end of one epoch and the start of the next.
    """
    orders: dict[int, list[int]] = {}
    batch = []
    for position in range(update * batch_size, (update + 1) * batch_size):
        epoch, place = divmod(position, rows)
        if epoch not in orders:
            orders[epoch] = epoch_order(rows, epoch, seed, purpose, groups)
        batch.append(orders[epoch][place])
    return batch
