"""Forward passes: log-probabilities, values and scores of responses and of summaries; the SFT loss.

[PAD] is never embedded: padded slots hold id 0 and are masked out of attention (Huang et al. 2024,
detail 3). Position ids count real tokens only, so padding on either side changes rounding
at most.

Several responses to one query may share a row, so that the query is computed once: the query,
left-padded, and then each response, right-padded. A response sees the query and itself, and its
position ids go on from the query's. So every token gets what it would get in a row of its own, and
scores, values, log-probabilities and gradients are equal up to rounding. It needs attention that
takes a mask [B, 1, L, L] and positions from ids alone. `SHARING` names the families for which tests
show it; in any other each response gets a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.functional import entropy, sequence_logprobs, token_logprobs
from stages.learning.vocabulary import SHARING, LogitStatistics, reading, reading_head
from stages.posts.ragged import TokenizedSplit, pad_left, pad_right
from stages.text_reward import TextReward

EMPTY = -1
QUERY = 0  # the number of a row's first block; the texts are 1, 2, ..


class PolicyAndCritic(nn.Module):
    """The networks that learn in one module, so that one optimizer and one engine serve both (Huang
    et al. 2024, detail 22). A stage may learn without a critic.
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic: Any = critic

    def forward(self, network: str, *row: Any) -> Any:
        """`response_statistics` of the "policy", or `response_values` of the "critic".

        One network a call: the other's activations need not be alive beside it.
        """
        if network == "policy":
            return response_statistics(self.policy, *row)
        return response_values(self.critic, *row)


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
    read = read_logits(policy, rows.inputs, rows.columns_before, rows.targets, statistics)
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
    statistics = LogitStatistics(temperature=temperature)
    row = query_responses, attention_mask, response_length
    return response_statistics(policy, *row, statistics)[0]


def read_logits(
    policy: nn.Module,
    inputs: dict[str, Tensor],
    columns: Tensor,
    targets: Tensor,
    statistics: LogitStatistics,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy at some columns of a forward pass.

    Shapes: columns [T], which may repeat; targets [B, T] -> both [B, T] nats. There are logits at
    no other columns, and where output layer and formula allow it, a chunk of them at a time.
    """
    head = reading_head(policy)
    if head is not None and statistics.formula is token_logprobs:
        with reading(head, targets, statistics):
            output = policy(**inputs, logits_to_keep=columns, use_cache=False)
        logprobs, entropies = output.logits.unbind(-1)
        return logprobs, entropies.detach()
    logits = policy(**inputs, logits_to_keep=columns, use_cache=False).logits
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
    scalars = head_scalars(critic, rows.inputs).index_select(1, rows.columns_before)
    return scalars.view(len(query_responses), response_length)


def token_read_before(model: nn.Module) -> int | None:
    """The token before which a model's scores are read; None where they are read at the last one,
    as from any model whose config.json does not say otherwise.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "score_before_token", None)


def score_columns(reward_model: nn.Module, rows: "SharedRows") -> Tensor:
    """The column in which each text's score is read, [R, K].

    It is the text's last token, which is its EOS if it has one. From a model that is read before
    EOS (`rm.read_at`) it is the token before an EOS.
    Source: Huang et al. 2024, detail 12, reads at EOS.
    """
    last, eos_id = rows.column_back(1), token_read_before(reward_model)
    if eos_id is None:
        return last
    return torch.where(rows.tokens.gather(1, last) == eos_id, rows.column_back(2), last)


def score_responses(
    reward_model: nn.Module, queries: Tensor, responses: Tensor, pad_id: int, group: int = 1
) -> Tensor:
    """The score of each response, read in its `score_columns`.

    Shapes: queries [B, Q] left-padded, responses [B, T] right-padded -> [B], reward units.
    """
    if isinstance(reward_model, TextReward):
        return reward_model.scores(queries, responses, pad_id)
    tokens = torch.cat([queries, responses], dim=1)
    rows = _response_rows(reward_model, tokens, tokens != pad_id, responses.shape[1], group)
    return _scores(reward_model, rows).flatten()


def _scores(reward_model: nn.Module, rows: "SharedRows") -> Tensor:
    scalars = head_scalars(reward_model, rows.inputs)
    return scalars.gather(1, score_columns(reward_model, rows))


# -- the SFT loss (Huang et al. 2024, detail 9) ----------------------------------------------------


def sequence_length(split: TokenizedSplit, row: int) -> int:
    """Tokens of query and summary together."""
    return len(split.columns["queries"][row]) + len(split.columns["summaries"][row])


