"""Comparisons: training steps on them, and evaluation on held-out ones.

Both serve the reward model and DPO's implicit reward model. The gap of a comparison is the reward
of the chosen summary minus that of the rejected one. A comparison counts as right if its gap is
above 0.

Several comparisons may be about one post, and they often share summaries. A forward pass computes
each post once and each of its distinct summaries once. A row of a split is one comparison, also
called a pair.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.config.errors import UserError
from stages.data.halves import in_half
from stages.data.ragged import TokenizedSplit, load_split, rows_of
from stages.data.schemas import COLUMNS
from stages.functional import preference_loss
from stages.training.memory import MemoryBudget, PassSize, chunks
from stages.training.processes import local_share
from stages.training.row_by_row import measure_rows
from stages.training.step import Learner, optimizer_step

T = TypeVar("T")


def training_pairs(data: Path, pairs: str) -> TokenizedSplit:
    """Return the training comparisons that the setting `rm.pairs` names, in their order."""
    split = load_split(data, "comparisons_train")
    rows = [row for row, about in enumerate(split.rows) if in_half(about["id"], pairs)]
    if len(rows) == len(split):
        return split
    if not rows:
        raise UserError(
            f"rm.pairs is {pairs}, but that half has no training comparisons: set rm.pairs=all"
        )
    return rows_of(split, rows)


def rows_by_post(split: TokenizedSplit, rows: Iterable[int] | None = None) -> list[list[int]]:
    """Return rows of a split, all by default, grouped by post.

    Posts are in the order in which they first occur, and so are the rows of each.
    """
    if rows is None:
        rows = range(len(split))
    groups: dict[bytes, list[int]] = {}
    for row in rows:
        query = _key(split.columns["queries"][row])
        groups.setdefault(query, []).append(row)
    return list(groups.values())


def measure_pairs(
    split: TokenizedSplit,
    rows: Sequence[int],
    measure: Callable[[list[Tensor], list[list[Tensor]]], Tensor],
) -> tuple[Tensor, Tensor]:
    """Measure the chosen and the rejected summaries of these rows; return both, each [rows].

    `measure` gets B queries, and K lists of B summaries: one query for each post, and in list k the
    k-th distinct summary of each post. It returns a number for each summary, [K, B]. A post with
    fewer than K distinct summaries has empty ones in the last lists, whose numbers are not used.
    Since each text is measured once, the gap between two equal summaries is exactly 0.
    """
    queries: list[Tensor] = []
    summaries_by_post: list[list[Tensor]] = []
    post_of_row: dict[int, int] = {}
    # The places of a row's chosen and rejected summary among the summaries of its post.
    places_of_row: dict[int, list[int]] = {}

    for post, rows_of_post in enumerate(rows_by_post(split, rows)):
        queries.append(split.columns["queries"][rows_of_post[0]])
        summaries: list[Tensor] = []
        place_of_text: dict[bytes, int] = {}
        for row in rows_of_post:
            post_of_row[row] = post
            places_of_row[row] = []
            for summary in _summaries(split, row):
                text = _key(summary)
                if text not in place_of_text:
                    place_of_text[text] = len(summaries)
                    summaries.append(summary)
                places_of_row[row].append(place_of_text[text])
        summaries_by_post.append(summaries)

    # From the summaries of each post to a list of the first of every post, of the second, ...
    empty = queries[0][:0]
    lists = zip_longest(*summaries_by_post, fillvalue=empty)
    measured = measure(queries, [list(summaries) for summaries in lists])  # [K, B]

    # One indexing operation for both sides: with two, the gradients of a text that occurs several
    # times would be added in a different order.
    places = torch.tensor([places_of_row[row] for row in rows])  # [rows, 2]
    posts = torch.tensor([post_of_row[row] for row in rows]).unsqueeze(1)  # [rows, 1]
    chosen, rejected = measured[places, posts].unbind(1)
    return chosen, rejected


def _key(tokens: Tensor) -> bytes:
    """Return a key that is the same for equal texts."""
    return tokens.numpy().tobytes()


def _summaries(split: TokenizedSplit, row: int) -> tuple[Tensor, Tensor]:
    """Return the chosen and the rejected summary of a row."""
    return split.columns["chosen"][row], split.columns["rejected"][row]


# -- training --------------------------------------------------------------------------------------


def pair_step(
    learner: Learner,
    split: TokenizedSplit,
    rows: Sequence[int],
    losses: Callable[[Sequence[int]], Iterable[tuple[Tensor, dict[str, Tensor]]]],
) -> dict[str, float]:
    """Take one optimizer step on a global batch of pairs; return each statistic's mean over them.

    `losses` is that of `optimizer_step`; it gets the rows of one microbatch.
    """
    share = local_share(rows, learner.accelerator)

    def split_into_microbatches(size: int) -> Sequence[Sequence[int]]:
        if learner.accelerator.num_processes == 1:
            return microbatches_of_texts(split, share, size)
        # The engine may need the same number of microbatches in each process, so they are cut by
        # the number of pairs, which is equal, and not by that of different texts.
        return chunks_of_pairs(sorted_by_shape(split, share), size)

    sums = optimizer_step(learner, split_into_microbatches, losses, smallest=2)
    return {key: total / len(rows) for key, total in sums.items()}


def microbatches_of_texts(split: TokenizedSplit, rows: Sequence[int], size: int) -> list[list[int]]:
    """Return rows in microbatches of at most `size` distinct texts.

    The pairs of a post stay in one microbatch if they fit. A pair of two equal texts counts as two,
    like any other.
    """
    microbatches: list[list[int]] = []
    texts_in_last = 0
    for rows_of_post in posts_by_shape(split, rows):
        pieces: Sequence[Sequence[int]] = [rows_of_post]
        if count_texts(split, rows_of_post) > size:
            pieces = chunks_of_pairs(rows_of_post, size)
        for piece in pieces:
            texts = max(2, count_texts(split, piece))
            if not microbatches or texts_in_last + texts > size:
                microbatches.append([])
                texts_in_last = 0
            microbatches[-1].extend(piece)
            texts_in_last += texts
    return microbatches


def chunks_of_pairs(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return rows in chunks of at most `size` sequences, two for each pair."""
    return chunks(rows, max(1, size // 2))


def posts_by_shape(split: TokenizedSplit, rows: Sequence[int]) -> list[list[int]]:
    """Return rows grouped by post, sorted by the post's number of texts and then by length.

    So posts of similar shape share a forward pass, and little of it is padding.
    """

    def shape(rows_of_post: list[int]) -> tuple[int, int]:
        longest = max(pair_length(split, row) for row in rows_of_post)
        return count_texts(split, rows_of_post), longest

    return sorted(rows_by_post(split, rows), key=shape)


def sorted_by_shape(split: TokenizedSplit, rows: Sequence[int]) -> list[int]:
    """Return rows in the order of `posts_by_shape`."""
    return [row for rows_of_post in posts_by_shape(split, rows) for row in rows_of_post]


def count_texts(split: TokenizedSplit, rows: Sequence[int]) -> int:
    """Return how many distinct summaries these rows of one post have."""
    return len({_key(summary) for row in rows for summary in _summaries(split, row)})


def pair_length(split: TokenizedSplit, row: int) -> int:
    """Return the tokens of a comparison: the query once, and both summaries."""
    return sum(len(split.columns[name][row]) for name in ("queries", "chosen", "rejected"))


# -- evaluation ------------------------------------------------------------------------------------


def measure_all_pairs(
    accelerator: Accelerator,
    budget: MemoryBudget,
    split: TokenizedSplit,
    *,
    label: str,
    setting: str,
    measure: Callable[[list[int]], list[T]],
    keep: Path | None,
) -> list[T]:
    """Return what `measure` returns for every pair of a split, in its order, from all processes.

    `measure` gets the rows of one forward pass, and runs under autocast. A pass holds as many
    sequences as `setting` says, two for each pair. `keep` is that of `measure_share`.
    """

    def measure_with_autocast(rows: list[int]) -> list[T]:
        with accelerator.autocast():
            return measure(rows)

    # Each row's place in the order by shape, so that pairs of similar shape share a pass.
    places = [0] * len(split)
    for place, row in enumerate(sorted_by_shape(split, range(len(split)))):
        places[row] = place

    return measure_rows(
        accelerator,
        budget,
        label=label,
        sort_keys=places,
        size=PassSize(rows=max(1, budget.sequences(setting) // 2), setting=setting),
        measure=measure_with_autocast,
        keep=keep,
    )


def gap_rows(gaps: Sequence[float], split: TokenizedSplit) -> list[dict[str, Any]]:
    """Return a row for each pair, from which intervals, groups and length effects are computed."""
    chosen_lengths = split.columns["chosen"].lengths().tolist()
    rejected_lengths = split.columns["rejected"].lengths().tolist()
    rows = []
    for gap, chosen, rejected, facts in zip(
        gaps, chosen_lengths, rejected_lengths, split.rows, strict=True
    ):
        groups = {name: value for name, value in facts.items() if name != COLUMNS}
        rows.append({"gap": gap, "chosen_tokens": chosen, "rejected_tokens": rejected, **groups})
    return rows


def summarize_gaps(gaps: Sequence[float]) -> dict[str, float]:
    """Return accuracy, number and loss of held-out pairs."""
    rewards = torch.tensor(gaps, dtype=torch.float64)
    return {
        "accuracy": sum(gap > 0 for gap in gaps) / len(gaps),
        "pairs": len(gaps),
        "loss": preference_loss(rewards, torch.zeros_like(rewards)).item(),
    }
