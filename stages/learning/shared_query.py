"""Several summaries of one post in one row, so that the query is computed once.

A row is the query, left-padded, and then each summary, right-padded. A summary sees the query and
itself, and its position ids go on from the query's. So every token gets what it would get in a row
of its own, and scores, log-probabilities and gradients are equal up to rounding. A query is some
five times as long as a summary: a pair costs little more than half of two rows.

It needs attention that takes a mask [B, 1, L, L] and positions from ids alone. `SHARING` names the
families for which tests show it; in any other each summary gets a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stages.functional import sequence_logprobs
from stages.learning.passes import head_scalars, model_inputs, read_logits, score_columns
from stages.learning.vocabulary import LogitStatistics
from stages.posts.ragged import pad_left, pad_right
from stages.settings.families import SHARING

EMPTY = -1
QUERY = 0  # the number of a row's first block; the summaries are 1, 2, ..


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Queries with their summaries, padded. Shapes: R rows of L columns."""

    inputs: dict[str, Tensor]
    """Keyword arguments for a forward pass."""
    tokens: Tensor
    """[R, L], EMPTY where padded."""
    starts: list[int]
    """The first column of each summary of a row."""
    ends: list[Tensor]
    """The column after the last token of each summary of a row, each [R]."""


def shares_query(model: nn.Module) -> bool:
    """Whether this model can hold several summaries of one query in a row."""
    config: Any = getattr(model, "module", model).config
    layers = getattr(config, "layer_types", None) or []
    plain = config._attn_implementation == "sdpa" and "sliding_attention" not in layers
    return plain and config.model_type in SHARING


def summary_scores(
    reward_model: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> Tensor:
    """The score of each summary, read in its `score_columns`: [K, B], reward units.

    Shapes: B queries; K lists of B summaries.
    Source: Huang et al. 2024, details 10 and 12.
    """
    rows = _rows_for(reward_model, queries, summaries, device)
    scalars = head_scalars(reward_model, rows.inputs)
    query_end, scores = rows.starts[0] - 1, []
    for start, end in zip(rows.starts, rows.ends, strict=True):
        last = end - 1
        # Before a summary's first token stands the query's last one.
        before = torch.where(last > start, last - 1, query_end)
        columns = score_columns(reward_model, rows.tokens, last, before)
        scores.append(scalars.gather(1, columns.unsqueeze(1)).squeeze(1))
    return torch.cat(scores).view(len(summaries), len(queries))


def summary_logprobs(
    policy: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> Tensor:
    """Log-probability of each summary, the sum over its tokens and its EOS: [K, B], nats.

    Shapes as in `summary_scores`. The temperature is 1.
    """
    rows = _rows_for(policy, queries, summaries, device)
    bounds = list(pairwise([*rows.starts, rows.tokens.shape[1]]))
    # The first token of each summary is predicted by the query's last one.
    query_end = rows.starts[0] - 1
    before = [column for start, end in bounds for column in (query_end, *range(start, end - 1))]
    tokens = rows.tokens[:, rows.starts[0] :]
    columns = torch.tensor(before, device=device)
    logprobs, _ = read_logits(policy, rows.inputs, columns, tokens.clamp(min=0), LogitStatistics())
    widths = [end - start for start, end in bounds]
    masks = torch.split(tokens != EMPTY, widths, dim=1)
    each = zip(torch.split(logprobs, widths, dim=1), masks, strict=True)
    summed = [sequence_logprobs(logprobs, mask) for logprobs, mask in each]
    return torch.cat(summed).view(len(summaries), len(queries))


def _rows_for(
    model: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> SharedRows:
    """One row a query if the model can, else one row a summary, all first ones before all second
    ones. So what is read from the rows, laid end to end, is in the same order either way.
    """
    if shares_query(model):
        return shared_rows(queries, summaries, device)
    each = [summary for column in summaries for summary in column]
    return shared_rows(list(queries) * len(summaries), [each], device)


def shared_rows(
    queries: Sequence[Tensor], summaries: Sequence[Sequence[Tensor]], device: torch.device
) -> SharedRows:
    """Rows of queries, each with all its summaries. With one summary a row, a plain mask will do.

    Shapes: B queries; K lists of B summaries -> B rows.
    """
    blocks = [pad_left(list(queries), EMPTY)]
    blocks += [pad_right(list(column), EMPTY) for column in summaries]
    tokens = torch.cat(blocks, dim=1).to(device)
    widths = torch.tensor([block.shape[1] for block in blocks])
    starts = widths.cumsum(0)[:-1].tolist()
    ends = [
        start + torch.tensor([len(summary) for summary in each], device=device)
        for start, each in zip(starts, summaries, strict=True)
    ]
    real = tokens != EMPTY
    inputs = model_inputs(tokens, real)
    if len(summaries) > 1:
        block = torch.repeat_interleave(torch.arange(len(blocks)), widths).to(device)
        inputs |= _apart(real, block, inputs["position_ids"])
    return SharedRows(inputs=inputs, tokens=tokens, starts=starts, ends=ends)


def _apart(real: Tensor, block: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Mask and position ids that keep the summaries of a row apart.

    Shapes: real, positions [B, L]; block [L], the number of each column's block -> mask
    [B, 1, L, L], True where a row's token (third axis) sees another (fourth axis).
    """
    columns = torch.arange(len(block), device=block.device)
    causal = columns.unsqueeze(1) >= columns
    together = (block == QUERY) | (block.unsqueeze(1) == block)
    sees = causal & together & real.unsqueeze(1)
    sees |= torch.eye(len(block), dtype=torch.bool, device=block.device)  # a softmax over nothing
    lengths = (real & (block == QUERY)).sum(dim=1, keepdim=True)
    first = torch.searchsorted(block, block)  # the first column of each column's block
    own = (columns - first).expand_as(positions)
    apart = torch.where(block == QUERY, positions, lengths + own)
    return {"attention_mask": sees.unsqueeze(1), "position_ids": apart}
