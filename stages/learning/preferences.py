"""Held-out comparisons, which measure both the reward model and DPO's implicit one.

The gap of a comparison is the reward of the chosen summary minus that of the rejected one. A
comparison counts as right if its gap is above 0.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from eval.rates.formulas import wilson
from eval.rates.length_bias import beside_length
from stages.functional import preference_loss
from stages.learning.loop import over_rows
from stages.posts.bad_rows import in_half
from stages.posts.ragged import TokenizedSplit, load_split, rows_of
from stages.settings.config import UserError

T = TypeVar("T")
CALIBRATION_BIN = 0.5  # reward units, as in the figure of Huang et al. 2024


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


def alike(summaries: list[list[Tensor]], chosen: Tensor, rejected: Tensor) -> Tensor:
    """`rejected`, [rows], where a pair's summaries differ, and else `chosen`.

    Equal summaries stand in different columns, where rounding would tell them apart.
    """
    equal = [torch.equal(*pair) for pair in zip(*summaries, strict=True)]
    return torch.where(torch.tensor(equal, device=chosen.device), chosen, rejected)


def pair_length(split: TokenizedSplit, row: int) -> int:
    """Tokens of a comparison: the query once, and both summaries."""
    return sum(len(split.columns[name][row]) for name in ("queries", "chosen", "rejected"))


def over_pairs(
    accelerator: Accelerator,
    split: TokenizedSplit,
    sequences: int,
    label: str,
    measure: Callable[[list[int]], list[T]],
    keep: Path | None = None,
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


def summarize_gaps(gaps: list[float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss, mean gap and accuracy of held-out pairs, the latter with Wilson's interval at 95 %."""
    right = [gap > 0 for gap in gaps]
    low, high = wilson(sum(right), len(right))
    zeros = torch.zeros(len(gaps), dtype=torch.float64)
    return {
        "accuracy": sum(right) / len(right),
        "accuracy_low": low,
        "accuracy_high": high,
        "pairs": len(right),
        "loss": preference_loss(torch.tensor(gaps, dtype=torch.float64), zeros).item(),
        "margin": sum(gaps) / len(gaps),
        **{
            f"by_{key}": accuracy_by([row[key] for row in rows], right)
            for key in ("split", "batch", "strength", "policies")
        },
        "calibration": calibration(gaps),
    }


def length_bias(gaps: list[float], split: TokenizedSplit) -> dict[str, Any]:
    """What length alone gets on a split's pairs, beside the gaps: see `beside_length`.

    `by_strength`, `by_batch` and `by_policies`: accuracy of "the longer one" in each group of pairs
    by which the scorer's accuracy is grouped too.
    """
    chosen, rejected = (split.columns[one].lengths().tolist() for one in ("chosen", "rejected"))
    longer = [0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(chosen, rejected, strict=True)]
    grouped = {
        f"by_{key}": accuracy_by([row[key] for row in split.rows], longer)
        for key in ("strength", "batch", "policies")
    }
    beside = beside_length(gaps, chosen, rejected, [row["id"] for row in split.rows])
    return beside | grouped


def accuracy_by(groups: Sequence[Any], right: Sequence[float]) -> dict[str, dict[str, float]]:
    """Accuracy and number of pairs in each group, by name; rows without a value are left out."""
    found: dict[str, list[float]] = {}
    for group, one in zip(groups, right, strict=True):
        if group is not None:
            found.setdefault(str(group), []).append(one)
    return {
        name: {"accuracy": sum(ones) / len(ones), "pairs": len(ones)}
        for name, ones in sorted(found.items())
    }


def calibration(gaps: list[float]) -> list[list[float]]:
    """How often the higher score is on the preferred summary, by size of the gap.

    Rows [centre of the bin in reward units, share, pairs].
    Source: Huang et al. 2024, detail 18.
    """
    bins: dict[int, list[bool]] = {}
    for gap in gaps:
        bins.setdefault(int(abs(gap) / CALIBRATION_BIN), []).append(gap > 0)
    return [
        [(index + 0.5) * CALIBRATION_BIN, sum(ones) / len(ones), len(ones)]
        for index, ones in sorted(bins.items())
    ]
