"""Comparisons: an optimizer step on them, and held-out ones, which measure both the reward model
and DPO's implicit one.

The gap of a comparison is the reward of the chosen summary minus that of the rejected one. A
comparison counts as right if its gap is above 0.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.data.halves import in_half
from stages.data.ragged import TokenizedSplit, load_split, rows_of
from stages.functional import preference_loss
from stages.settings.checks import UserError
from stages.training.learner import Learner, chunks, local_share, optimizer_step
from stages.training.loop import over_rows

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


def posts_of(split: TokenizedSplit, rows: Iterable[int] | None = None) -> list[list[int]]:
    """Some rows of a split, or all, by post; posts in the order in which they first occur."""
    posts: dict[bytes, list[int]] = {}
    for row in range(len(split)) if rows is None else rows:
        posts.setdefault(_key(split.columns["queries"][row]), []).append(row)
    return list(posts.values())


def of_pairs(
    split: TokenizedSplit,
    rows: Sequence[int],
    measure: Callable[[list[Tensor], list[list[Tensor]]], Tensor],
) -> tuple[Tensor, Tensor]:
    """What is measured of the chosen and of the rejected summaries of some rows, each [rows].

    `measure` gets B queries and K lists of B summaries, and returns [K, B]: each query once, with
    its different summaries, and empty ones where it has fewer than K, whose numbers nobody reads.
    So the gap between two equal texts is exactly 0.
    """
    queries, columns, places = [], [], {}
    for post, own in enumerate(posts_of(split, rows)):
        texts: dict[bytes, Tensor] = {}
        for row in own:
            keys = [_key(text) for text in _summaries(split, row)]
            texts |= dict(zip(keys, _summaries(split, row), strict=True))
            places[row] = [(list(texts).index(key), post) for key in keys]
        queries.append(split.columns["queries"][own[0]])
        columns.append(list(texts.values()))
    lists = zip_longest(*columns, fillvalue=queries[0][:0])
    measured = measure(queries, [list(texts) for texts in lists])
    chosen, rejected = measured[torch.tensor([places[row] for row in rows]).unbind(-1)].unbind(1)
    return chosen, rejected


def _key(tokens: Tensor) -> bytes:
    return tokens.numpy().tobytes()


def _summaries(split: TokenizedSplit, row: int) -> list[Tensor]:
    return [split.columns[name][row] for name in ("chosen", "rejected")]


def pair_step(
    learner: Learner,
    split: TokenizedSplit,
    rows: Sequence[int],
    losses: Callable[[Sequence[int]], Iterable[tuple[Tensor, dict[str, Tensor]]]],
) -> dict[str, float]:
    """One optimizer step on a global batch of pairs; returns each statistic's mean over them.

    `losses` as in `optimizer_step`, of the rows of one microbatch, which holds as many texts as the
    setting says: see `pair_parts`.
    """
    share = local_share(rows, learner.accelerator)
    parts: Callable[[int], Sequence[Sequence[int]]] = partial(pair_parts, split, share)
    if learner.accelerator.num_processes > 1:  # an engine may want as many parts in each process
        share = [row for post in _alike(split, share) for row in post]
        parts = partial(chunks_of_pairs, share)
    stats = optimizer_step(learner, parts, losses, least=2)
    return {key: total / len(rows) for key, total in stats.items()}


def pair_length(split: TokenizedSplit, row: int) -> int:
    """Tokens of a comparison: the query once, and both summaries."""
    return sum(len(split.columns[name][row]) for name in ("queries", "chosen", "rejected"))


def _texts(split: TokenizedSplit, rows: Sequence[int]) -> int:
    """How many different summaries some rows of one post have."""
    return len({_key(summary) for row in rows for summary in _summaries(split, row)})


def _alike(split: TokenizedSplit, rows: Sequence[int]) -> list[list[int]]:
    """Some rows, those of a post together; posts with as many texts, of similar length, follow one
    another, so that little of a forward pass is padding.
    """

    def size(post: list[int]) -> tuple[int, int]:
        return _texts(split, post), max(pair_length(split, row) for row in post)

    return sorted(posts_of(split, rows), key=size)


def chunks_of_pairs(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Rows in parts of at most `size` sequences, two a pair."""
    return chunks(rows, max(1, size // 2))


def pair_parts(split: TokenizedSplit, rows: Sequence[int], size: int) -> list[list[int]]:
    """Rows in parts of at most `size` texts; the pairs of a post are in one part if they fit.

    A pair whose texts are equal counts as two sequences, like any other.
    """
    parts: list[list[int]] = []
    held = size
    for post in _alike(split, rows):
        fits = _texts(split, post) <= size
        pieces: Sequence[Sequence[int]] = [post] if fits else chunks_of_pairs(post, size)
        for piece in pieces:
            texts = max(2, _texts(split, piece))
            if held + texts > size:
                parts.append([])
                held = 0
            parts[-1] += piece
            held += texts
    return parts


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

    alike = [row for post in _alike(split, range(len(split))) for row in post]
    places = sorted(range(len(split)), key=alike.__getitem__)
    return over_rows(accelerator, places, max(1, sequences // 2), label, autocast, keep)


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
