"""What PPO's update descends: policy loss, value loss and what the settings add to them.

A minibatch is learned in microbatches. Each gives its part of the minibatch's loss, weighted by the
tokens it holds, so that the parts add up to a mean over the minibatch on all devices.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.learning.batches import batch_rows, chunks, global_sum, local_share
from stages.learning.likelihood import counted_tokens, sequence_length, summed_loss
from stages.learning.state import State
from stages.learning.vocabulary import LEARNED, MEASURED, LogprobFormula, Reading
from stages.posts.ragged import TokenizedSplit
from stages.rl.episodes import Rollout
from stages.settings.ppo import Ppo


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a minibatch's sums are divided by, over all devices."""

    policy: float
    """Sum of the policy loss's weights."""
    value: float
    """Sum of the value loss's weights."""
    tokens: float
    """Real tokens, for the means that are reported."""
    positions: float
    """Positions at which a value counts."""


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Reference summaries that are learned beside the episodes (InstructGPT's PPO-ptx)."""

    split: TokenizedSplit
    loss_on_query: bool
    batch_size: int
    """Sequences per optimizer step, over all devices."""
    seed: int
    first_step: int
    """Optimizer steps before this update."""


def logprob_formula(ppo: Ppo) -> LogprobFormula:
    """How log-probabilities are computed under these settings."""
    if ppo.logprob_dtype == "bf16":
        return functional.paper_token_logprobs
    return functional.token_logprobs


def count_terms(accelerator: Accelerator, minibatch: Rollout, ppo: Ppo, microbatches: int) -> Terms:
    """The divisors for a minibatch that this process learns in so many microbatches."""
    masks = minibatch.response_mask, minibatch.value_mask
    if ppo.loss_mean == "microbatches":
        weights: list[float | Tensor] = [microbatches, microbatches]
    else:
        weights = [functional.loss_weights(mask, ppo.loss_mean).sum() for mask in masks]
    counts = [mask.sum() for mask in masks]
    policy, value, tokens, positions = global_sum(accelerator, *weights, *counts)
    return Terms(policy=policy, value=value, tokens=tokens, positions=positions)


def split_minibatch(
    minibatch: Rollout, ppo: Ppo, pad_id: int, size: int
) -> list[tuple[list[int], tuple[int, int]]]:
    """Rows of each microbatch, and its longest query and response: no more columns count.

    Neighbours in length, so that little of a pass is padding. If each microbatch's mean counts
    alike, the order stays random, as in Huang et al. 2024.
    """
    queries = (minibatch.queries != pad_id).sum(dim=1).tolist()
    responses = minibatch.response_mask.sum(dim=1).tolist()
    positions = minibatch.value_mask.sum(dim=1).tolist()
    rows = list(range(len(queries)))
    if ppo.loss_mean != "microbatches":
        rows.sort(key=lambda row: queries[row] + responses[row])
    return [
        (list(part), (max(queries[row] for row in part), max(positions[row] for row in part)))
        for part in chunks(rows, size)
    ]


def microbatch_losses(
    state: State, part: Rollout, pad_id: int, terms: Terms
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The policy's part of the minibatch's loss, then the critic's, each with its statistics.

    The two share no parameter. Whoever takes the first one's gradient before asking for the second
    holds the activations of one network at a time.
    """
    query_responses = torch.cat([part.queries, part.responses], dim=1)
    real = query_responses != pad_id
    row = query_responses.masked_fill(~real, 0), real, part.responses.shape[1]
    yield policy_loss(state, part, row, terms)
    yield value_loss(state, part, row, terms)


def policy_loss(
    state: State, part: Rollout, row: tuple[Tensor, Tensor, int], terms: Terms
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss, and KL and entropy if the settings put them into the loss.

    `row` is what `response_statistics` takes: tokens, attention mask, length of a response.
    """
    ppo, mask = state.run.config.ppo, part.response_mask
    how = Reading(
        temperature=ppo.temperature,
        formula=logprob_formula(ppo),
        entropy=LEARNED if ppo.entropy_coef else MEASURED,
    )
    new_logprobs, entropies = state.trained("policy", *row, how)
    losses, clipped = functional.policy_losses(
        new_logprobs, part.logprobs, part.advantages, mask, ppo.cliprange
    )
    weights = functional.loss_weights(mask, ppo.loss_mean)
    clipped_loss = functional.weighted_sum(losses, weights) / terms.policy
    loss = clipped_loss
    if ppo.kl_in == "loss":
        loss = loss + state.kl_coef * kl_loss(new_logprobs, part, ppo, weights) / terms.policy
    if ppo.entropy_coef:
        bonus = functional.weighted_sum(entropies, weights)
        loss = loss - ppo.entropy_coef * bonus / terms.policy
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
            stats[key] = functional.weighted_sum(x, mask.float()) / terms.tokens
    return loss, stats


def value_loss(
    state: State, part: Rollout, row: tuple[Tensor, Tensor, int], terms: Terms
) -> tuple[Tensor, dict[str, Tensor]]:
    """vf_coef times the clipped value loss; `row` as in `policy_loss`."""
    ppo, mask = state.run.config.ppo, part.value_mask
    new_values = state.trained("critic", *row)
    losses, clipped = functional.value_losses(
        new_values,
        part.values,
        part.returns,
        mask,
        ppo.cliprange_value if ppo.clip_values else math.inf,
    )
    weights = functional.loss_weights(mask, ppo.loss_mean)
    loss = functional.weighted_sum(losses, weights) / terms.value
    share = functional.weighted_sum(clipped, mask.float()) / terms.positions
    return ppo.vf_coef * loss, {"loss/value_avg": loss.detach(), "val/clipfrac_avg": share}


def kl_loss(new_logprobs: Tensor, part: Rollout, ppo: Ppo, weights: Tensor) -> Tensor:
    """Weighted sum of KL(policy, ref_policy) as a term of the loss, [] nats."""
    mask = part.response_mask
    now, reference = (torch.where(mask, x, 0.0) for x in (new_logprobs, part.ref_logprobs))
    return functional.weighted_sum(
        functional.kl_estimate(now, reference, ppo.kl_estimator), weights
    )


def pretraining_step(state: State, ptx: Pretraining, step: int) -> float:
    """Add the gradient of ptx_coef times the mean SFT loss; returns that loss, nats per token.

    Gradients do not travel between devices here, but with the step's last microbatch.
    """
    accelerator, config = state.accelerator, state.run.config
    policy = accelerator.unwrap_model(state.trained).policy
    index = ptx.first_step + step
    rows = batch_rows(len(ptx.split), ptx.batch_size, index, ptx.seed, "ptx")
    mine = local_share(rows, accelerator)
    mine.sort(key=lambda row: sequence_length(ptx.split, row))
    (count,) = global_sum(accelerator, counted_tokens(ptx.split, mine, ptx.loss_on_query))
    total = 0.0
    for part in chunks(mine, state.microbatch_size):
        with accelerator.no_sync(state.trained), accelerator.autocast():
            summed = summed_loss(policy, ptx.split, part, ptx.loss_on_query, accelerator.device)
            accelerator.backward(summed * config.ppo.ptx_coef * accelerator.num_processes / count)
        total += summed.item()
    (total,) = global_sum(accelerator, total)
    return total / count


def mean_statistics(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every statistic over some optimizer steps."""
    return {key: sum(stats[key] for stats in history) / len(history) for key in history[0]}
