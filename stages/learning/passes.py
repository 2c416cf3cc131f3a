"""Forward passes: log-probabilities, values and scores of responses.

[PAD] is never embedded: padded slots hold id 0 and are masked out of attention (Huang et al. 2024,
detail 3). Position ids count real tokens only, so padding on either side changes rounding
at most.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stages.functional import entropy, first_true_index, token_logprobs
from stages.learning.heads import token_read_before
from stages.learning.vocabulary import (
    LEARNED,
    LogitStatistics,
    LogprobFormula,
    reading,
    reading_head,
)


class PolicyAndCritic(nn.Module):
    """The networks that learn in one module, so that one optimizer and one engine serve both (Huang
    et al. 2024, detail 22). A stage may learn without a critic.
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | None = None) -> None:
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
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of what might have stood there.

    Shapes: query_responses, attention_mask [B, Q+T] -> both [B, T] nats.
    """
    length = query_responses.shape[1]
    before = torch.arange(length - response_length, length, device=query_responses.device) - 1
    inputs = model_inputs(query_responses, attention_mask)
    return read_logits(policy, inputs, before, query_responses[:, -response_length:], statistics)


def response_logprobs(
    policy: nn.Module,
    query_responses: Tensor,
    attention_mask: Tensor,
    response_length: int,
    temperature: float,
    formula: LogprobFormula = token_logprobs,
) -> Tensor:
    """Log-probability of each response token, [B, T] nats."""
    statistics = LogitStatistics(temperature=temperature, formula=formula)
    return response_statistics(
        policy, query_responses, attention_mask, response_length, statistics
    )[0]


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
        return logprobs, entropies if statistics.entropy == LEARNED else entropies.detach()
    logits = policy(**inputs, logits_to_keep=columns, use_cache=False).logits
    logprobs = statistics.formula(logits, targets, statistics.temperature)
    if not statistics.entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.set_grad_enabled(statistics.entropy == LEARNED and torch.is_grad_enabled()):
        return logprobs, entropy(logits / statistics.temperature)


def head_scalars(reward_model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The reward model's scalar at every token of a forward pass, [B, L], at least float32."""
    scalars = reward_model(**inputs, use_cache=False).logits.squeeze(-1)
    return scalars.to(torch.promote_types(scalars.dtype, torch.float32))


def token_scalars(reward_model: nn.Module, tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """The same for padded rows: [B, L] -> [B, L]. Only in `score_columns` is it a score."""
    return head_scalars(reward_model, model_inputs(tokens, attention_mask))


def response_values(
    critic: nn.Module, query_responses: Tensor, attention_mask: Tensor, response_length: int
) -> Tensor:
    """The critic at the positions that predict each response token: [B, Q+T] -> [B, T]."""
    scalars = token_scalars(critic, query_responses, attention_mask)
    return scalars[:, -response_length - 1 : -1]


def score_columns(reward_model: nn.Module, tokens: Tensor, last: Tensor, before: Tensor) -> Tensor:
    """The column of each row in which its score is read.

    It is the response's last token, which is its EOS if it has one. From a model that is read
    before EOS (`rm.read_at`) it is the token before an EOS.
    Shapes: tokens [B, L]; last, the column of a response's last token, and before, that of the
    token before it, [B] -> [B].
    Source: Huang et al. 2024, detail 12, reads at EOS.
    """
    eos_id = token_read_before(reward_model)
    if eos_id is None:
        return last
    return torch.where(tokens.gather(1, last.unsqueeze(1)).squeeze(1) == eos_id, before, last)


def score_responses(
    reward_model: nn.Module, queries: Tensor, responses: Tensor, pad_id: int
) -> Tensor:
    """The score of each response, read in its `score_columns`.

    Shapes: queries [B, Q] left-padded, responses [B, T] right-padded -> [B], reward units.
    """
    query_responses = torch.cat([queries, responses], dim=1)
    scalars = token_scalars(reward_model, query_responses, query_responses != pad_id)
    last = queries.shape[1] + first_true_index(responses == pad_id) - 1
    columns = score_columns(reward_model, query_responses, last, last - 1)
    return scalars.gather(1, columns.unsqueeze(1)).squeeze(1)
