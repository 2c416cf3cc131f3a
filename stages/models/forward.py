"""Forward passes: log-probabilities, values and scores of responses and of summaries.

[PAD] is never embedded: padded slots hold id 0 (Huang et al. 2024, detail 3). A row is a query and
its text, and padding stands after them: no token of a causal model sees what stands to its right,
and positions count from 0. So such a pass needs neither mask nor position ids.

Several responses to one query may share a row, so that the query is computed once: the query,
left-padded, and then each response, right-padded. A response sees the query and itself, and its
position ids go on from the query's. So every token gets what it would get in a row of its own, and
scores, values, log-probabilities and gradients are equal up to rounding. It needs attention that
takes a mask [B, 1, L, L] and positions from ids alone. `SHARING` names the families for which tests
show it; in any other each response gets a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.data.ragged import pad_left, pad_right
from stages.functional import entropy, sequence_logprobs
from stages.models.logprobs import SHARING, LogitStatistics, reading
from stages.models.reward_function import TextReward

EMPTY = -1
QUERY = 0  # the number of a row's first block; the texts are 1, 2, ..


def model_inputs(tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass.

    Shapes: tokens, attention_mask (True = real) [B, L]. Padded slots get id 0, never [PAD].
    """
    positions = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)
    return {
        "input_ids": tokens.masked_fill(~attention_mask, 0),
        "attention_mask": attention_mask.long(),
        "position_ids": positions,
    }