def counted_tokens(split: TokenizedSplit, rows: list[int], loss_on_query: bool) -> int:
    """How many tokens of these rows the loss counts; the very first one is not predicted."""
    if loss_on_query:
        return sum(sequence_length(split, row) - 1 for row in rows)
    return sum(len(split.columns["summaries"][row]) for row in rows)


def summed_loss(
    policy: nn.Module,
    split: TokenizedSplit,
    rows: Sequence[int],
    loss_on_query: bool,
    device: torch.device,
) -> Tensor:
    """Negative log-likelihood summed over the counted tokens of some rows, [] nats.

    Each row is a prefix that is only read (the query, or its first token) and the tokens that are
    learned; logits exist at the positions that predict the latter, and at no others.
    """
    prefixes, learned = [], []
    for row in rows:
        tokens = torch.cat([split.columns["queries"][row], split.columns["summaries"][row]])
        start = 1 if loss_on_query else len(split.columns["queries"][row])
        prefixes.append(tokens[:start])
        learned.append(tokens[start:])
    targets = pad_right(learned, EMPTY).to(device)
    tokens = torch.cat([pad_left(prefixes, EMPTY).to(device), targets], dim=1)
    logprobs = response_logprobs(
        policy, tokens.clamp(min=0), tokens != EMPTY, targets.shape[1], temperature=1.0
    )
    return -torch.where(targets != EMPTY, logprobs, 0.0).sum()


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """Queries with their texts, padded. Shapes: R rows of L columns, K texts a row."""

    inputs: dict[str, Tensor]
    """Keyword arguments for a forward pass."""
    tokens: Tensor
    """[R, L], EMPTY where padded."""
    starts: list[int]
    """The first column of each text of a row."""
    lengths: Tensor
    """Tokens of each text, [R, K]."""

    @property
    def targets(self) -> Tensor:
        """The tokens after the query, [R, columns of all texts], 0 where padded."""
        return self.tokens[:, self.starts[0] :].clamp(min=0)

    @property
    def columns_before(self) -> Tensor:
        """The column that predicts each target. Before a text's first token stands the query's
        last one.
        """
        query_end, bounds = self.starts[0] - 1, pairwise([*self.starts, self.tokens.shape[1]])
        before = [column for start, end in bounds for column in (query_end, *range(start, end - 1))]
        return torch.tensor(before, device=self.tokens.device)

    def column_back(self, steps: int) -> Tensor:
        """The column of each text's last token (1) or of the one before it (2), [R, K]; where the
        text has no such token, the query's last column.
        """
        starts = torch.tensor(self.starts, device=self.tokens.device)
        inside = self.lengths >= steps
        return torch.where(inside, starts + self.lengths - steps, self.starts[0] - 1)


def shares_query(model: nn.Module, longest: int) -> bool:
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
    """The score of each summary, read in its `score_columns`: [K, B], reward units.

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
    columns, targets = rows.columns_before, rows.targets
    logprobs, _ = read_logits(policy, rows.inputs, columns, targets, LogitStatistics())
    real = rows.tokens[:, rows.starts[0] :] != EMPTY
    widths = [end - start for start, end in pairwise([*rows.starts, rows.tokens.shape[1]])]
    each = zip(torch.split(logprobs, widths, dim=1), torch.split(real, widths, dim=1), strict=True)
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
    if together > 1:
        texts = tokens[:, query:].reshape(-1, together * response_length)
        tokens = torch.cat([tokens[::together, :query], texts], dim=1)
    return _laid_out(tokens, [query] + [response_length] * together)


def _laid_out(tokens: Tensor, widths: Sequence[int]) -> SharedRows:
    """Rows of blocks, the query's first. With one text a row, a 2D mask suffices.

    Shapes: tokens [R, L], EMPTY where padded; widths: columns of each block.
    """
    columns = torch.tensor(widths)
    starts = columns.cumsum(0)[:-1].tolist()
    real = tokens != EMPTY
    inputs = model_inputs(tokens, real)
    if len(starts) > 1:
        block = torch.repeat_interleave(torch.arange(len(widths)), columns).to(tokens.device)
        inputs |= _apart(real, block, inputs["position_ids"])
    texts = torch.split(real, list(widths), dim=1)[1:]
    lengths = torch.stack([text.sum(dim=1) for text in texts], dim=1)
    return SharedRows(inputs=inputs, tokens=tokens, starts=starts, lengths=lengths)


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
