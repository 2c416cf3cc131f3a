"""The SFT loss: likelihood of reference summaries (Huang et al. 2024, detail 9).

It is a sum over tokens, so any microbatches add up to the mean over a global batch. PPO's
pretraining mix uses it too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.learning.passes import response_logprobs
from stages.posts.ragged import TokenizedSplit, pad_left, pad_right

NO_TOKEN = -1


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
    targets = pad_right(learned, NO_TOKEN).to(device)
    tokens = torch.cat([pad_left(prefixes, NO_TOKEN).to(device), targets], dim=1)
    logprobs = response_logprobs(
        policy, tokens.clamp(min=0), tokens != NO_TOKEN, targets.shape[1], temperature=1.0
    )
    return -torch.where(targets != NO_TOKEN, logprobs, 0.0).sum()
