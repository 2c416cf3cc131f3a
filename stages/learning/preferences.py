"""Comparisons: an optimizer step on them, and held-out ones, which measure both the reward model
and DPO's implicit one.

The gap of a comparison is the reward of the chosen summary minus that of the rejected one. A
comparison counts as right if its gap is above 0.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.functional import preference_loss
from stages.learning.batches import chunks, local_share
from stages.learning.learner import Learner, optimizer_step
from stages.learning.loop import over_rows
from stages.posts.bad_rows import in_half
from stages.posts.ragged import TokenizedSplit, load_split, rows_of
from stages.settings.checks import UserError

T = TypeVar("T")


def training_pairs(data: Path, pairs: str) -> TokenizedSplit:
    """The training comparisons of a base stage's data that `rm.pairs` names, in their order."""
    split = load_split(data, "comparisons_train")
    kept = [row for row, about in enumerate(split.rows) if in_half(about["id"], pairs)]
    if len(kept) == len(split):
        return split
    if not kept:
        raise UserError(f"rm.pairs={pairs}: no training comparison is of that half: take all")
    return rows_of(split, kept)


def pair_tokens(
    split: TokenizedSplit, rows: Sequence[int]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The queries of some comparisons, and their summaries: first all chosen, then all rejected."""
    columns = split.columns
    summaries = [[columns[name][row] for row in rows] for name in ("chosen", "rejected")]
    return [columns["queries"][row] for row in rows], summaries


def equal_for_equal_texts(
    summaries: list[list[Tensor]], chosen: Tensor, rejected: Tensor
) -> Tensor:
    """`rejected`, [rows], with `chosen`'s number where both summaries are the same text.

    So their gap is exactly 0. The two stand in different columns, and rounding would give a gap
    otherwise.
    """
    equal = [torch.equal(*pair) for pair in zip(*summaries, strict=True)]
    return torch.where(torch.tensor(equal, device=chosen.device), chosen, rejected)


def pair_step(
    learner: Learner,
    split: TokenizedSplit,
    rows: Sequence[int],
    losses: Callable[[Sequence[int]], Iterable[tuple[Tensor, dict[str, Tensor]]]],
) -> dict[str, float]:
    """One optimizer step on a global batch of pairs; returns each statistic's mean over them.

    `losses` as in `optimizer_step`, of the rows of one microbatch. A pair counts as two sequences.
    """
    share = local_share(rows, learner.accelerator)
    share.sort(key=lambda row: pair_length(split, row))
    stats = optimizer_step(learner, lambda size: chunks(share, max(1, size // 2)), losses, least=2)
    return {key: total / len(rows) for key, total in stats.items()}


def pair_length(split: TokenizedSplit, row: int) -> int:
    """Tokens of a comparison: the query once, and both summaries."""
    return sum(len(split.columns[name][row]) for name in ("queries", "chosen", "rejected"))


def over_pairs(
    accelerator: Accelerator,
    split: TokenizedSplit,
    sequences: int,
    label: str,
    measure: Callable[[list[int]], list[T]],
    keep: Path | None,
) -> list[T]:
    """What `measure` says of every pair of a split, in its order, from all processes.

    `measure` gets the rows of one forward pass: at most `sequences` summaries, two a pair. `keep`
    as in `over_share`.
    """

    def autocast(rows: list[int]) -> list[T]:
        with accelerator.autocast():
            return measure(rows)

    lengths = [pair_length(split, row) for row in range(len(split))]
    return over_rows(accelerator, lengths, max(1, sequences // 2), label, autocast, keep)


def gap_rows(gaps: Sequence[float], split: TokenizedSplit) -> list[dict[str, Any]]:
    """One row a pair, from which intervals, groups and the effect of length are computed later."""
    lengths = (split.columns[name].lengths().tolist() for name in ("chosen", "rejected"))
    return [
        {"gap": gap, "chosen_tokens": chosen, "rejected_tokens": rejected, **about}
        for gap, chosen, rejected, about in zip(gaps, *lengths, split.rows, strict=True)
    ]


def summarize_gaps(gaps: Sequence[float]) -> dict[str, float]:
    """Accuracy, number and loss of held-out pairs."""
    zeros = torch.zeros(len(gaps), dtype=torch.float64)
    return {
        "accuracy": sum(gap > 0 for gap in gaps) / len(gaps),
        "pairs": len(gaps),
        "loss": preference_loss(torch.tensor(gaps, dtype=torch.float64), zeros).item(),
    }
