"""The losses of an update: policy loss, value loss, and the terms that settings add to them.

A minibatch is processed in microbatches. Each contributes a sum, divided by a count over the whole
minibatch on all devices, so that the parts add up to the minibatch's mean.
`loss_mean` chooses between means of tokens, sequences, episodes and microbatches (`loss_weights` in
`stages/functional.py`). The gradients of all devices are summed: DDP averages them, and
`optimizer_step` undoes that.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.config.ppo import PolicyGradient, Ppo
from stages.rl.episodes import Rollout
from stages.training.memory import chunks
from stages.training.processes import global_sum
from stages.training.step import Learner


@dataclass(frozen=True, kw_only=True)
class Divisors:
    """What a minibatch's sums are divided by, over all devices."""

    policy: float
    """For the policy loss: the number of tokens, episodes, ..., whichever `loss_mean` names."""
    value: float
    """For the value loss: the same, where a token is a position at which a value counts."""
    tokens: float
    """Real tokens, for the means that are reported."""
    positions: float
    """Positions at which a value counts."""


def count_divisors(
    accelerator: Accelerator, minibatch: Rollout, settings: PolicyGradient, microbatches: int
) -> Divisors:
    """The divisors for a minibatch that this process splits into `microbatches` parts."""
    policy_total: float | Tensor
    value_total: float | Tensor
    if settings.loss_mean == "microbatches":
        policy_total = value_total = microbatches
    elif settings.loss_mean == "episodes":
        policy_total = value_total = len(minibatch.queries)
    else:
        policy_total = functional.loss_weights(minibatch.response_mask, settings.loss_mean).sum()
        value_total = functional.loss_weights(minibatch.value_mask, settings.loss_mean).sum()
    policy, value, tokens, positions = global_sum(
        accelerator,
        policy_total,
        value_total,
        minibatch.response_mask.sum(),
        minibatch.value_mask.sum(),
    )
    return Divisors(policy=policy, value=value, tokens=tokens, positions=positions)


def split_minibatch(minibatch: Rollout, settings: PolicyGradient, size: int) -> list[Rollout]:
    """Microbatches of at most `size` episodes, without columns of padding only.

    The samples of a query stay in one microbatch, even if they are more than `size`. Queries of
    similar length share a microbatch, so that little of a pass is padding; with
    loss_mean=microbatches their order stays random, as in Huang et al. 2024.
    """
    query_lengths = (minibatch.queries != minibatch.pad_id).sum(dim=1).tolist()
    response_lengths = minibatch.response_mask.sum(dim=1).tolist()
    # With the score after EOS, one more value counts than there are tokens.
    value_lengths = minibatch.value_mask.sum(dim=1).tolist()

    def longest_text(rows: range) -> int:
        return query_lengths[rows[0]] + max(response_lengths[row] for row in rows)

    samples = minibatch.samples_per_query
    rows_by_query = [
        range(start, start + samples) for start in range(0, len(query_lengths), samples)
    ]
    if settings.loss_mean != "microbatches":
        rows_by_query.sort(key=longest_text)

    microbatches = []
    for queries in chunks(rows_by_query, max(1, size // samples)):
        rows = [row for rows_of_query in queries for row in rows_of_query]
        microbatch = minibatch.rows(torch.tensor(rows, device=minibatch.queries.device))
        microbatches.append(
            microbatch.trimmed(
                query_length=max(query_lengths[row] for row in rows),
                response_length=max(value_lengths[row] for row in rows),
            )
        )
    return microbatches


def microbatch_losses(
    learner: Learner,
    part: Rollout,
    divisors: Divisors,
    settings: PolicyGradient,
    kl_coef: float,
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The policy's part of the minibatch's loss, then the critic's if there are returns, each with
    its statistics.

    `kl_coef` is the coefficient of this update, in reward units per nat.

    The two share no parameter. Call backward on the first loss before requesting the second: then
    only one network's activations are in memory.
    """
    # During critic warm-up the policy is not run: it gets no gradient, so the optimizer skips it.
    if settings.policy_learns(learner.update):
        new_logprobs, entropies = learner.trained(
            "policy",
            part,
            temperature=settings.temperature,
            logprob_dtype=settings.logprob_dtype,
            with_entropy=True,
            entropy_requires_grad=settings.entropy_coef > 0,
        )
        yield policy_loss(new_logprobs, entropies, part, divisors, settings, kl_coef)

    if part.returns is not None and isinstance(settings, Ppo):
        outputs = learner.trained("critic", part)
        yield value_loss(part.values_of(outputs), part, divisors, settings)


def policy_loss(
    new_logprobs: Tensor,
    entropies: Tensor,
    part: Rollout,
    divisors: Divisors,
    settings: PolicyGradient,
    kl_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss; with the KL penalty and the entropy bonus if settings ask for them.

    policy loss + kl_coef * KL (with kl_in=loss) - entropy_coef * entropy, each this microbatch's
    part of a mean over the minibatch (Schulman et al. 2017, equation 9, negated and without the
    value loss; it has no KL term).

    Shapes: new_logprobs and entropies of this step's pass, both [B, T] nats.
    """
    mask = part.response_mask
    losses, clipped = functional.policy_losses(
        new_logprobs,
        part.logprobs,
        part.advantages,
        mask,
        settings.cliprange or math.inf,  # 0: no clipping
    )
    weights = functional.loss_weights(mask, settings.loss_mean)
    clipped_loss = functional.weighted_sum(losses, weights) / divisors.policy

    loss = clipped_loss
    if settings.kl_in == "loss":
        kl = functional.kl_penalty(
            new_logprobs,
            part.logprobs,
            part.ref_logprobs,
            mask,
            kind=settings.kl_estimator,
            correction=settings.kl_correction,
        )
        loss = loss + kl_coef * functional.weighted_sum(kl, weights) / divisors.policy
    if settings.entropy_coef:
        bonus = functional.weighted_sum(entropies, weights) / divisors.policy
        loss = loss - settings.entropy_coef * bonus

    with torch.no_grad():
        log_ratio = torch.where(mask, new_logprobs - part.logprobs, 0.0)
        statistics_by_token = {
            "policy/clipfrac_avg": clipped,
            "policy/approxkl_avg": log_ratio.square() / 2,
            "policy/entropy_avg": entropies,
            "val/ratio": log_ratio.exp(),
        }
        stats = {"loss/policy_avg": clipped_loss.detach()}
        for key, x in statistics_by_token.items():
            stats[key] = functional.weighted_sum(x, mask.float()) / divisors.tokens
    return loss, stats


def value_loss(
    new_values: Tensor, part: Rollout, divisors: Divisors, ppo: Ppo
) -> tuple[Tensor, dict[str, Tensor]]:
    """vf_coef times the clipped value loss, and statistics, whose loss is without vf_coef.

    Shapes: new_values [B, T], this step's.
    Raises ValueError if the rollout has no critic's values.
    """
    if part.values is None or part.returns is None:
        raise ValueError("a value loss needs values and returns, and this rollout has none")
    mask = part.value_mask
    losses, clipped = functional.value_losses(
        new_values,
        part.values,
        part.returns,
        mask,
        ppo.cliprange_value if ppo.clip_values else math.inf,
    )
    weights = functional.loss_weights(mask, ppo.loss_mean)
    loss = functional.weighted_sum(losses, weights) / divisors.value
    stats = {
        "loss/value_avg": loss.detach(),
        "val/clipfrac_avg": functional.weighted_sum(clipped, mask.float()) / divisors.positions,
    }
    return ppo.vf_coef * loss, stats
