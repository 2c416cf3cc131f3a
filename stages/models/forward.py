"""Forward passes: log-probabilities, values and scores of responses and of summaries.

[PAD] is never embedded: padded slots get id 0 (Huang et al. 2024, detail 3). Rows have one of two
layouts (Q query, A and B texts, . padding):

    one text per row        Q Q Q A A . .        no mask, positions count from 0
                            Q A A A A . .
    texts share a query     . Q Q A A . B B B    a mask, and positions of their own
                            Q Q Q A . . B B .

With one text per row, the query's left padding is dropped, and all padding is on the right. No
token of a causal model sees what is to its right, so such a pass needs neither mask nor position
ids.

Several responses to one query may share a row, so that the query is computed once. A response sees
the query and itself, and its position ids continue the query's. So every token sees the same
context as in its own row, and scores, values, log-probabilities and gradients are equal up to
rounding. This needs attention that accepts a mask [B, 1, L, L], and positions that depend only on
position ids. `SHARING` lists the families for which tests show this; in any other family each
response gets its own row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from stages.data.ragged import pad_left, pad_right
from stages.functional import sequence_logprobs
from stages.models.policy import PolicyModel
from stages.models.reward_function import Facts, TextReward

EMPTY = -1
"""Marks a padded slot. No tokenizer has this id."""
QUERY = 0
"""The number of the first block of a row; its texts are 1, 2, .."""
# Families, by `model_type`, with rotary or learned positions and attention that takes any mask: a
# row may hold several texts. tests/models/test_shared_query.py shows it for each.
SHARING = frozenset({"gpt_neox", "gpt2", "llama", "qwen2", "gemma", "gemma3_text"})


@dataclass(frozen=True, kw_only=True)
class ResponseBatch:
    """Queries with one response each, on one device.

    Shapes: queries [B, Q] left-padded, responses [B, T] right-padded.
    """

    queries: Tensor
    responses: Tensor
    pad_id: int
    samples_per_query: int = 1
    """Neighbors that answer the same query. They share a row where the model allows it."""
    facts: Sequence[Facts] = ()
    """The data columns of each query's row, for a reward function; empty for a model."""

    @property
    def tokens(self) -> Tensor:
        """Queries and responses together, [B, Q+T]."""
        return torch.cat([self.queries, self.responses], dim=1)

    @property
    def mask(self) -> Tensor:
        """True where `tokens` are not padding, [B, Q+T] bool."""
        return self.tokens != self.pad_id


# -- responses to padded queries -------------------------------------------------------------------