def response_statistics(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_length: int,
    statistics: LogitStatistics,
    group: int = 1,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of what might have stood there.

    Shapes: query_responses, attention_mask [B, Q+T] -> both [B, T] nats. `group` neighbours have
    the same query; they share a row where the model can.
    """
    rows = _response_rows(policy, query_responses, attention_mask, response_length, group)
    read = read_logits(policy, rows, statistics)
    logprobs, entropies = (x.view(len(query_responses), response_length) for x in read)
    return logprobs, entropies


def response_logprobs(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_length: int,
    temperature: float,
) -> Tensor:
    """Log-probability of each response token, [B, T] nats."""
    row = query_responses, attention_mask, response_length, LogitStatistics(temperature=temperature)
    return response_statistics(policy, *row)[0]


def read_logits(
    policy: nn.Module, rows: "SharedRows", statistics: LogitStatistics
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy there, both [R, columns of all texts] nats.

    There are logits at no other columns, and where output layer and formula allow it, a chunk of
    them at a time.
    """
    targets = rows.targets.clamp(min=0)
    with reading(policy, rows.columns_before, targets, statistics) as reads:
        logits = policy(**rows.inputs, use_cache=False).logits
    if reads:
        logprobs, entropies = logits.unbind(-1)
        return logprobs, entropies.detach()
    logprobs = statistics.formula(logits, targets, statistics.temperature)
    if not statistics.entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.no_grad():
        return logprobs, entropy(logits / statistics.temperature)


def head_scalars(reward_model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The reward model's scalar at every token of a forward pass, [B, L], at least float32."""
    scalars = reward_model(**inputs, use_cache=False).logits.squeeze(-1)
    return scalars.to(torch.promote_types(scalars.dtype, torch.float32))


def response_values(
    critic: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_length: int,
    group: int = 1,
) -> Tensor:
    """The critic at the positions that predict each response token: [B, Q+T] -> [B, T]."""
    rows = _response_rows(critic, query_responses, attention_mask, response_length, group)
    scalars = head_scalars(critic, rows.inputs).gather(1, rows.columns_before)
    return scalars.view(len(query_responses), response_length)


def token_read_before(model: nn.Module) -> int | None:
    """The token before which a model's scores are read; None where they are read at the last one,
    as from any model whose config.json does not say otherwise.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "score_before_token", None)


def score_responses(
    reward_model: nn.Module, queries: Tensor, responses: Tensor, pad_id: int, group: int = 1
) -> Tensor:
    """The score of each response.

    Shapes: queries [B, Q] left-padded, responses [B, T] right-padded -> [B], reward units.
    """
    if isinstance(reward_model, TextReward):
        return reward_model.scores(queries, responses, pad_id)
    tokens = torch.cat([queries, responses], dim=1)
    rows = _response_rows(reward_model, tokens, tokens != pad_id, responses.shape[1], group)
    return _scores(reward_model, rows).flatten()


def _scores(reward_model: nn.Module, rows: "SharedRows") -> Tensor:
    """The scalar at each text's last token, which is its EOS if it has one, [R, K].

    From a model that is read before EOS (`rm.read_at`), that at the token before an EOS.
    Source: Huang et al. 2024, detail 12, reads at EOS.
    """
    columns, eos_id = rows.column_back(1), token_read_before(reward_model)
    if eos_id is not None:
        ends = rows.inputs["input_ids"].gather(1, columns) == eos_id
        columns = torch.where(ends, rows.column_back(2), columns)
    return head_scalars(reward_model, rows.inputs).gather(1, columns)


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Queries with their texts, padded. Shapes: R rows of L columns, K texts a row."""

    inputs: dict[str, Tensor]
    """Keyword arguments for a forward pass."""
    tokens: Tensor
    """[R, L], EMPTY where padded: the query on the left, each text on the right."""
    widths: list[int]
    """Columns of the query and of each text."""
    moved: Tensor
    """How many columns further left `inputs` have a row's tokens, [R, 1]."""

    @property
    def targets(self) -> Tensor:
        """The tokens after the query, [R, columns of all texts], EMPTY where padded."""
        return self.tokens[:, self.widths[0] :]

    @property
    def starts(self) -> Tensor:
        """The first column of each text of a row, [K]."""
        return torch.tensor(self.widths, device=self.tokens.device).cumsum(0)[:-1]

    @property
    def columns_before(self) -> Tensor:
        """The column of `inputs` that predicts each target. Before a text's first token stands the
        query's last one.
        """
        query = self.widths[0]
        before = torch.arange(query, sum(self.widths), device=self.tokens.device) - 1
        before[self.starts - query] = query - 1
        return self._moved(before)

    def column_back(self, steps: int) -> Tensor:
        """The column of `inputs` with each text's last token (1) or the one before it (2), [R, K];
        where the text has no such token, that of the query's last.
        """
        texts = torch.split(self.targets != EMPTY, self.widths[1:], dim=1)
        lengths = torch.stack([text.sum(dim=1) for text in texts], dim=1)
        columns = torch.where(lengths < steps, self.widths[0], self.starts + lengths - steps + 1)
        return self._moved(columns - 1)

    def _moved(self, columns: Tensor) -> Tensor:
        """Columns of `tokens` as those of `inputs`; beyond its ends is nothing but padding."""
        return (columns - self.moved).clamp(min=0, max=self.inputs["input_ids"].shape[1] - 1)


def shares_query(model: nn.Module, longest: float) -> bool:
    """Whether this model can hold several texts after one query in a row, each with the query at
    most `longest` tokens: a sliding window must reach over them all.
    """
    config: Any = getattr(model, "module", model).config
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    plain = config._attn_implementation == "sdpa"
    reaches = not slides or longest <= config.sliding_window
    return plain and reaches and config.model_type in SHARING


def summary_scores(
    reward_model: nn.Module,
    queries: Sequence[Tensor],
    summaries: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> Tensor:
    """The score of each summary: [K, B], reward units.

    Shapes: B queries; K lists of B summaries.
    Source: Huang et al. 2024, details 10 and 12.
    """
    if isinstance(reward_model, TextReward):
        left = pad_left(list(queries), EMPTY)
        each = [reward_model.scores(left, pad_right(list(x), EMPTY), EMPTY) for x in summaries]
        return torch.stack(each).to(device)
    rows = _rows_for(reward_model, queries, summaries, device)
    return _scores(reward_model, rows).T.reshape(len(summaries), len(queries))


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
    logprobs, _ = read_logits(policy, rows, LogitStatistics())
    each = (torch.split(x, rows.widths[1:], 1) for x in (logprobs, rows.targets != EMPTY))
    summed = [sequence_logprobs(*text) for text in zip(*each, strict=True)]
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
    each = [summary for column in summaries for summary in column]
    if shares_query(model, max(map(len, queries)) + max(map(len, each))):
        return shared_rows(queries, summaries, device)
    return shared_rows(list(queries) * len(summaries), [each], device)


def shared_rows(
    queries: Sequence[Tensor], summaries: Sequence[Sequence[Tensor]], device: torch.device
) -> SharedRows:
    """Rows of queries, each with all its summaries.

    Shapes: B queries; K lists of B summaries -> B rows.
    """
    blocks = [pad_left(list(queries), EMPTY)]
    blocks += [pad_right(list(column), EMPTY) for column in summaries]
    return _laid_out(torch.cat(blocks, dim=1).to(device), [block.shape[1] for block in blocks])


def _response_rows(
    model: nn.Module, query_responses: Tensor, mask: Tensor, response_length: int, group: int
) -> SharedRows:
    """Rows of padded queries with their responses; `group` neighbours share one if the model can.

    Shapes: query_responses, mask [B, Q+T] -> B / group rows, or B.
    """
    tokens, query = query_responses.masked_fill(~mask, EMPTY), mask.shape[1] - response_length
    together = group if group > 1 and shares_query(model, mask.shape[1]) else 1
    texts = tokens[:, query:].reshape(-1, together * response_length)
    tokens = torch.cat([tokens[::together, :query], texts], dim=1)
    return _laid_out(tokens, [query] + [response_length] * together)


def _laid_out(tokens: Tensor, widths: list[int]) -> SharedRows:
    """Rows of blocks, the query's first. With one text a row, it follows its query at once.

    Shapes: tokens [R, L], EMPTY where padded; widths: columns of each block.
    """
    real = tokens != EMPTY
    if len(widths) > 2:
        block = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
        inputs = model_inputs(tokens, real)
        inputs |= _apart(real, block.to(tokens.device), inputs["position_ids"])
        moved = torch.zeros_like(tokens[:, :1])
    else:
        moved = (~real[:, : widths[0]]).sum(dim=1, keepdim=True)
        columns = torch.arange(int(real.sum(dim=1).max()), device=tokens.device) + moved
        ids = F.pad(tokens, (0, widths[0]), value=EMPTY).gather(1, columns)
        inputs = {"input_ids": ids.clamp(min=0)}
    return SharedRows(inputs=inputs, tokens=tokens, widths=widths, moved=moved)


def _apart(real: Tensor, block: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Mask and position ids that keep the texts of a row apart.

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
    # Beyond the model's last position padding would end learned positions and stretch dynamic ones.
    apart = apart.masked_fill(~real, 0)
    return {"attention_mask": sees.unsqueeze(1), "position_ids": apart}
