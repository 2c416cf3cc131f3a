"""Exact KL gradients of a softmax policy that is small enough to enumerate.

The vocabulary has three tokens. A policy is a table of logits with one row for each prefix, so it
is autoregressive: a token's distribution depends on all tokens before it. Every expectation is a
sum over all sequences, in float64, so a difference from the true gradient is bias and never noise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

VOCABULARY = 3


def all_sequences(length: int) -> Tensor:
    """Every sequence of this many tokens, [N, T] with N = 3 ** T."""
    tokens = torch.arange(VOCABULARY)
    return torch.cartesian_prod(*[tokens] * length).view(-1, length)


def prefix_rows(sequences: Tensor) -> Tensor:
    """The row of the logit table that each token is drawn from, [N, T].

    Rows are ordered by the length of the prefix, then by the prefix read as a number in base 3.
    """
    rows = torch.zeros_like(sequences)
    for position in range(1, sequences.shape[1]):
        rows[:, position] = VOCABULARY * rows[:, position - 1] + sequences[:, position - 1] + 1
    return rows


def random_logits(length: int, seed: int, scale: float = 1.0) -> Tensor:
    """A table of normal logits, [prefixes, 3], for sequences of this length."""
    prefixes = sum(VOCABULARY**position for position in range(length))
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(prefixes, VOCABULARY, generator=generator, dtype=torch.float64)


def sequence_token_logprobs(logits: Tensor, length: int) -> Tensor:
    """Log-probability of each token of each sequence, [N, T]."""
    sequences = all_sequences(length)
    by_prefix = logits.log_softmax(dim=-1)[prefix_rows(sequences)]  # [N, T, 3]
    return by_prefix.gather(-1, sequences.unsqueeze(-1)).squeeze(-1)


def exact_kl(first: Tensor, second: Tensor, length: int) -> Tensor:
    """KL(first || second) of whole sequences, in nats, from two tables of logits."""
    first_logprobs = sequence_token_logprobs(first, length).sum(dim=1)
    second_logprobs = sequence_token_logprobs(second, length).sum(dim=1)
    return (first_logprobs.exp() * (first_logprobs - second_logprobs)).sum()


def gradient_of(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """The gradient of a scalar function of a logit table."""
    variable = logits.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(variable), variable)
    return gradient


def expected_gradient(
    loss: Callable[[Tensor], Tensor], policy: Tensor, old: Tensor, length: int
) -> Tensor:
    """The expected gradient of a loss of sampled sequences, E_{x ~ old}[d loss(x) / d logits].

    `loss` maps the policy's log-probabilities [N, T] to one loss per sequence, [N].
    """
    probabilities = sequence_token_logprobs(old, length).sum(dim=1).exp().detach()  # [N]

    def mean_loss(logits: Tensor) -> Tensor:
        return (probabilities * loss(sequence_token_logprobs(logits, length))).sum()

    return gradient_of(mean_loss, policy)


def policy_at_kl(policy: Tensor, direction: Tensor, kl: float, length: int) -> Tensor:
    """Logits policy + scale * direction with KL(policy || result) = kl, found by bisection."""
    if kl == 0.0:
        return policy
    low = 0.0
    high = 100.0
    for _ in range(200):
        middle = (low + high) / 2
        if exact_kl(policy, policy + middle * direction, length) < kl:
            low = middle
        else:
            high = middle
    return policy + low * direction


def relative_error(gradient: Tensor, true_gradient: Tensor) -> float:
    """|gradient - true| / |true|."""
    return ((gradient - true_gradient).norm() / true_gradient.norm()).item()


def cosine(gradient: Tensor, true_gradient: Tensor) -> float:
    """The cosine of the angle between two gradients; 0 if the first one is zero."""
    norms = gradient.norm() * true_gradient.norm()
    if norms < 1e-15:
        return 0.0
    return ((gradient * true_gradient).sum() / norms).item()