def response_logprobs(
    policy: nn.Module,
    batch: ResponseBatch,
    *,
    temperature: float = 1.0,
    logprob_dtype: str = "float32",
    with_entropy: bool = False,
    entropy_requires_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of its distribution.

    `policy` is called like a `PolicyModel`, whose `forward` explains the options.
    Shapes: both [B, T], nats. Values at padding are meaningless, so mask them.
    """
    rows = _response_rows(policy, batch)
    logprobs, entropies = target_logprobs(
        policy,
        rows,
        temperature=temperature,
        logprob_dtype=logprob_dtype,
        with_entropy=with_entropy,
        entropy_requires_grad=entropy_requires_grad,
    )
    return logprobs.view_as(batch.responses), entropies.view_as(batch.responses)


def response_logits(policy: PolicyModel, batch: ResponseBatch) -> Tensor:
    """The logits that predict each response token, [B, T, V], all at once."""
    rows = _response_rows(policy, batch)
    logits = policy.logits(rows.inputs, rows.columns_before)
    return logits.view(*batch.responses.shape, -1)


def response_values(critic: nn.Module, batch: ResponseBatch) -> Tensor:
    """The critic at the positions that predict each response token, [B, T]."""
    rows = _response_rows(critic, batch)
    scalars = head_scalars(critic, rows.inputs).gather(1, rows.columns_before)
    return scalars.view_as(batch.responses)


def score_responses(reward_model: nn.Module, batch: ResponseBatch) -> Tensor:
    """The score of each response, [B], reward units."""
    if isinstance(reward_model, TextReward):
        return reward_model.scores(batch.queries, batch.responses, batch.facts, batch.pad_id)
    rows = _response_rows(reward_model, batch)
    return _scores(reward_model, rows).flatten()


# -- summaries of different lengths ----------------------------------------------------------------


def summary_scores(
    reward_model: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
    facts: Sequence[Facts] = (),
) -> Tensor:
    """The score of each summary: [K, B], reward units.

    Shapes: B queries; K lists of B summaries. `facts` are those of each query's row, for a reward
    function.
    Source: Huang et al. 2024, details 10 and 12.
    """
    if isinstance(reward_model, TextReward):
        padded_queries = pad_left(list(queries), EMPTY)
        scores = [
            reward_model.scores(padded_queries, pad_right(list(column), EMPTY), facts, EMPTY)
            for column in summaries
        ]
        return torch.stack(scores).to(device)
    rows = _summary_rows(reward_model, queries, summaries, device)
    # [B, K] where summaries share rows, else [K * B, 1]: transposed, both are in the order [K, B].
    return _scores(reward_model, rows).T.reshape(len(summaries), len(queries))


def summary_logprobs(
    policy: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> Tensor:
    """Log-probability of each summary, the sum over its tokens and its EOS: [K, B], nats.

    `policy` is called like a `PolicyModel`. Shapes as in `summary_scores`. The temperature is 1.
    """
    rows = _summary_rows(policy, queries, summaries, device)
    logprobs, _ = target_logprobs(policy, rows)
    text_widths = rows.widths[1:]
    logprobs_of_texts = torch.split(logprobs, text_widths, dim=1)
    masks_of_texts = torch.split(rows.targets != EMPTY, text_widths, dim=1)
    sums = [
        sequence_logprobs(text_logprobs, mask)
        for text_logprobs, mask in zip(logprobs_of_texts, masks_of_texts, strict=True)
    ]
    return torch.cat(sums).view(len(summaries), len(queries))


# -- passes over rows ------------------------------------------------------------------------------


def model_inputs(tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass over padded rows.

    Shapes: tokens, attention_mask (True = real) [B, L]. Padded slots get id 0, never [PAD].
    """
    positions = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return {
        "input_ids": tokens.masked_fill(~attention_mask, 0),
        "attention_mask": attention_mask.long(),
        "position_ids": positions,
    }


def target_logprobs(
    policy: nn.Module,
    rows: "SharedRows",
    *,
    temperature: float = 1.0,
    logprob_dtype: str = "float32",
    with_entropy: bool = False,
    entropy_requires_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target of the rows, and the entropy there.

    Shapes: both [R, columns of all texts], nats; values at padding are meaningless.
    """
    logprobs, entropies = policy(
        rows.inputs,
        rows.columns_before,
        rows.targets.clamp(min=0),  # any token where the target is padding
        temperature=temperature,
        logprob_dtype=logprob_dtype,
        with_entropy=with_entropy,
        entropy_requires_grad=entropy_requires_grad,
    )
    return logprobs, entropies


def head_scalars(reward_model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The scalar of a reward model or critic at every token, [B, L], in float32 or wider."""
    scalars = reward_model(**inputs, use_cache=False).logits.squeeze(-1)
    return scalars.to(torch.promote_types(scalars.dtype, torch.float32))


def _scores(reward_model: nn.Module, rows: "SharedRows") -> Tensor:
    """The scalar at each text's last token, which is its EOS if it has one, [R, K].

    From a model that is read before EOS (`rm.read_at`), the scalar at the token before an EOS.
    Source: Huang et al. 2024, detail 12, reads at EOS.
    """
    columns = rows.column_from_end(1)
    eos_id = token_read_before(reward_model)
    if eos_id is not None:
        ends_with_eos = rows.inputs["input_ids"].gather(1, columns) == eos_id
        columns = torch.where(ends_with_eos, rows.column_from_end(2), columns)
    return head_scalars(reward_model, rows.inputs).gather(1, columns)


def token_read_before(model: nn.Module) -> int | None:
    """The token before which a model's scores are read, from its config.json; None if they are read
    at the last token.
    """
    model = _unwrapped(model)
    if isinstance(model, TextReward):
        return None
    return getattr(model.config, "score_before_token", None)


def shares_query(model: nn.Module, longest: float) -> bool:
    """Whether a row of this model can hold several texts after one query.

    `longest`: the most tokens of a query with one text. A sliding window must reach over them all.
    """
    config: Any = _unwrapped(model).config
    layer_types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in layer_types and longest > config.sliding_window:
        return False
    return config._attn_implementation == "sdpa" and config.model_type in SHARING


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch's wrapper for several devices, if it has one."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        inner: nn.Module = model.module
        return inner
    return model


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Queries with their texts, padded. Shapes: R rows of L columns, K texts per row."""

    inputs: dict[str, Tensor]
    """Keyword arguments for a forward pass."""
    tokens: Tensor
    """[R, L], EMPTY where padded: the query left-padded, each text right-padded."""
    widths: list[int]
    """Columns of the query and of each text."""
    dropped: Tensor
    """How many columns of left padding `inputs` leave out of each row, [R, 1]."""

    @property
    def targets(self) -> Tensor:
        """The tokens after the query, [R, columns of all texts], EMPTY where padded."""
        return self.tokens[:, self.widths[0] :]

    @property
    def starts(self) -> Tensor:
        """The first column of each text in `tokens`, [K]."""
        return torch.tensor(self.widths, device=self.tokens.device).cumsum(0)[:-1]

    @property
    def columns_before(self) -> Tensor:
        """The column of `inputs` that predicts each target, [R, columns of all texts].

        A text's first token is predicted by the query's last one.
        """
        query_width = self.widths[0]
        columns = torch.arange(query_width, sum(self.widths), device=self.tokens.device) - 1
        columns[self.starts - query_width] = query_width - 1
        return self._in_inputs(columns)

    def column_from_end(self, steps: int) -> Tensor:
        """The column of `inputs` with each text's last token (1) or the one before it (2), [R, K].

        Where the text has no such token, the column of the query's last one.
        """
        masks = torch.split(self.targets != EMPTY, self.widths[1:], dim=1)
        lengths = torch.stack([mask.sum(dim=1) for mask in masks], dim=1)  # [R, K]
        query_end = self.widths[0] - 1
        columns = torch.where(lengths < steps, query_end, self.starts + lengths - steps)
        return self._in_inputs(columns)

    def _in_inputs(self, columns: Tensor) -> Tensor:
        """Columns of `tokens` as columns of `inputs`; beyond its ends there is only padding."""
        last = self.inputs["input_ids"].shape[1] - 1
        return (columns - self.dropped).clamp(min=0, max=last)


def shared_rows(
    queries: Sequence[Tensor], summaries: Sequence[Sequence[Tensor]], device: torch.device
) -> SharedRows:
    """Rows of queries, each with all its summaries.

    Shapes: B queries; K lists of B summaries -> B rows.
    """
    blocks = [pad_left(list(queries), EMPTY)]
    for column in summaries:
        blocks.append(pad_right(list(column), EMPTY))
    widths = [block.shape[1] for block in blocks]
    return _laid_out(torch.cat(blocks, dim=1).to(device), widths)


def _summary_rows(
    model: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> SharedRows:
    """A row per query if the model can share it, else a row per summary.

    With a row per summary, all first summaries come before all second ones. So reading the first
    text of every row, then the second one and so on, gives the same order either way.
    """
    one_column = [summary for column in summaries for summary in column]
    longest = max(map(len, queries)) + max(map(len, one_column))
    if shares_query(model, longest):
        return shared_rows(queries, summaries, device)
    return shared_rows(list(queries) * len(summaries), [one_column], device)


def _response_rows(model: nn.Module, batch: ResponseBatch) -> SharedRows:
    """Rows of padded queries with their responses, [B / samples_per_query] of them, or [B]."""
    tokens = batch.tokens.masked_fill(~batch.mask, EMPTY)
    query_width = batch.queries.shape[1]
    response_width = batch.responses.shape[1]
    texts_per_row = 1
    if batch.samples_per_query > 1 and shares_query(model, tokens.shape[1]):
        texts_per_row = batch.samples_per_query
    queries = tokens[::texts_per_row, :query_width]
    texts = tokens[:, query_width:].reshape(-1, texts_per_row * response_width)
    widths = [query_width] + [response_width] * texts_per_row
    return _laid_out(torch.cat([queries, texts], dim=1), widths)


def _laid_out(tokens: Tensor, widths: list[int]) -> SharedRows:
    """Rows of blocks, the query's first, in one of the two layouts at the top of this file.

    Shapes: tokens [R, L], EMPTY where padded; widths: columns of each block.
    """
    is_real = tokens != EMPTY
    has_several_texts = len(widths) > 2
    if has_several_texts:
        # The mask and the positions replace the plain ones of `model_inputs`.
        inputs = model_inputs(tokens, is_real) | _separate_texts(is_real, widths)
        no_columns = torch.zeros_like(tokens[:, :1])
        return SharedRows(inputs=inputs, tokens=tokens, widths=widths, dropped=no_columns)

    # Shift each row left past its padding, then trim to the longest row. The slots that are added
    # on the right are what a shifted row reads beyond its end.
    query_width = widths[0]
    dropped = (~is_real[:, :query_width]).sum(dim=1, keepdim=True)
    longest = int(is_real.sum(dim=1).max())
    columns = torch.arange(longest, device=tokens.device) + dropped
    moved = F.pad(tokens, (0, query_width), value=EMPTY).gather(1, columns)
    inputs = {"input_ids": moved.clamp(min=0)}
    return SharedRows(inputs=inputs, tokens=tokens, widths=widths, dropped=dropped)


def _separate_texts(is_real: Tensor, widths: list[int]) -> dict[str, Tensor]:
    """The mask and the position ids that keep the texts of a row from seeing each other.

    Shapes: is_real [R, L] -> attention_mask [R, 1, L, L], True where a row's token (third axis)
    sees another (fourth axis); position_ids [R, L].
    """
    device = is_real.device
    columns = torch.arange(is_real.shape[1], device=device)
    # The number of each column's block, [L].
    block = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths)).to(device)

    is_causal = columns.unsqueeze(1) >= columns
    is_query_or_same_text = (block == QUERY) | (block.unsqueeze(1) == block)
    sees = is_causal & is_query_or_same_text & is_real.unsqueeze(1)
    # Padding sees at least itself: a softmax over nothing would be NaN.
    sees |= torch.eye(len(block), dtype=torch.bool, device=device)

    # Left-padded queries count from their first token, and each text from its query's end.
    is_query = block == QUERY
    query_positions = (is_real.long().cumsum(dim=-1) - 1).clamp(min=0)
    query_lengths = (is_real & is_query).sum(dim=1, keepdim=True)
    # The first column of the block that each column belongs to, [L]: `block` is sorted.
    block_starts = torch.searchsorted(block, block)
    positions = torch.where(is_query, query_positions, query_lengths + columns - block_starts)
    # Padding gets position 0: a larger one could overrun learned position embeddings, or rescale
    # dynamic rotary ones.
    positions = positions.masked_fill(~is_real, 0)
    return {"attention_mask": sees.unsqueeze(1), "position_ids": positions}
