"""What an update descends: policy loss, value loss and what the settings add to them.

A minibatch is learned in microbatches. Each gives its part of the minibatch's loss, weighted by the
tokens it holds, so that the parts add up to a mean over the minibatch on all devices.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.models.logprobs import LogitStatistics, logprob_formula
from stages.rl.episodes import Rollout
from stages.settings.ppo import PolicyGradient, Ppo
from stages.training.memory import chunks
from stages.training.processes import global_sum
from stages.training.step import Learner


@dataclass(frozen=True, kw_only=True)
class Divisors:
    """What a minibatch's sums are divided by, over all devices."""

    policy: float
    """Sum of the policy loss's weights."""
    value: float
    """Sum of the value loss's weights."""
    tokens: float
    """Real tokens, for the means that are reported."""
    positions: float
    """Positions at which a value counts."""


def count_divisors(
    accelerator: Accelerator, minibatch: Rollout, settings: PolicyGradient, microbatches: int
) -> Divisors:
    """The divisors for a minibatch that this process learns in so many microbatches."""
    masks = minibatch.response_mask, minibatch.value_mask
    if settings.loss_mean == "microbatches":
        weights: list[float | Tensor] = [microbatches, microbatches]
    elif settings.loss_mean == "episodes":
        weights = [len(minibatch.queries), len(minibatch.queries)]
    else:
        weights = [functional.loss_weights(mask, settings.loss_mean).sum() for mask in masks]
    counts = [mask.sum() for mask in masks]
    policy, value, tokens, positions = global_sum(accelerator, *weights, *counts)
    return Divisors(policy=policy, value=value, tokens=tokens, positions=positions)


def split_minibatch(
    minibatch: Rollout, settings: PolicyGradient, pad_id: int, size: int
) -> list[tuple[list[int], tuple[int, int]]]:
    """Rows of each microbatch, and its longest query and response: no more columns count.

    Neighbours in length, so that little of a pass is padding; the samples of a query together. If
    each microbatch's mean counts alike, the order stays random, as in Huang et al. 2024.
    """
    queries = (minibatch.queries != pad_id).sum(dim=1).tolist()
    responses = minibatch.response_mask.sum(dim=1).tolist()
    positions = minibatch.value_mask.sum(dim=1).tolist()
    groups = chunks(range(len(queries)), settings.samples_per_query)
    if settings.loss_mean != "microbatches":
        groups.sort(key=lambda rows: queries[rows[0]] + max(responses[row] for row in rows))
    parts = [
        [row for rows in part for row in rows]
        for part in chunks(groups, max(1, size // settings.samples_per_query))
    ]
    return [
        (part, (max(queries[row] for row in part), max(positions[row] for row in part)))
        for part in parts
    ]


def microbatch_losses(
    learner: Learner, part: Rollout, divisors: Divisors, settings: PolicyGradient, pad_id: int
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The policy's part of the minibatch's loss, then a critic's if it has returns to learn, each
    with its statistics. In an update in which the critic alone learns, the policy is not run: it
    gets no gradient, so the optimizer passes it by.

    The two share no parameter. Call backward on the first loss before requesting the second: then
    only one network's activations are in memory.
    """
    query_responses = torch.cat([part.queries, part.responses], dim=1)
    row = query_responses, query_responses != pad_id, part.responses.shape[1]
    group = settings.samples_per_query
    if settings.policy_learns(learner.update):
        statistics = LogitStatistics(
            temperature=settings.temperature,
            formula=logprob_formula(settings.logprob_dtype),
            entropy=True,
        )
        new_logprobs, entropies = learner.trained("policy", *row, statistics, group)
        yield policy_loss((new_logprobs, entropies), part, divisors, settings)
    if part.returns is not None and isinstance(settings, Ppo):
        yield value_loss(learner.trained("critic", *row, group), part, divisors, settings)


def policy_loss(
    new: tuple[Tensor, Tensor], part: Rollout, divisors: Divisors, settings: PolicyGradient
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss, and the KL penalty if the settings put it into the loss.

    `new`: log-probabilities and entropies of this step's pass, both [B, T] nats.
    """
    (new_logprobs, entropies), mask = new, part.response_mask
    losses, clipped = functional.policy_losses(
        new_logprobs, part.logprobs, part.advantages, mask, settings.cliprange or math.inf
    )
    weights = functional.loss_weights(mask, settings.loss_mean)
    clipped_loss = functional.weighted_sum(losses, weights) / divisors.policy
    loss = clipped_loss
    if settings.kl_in == "loss":
        now, reference = (torch.where(mask, x, 0.0) for x in (new_logprobs, part.ref_logprobs))
        kl = functional.kl_estimate(now, reference, settings.kl_estimator)
        loss = loss + settings.kl_coef * functional.weighted_sum(kl, weights) / divisors.policy
    with torch.no_grad():
        log_ratio = torch.where(mask, new_logprobs - part.logprobs, 0.0)
        by_token = {
            "policy/clipfrac_avg": clipped,
            "policy/approxkl_avg": log_ratio.square() / 2,
            "policy/entropy_avg": entropies,
            "val/ratio": log_ratio.exp(),
        }
        stats = {"loss/policy_avg": clipped_loss.detach()}
        for key, x in by_token.items():
            stats[key] = functional.weighted_sum(x, mask.float()) / divisors.tokens
    return loss, stats


def value_loss(
    new_values: Tensor, part: Rollout, divisors: Divisors, ppo: Ppo
) -> tuple[Tensor, dict[str, Tensor]]:
    """vf_coef times the clipped value loss of this step's values, [B, T].

    Raises ValueError if the rollout has no critic's values.
    """
    mask = part.value_mask
    if part.values is None or part.returns is None:
        raise ValueError("a value loss needs values and returns, and this rollout has none")
    clip = ppo.cliprange_value if ppo.clip_values else math.inf
    losses, clipped = functional.value_losses(new_values, part.values, part.returns, mask, clip)
    weights = functional.loss_weights(mask, ppo.loss_mean)
    loss = functional.weighted_sum(losses, weights) / divisors.value
    share = functional.weighted_sum(clipped, mask.float()) / divisors.positions
    return ppo.vf_coef * loss, {"loss/value_avg": loss.detach(), "val/clipfrac_avg": share}
