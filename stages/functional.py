"""Every formula of the pipeline: masks, log-probabilities, KL, rewards, whitening, GAE, losses.

Tensors and floats in, tensors out; no config, tokenizer, model, device or randomness, and no
argument is changed. A mask is True where a position counts. Detail numbers are those of Huang et
al. 2024. Letters: B sequences, T response tokens, L any length, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WHITEN_EPS = 1e-8


def first_true_index(x: Tensor) -> Tensor:
    """Index of the first True along the last axis.

    Shapes: x [.., L] bool -> [..] int64; L where no element is True.
    Source: Huang et al. 2024, detail 12 (the search for the first padding token).
    """
    length = x.shape[-1]
    positions = torch.arange(length, device=x.device).expand_as(x)
    return torch.where(x, positions, length).amin(dim=-1)


def truncate_after(responses: Tensor, stop_id: int, pad_id: int) -> Tensor:
    """Responses cut after their first stop token, which is kept; what follows becomes padding.

    Shapes: responses [B, T] -> [B, T]. Source: Huang et al. 2024, detail 23 (EOS trick).
    """
    stop_index = first_true_index(responses == stop_id).unsqueeze(-1)
    positions = torch.arange(responses.shape[1], device=responses.device)
    return responses.masked_fill(positions > stop_index, pad_id)


def response_masks(postprocessed_responses: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Which response tokens count, and which values count.

    response_mask[t] = t <= last and value_mask[t] = t <= last + 1; `last`: index of the last real
    token. `values[last + 1]` is the critic at EOS, where the reward model reads its score.

    Shapes: postprocessed_responses [B, T] -> response_mask, value_mask [B, T] bool.
    Source: the code of Huang et al. 2024 (inverted: padding_mask and padding_mask_p1).
    """
    length = first_true_index(postprocessed_responses == pad_id).unsqueeze(-1)
    positions = torch.arange(postprocessed_responses.shape[1], device=length.device)
    return positions < length, positions <= length


def penalize_missing_eos(
    scores: Tensor, postprocessed_responses: Tensor, eos_id: int, penalty: float
) -> Tensor:
    """Scores with `penalty` in place of the score of every response without EOS.

    Shapes: scores [B], postprocessed_responses [B, T] -> [B]. penalty: in reward units.
    Source: Huang et al. 2024, detail 23 (EOS trick, penalty -1).
    """
    contains_eos = (postprocessed_responses == eos_id).any(dim=-1)
    return torch.where(contains_eos, scores, torch.full_like(scores, penalty))


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token under softmax(logits / temperature), in float32 or wider.

    Shapes: logits [B, T, V], tokens [B, T] -> [B, T], nats. Raises ValueError if temperature <= 0.
    Source: the code of Huang et al. 2024 (the sampling temperature divides all logits).
    differs: Huang et al. 2024 divides by temperature + 1e-7 and computes in bfloat16.
    """
    _require_positive("temperature", temperature)
    scaled = _at_least_float32(logits) / temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(dim=-1)


def paper_token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """`token_logprobs` as the paper's code computes it: in bf16, with temperature + 1e-7.

    log_softmax(logits / (temperature + 1e-7)) at each token, to about three digits.

    Shapes: logits [B, T, V], tokens [B, T] -> [B, T] float32, nats.
    Raises ValueError if temperature <= 0. Source: the code of Huang et al. 2024, run in bf16.
    """
    _require_positive("temperature", temperature)
    scaled = logits.to(torch.bfloat16) / (temperature + 1e-7)
    logprobs = torch.log_softmax(scaled, dim=-1, dtype=torch.bfloat16)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) at each position: logsumexp(x) - sum(softmax(x) * x).

    Shapes: logits [B, T, V] -> [B, T], nats.
    Source: the code of Huang et al. 2024 (logged, never a bonus).
    """
    wide = _at_least_float32(logits)
    return wide.logsumexp(dim=-1) - (wide.softmax(dim=-1) * wide).sum(dim=-1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy, ref_policy) from samples of the policy.

    With d = logprobs - ref_logprobs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d.

    Shapes: logprobs, ref_logprobs [B, T] -> [B, T], nats. Raises ValueError for another kind.
    Source: Huang et al. 2024 (k1); Schulman, "Approximating KL divergence" (k2, k3).
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"kl_estimate: kind is k1, k2 or k3, not {kind!r}")


def shape_rewards(
    kl: Tensor, scores: Tensor, response_mask: Tensor, kl_coef: float, score_at: str = "after_eos"
) -> Tensor:
    """Per-token rewards: -kl_coef * kl at every real token, plus the score once.

    The score stands at the position after the last real token (`after_eos`; at the last one where
    the response fills all T positions), as in Huang et al. 2024, or at the last real token (`eos`).

    Shapes: kl [B, T] nats, scores [B], response_mask [B, T] bool -> [B, T], 0 at other positions.
    Raises ValueError for another score_at.
    Source: the code of Huang et al. 2024; Stiennon et al. 2020, section 3.4.
    """
    if score_at not in ("after_eos", "eos"):
        raise ValueError(f"shape_rewards: score_at is after_eos or eos, not {score_at!r}")
    score_index = response_mask.sum(dim=-1) - (1 if score_at == "eos" else 0)
    score_index = score_index.clamp(0, kl.shape[1] - 1).unsqueeze(-1)
    penalties = torch.where(response_mask, -kl_coef * kl, torch.zeros_like(kl))
    return penalties.scatter_add(1, score_index, scores.unsqueeze(-1).to(kl.dtype))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over the positions that count, whatever stands at the others.

    Shapes: x, mask [..] -> []. Raises ValueError where no position counts.
    """
    if not bool(mask.any()):
        raise ValueError("masked_mean: the mask leaves no position to average over")
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum()


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights * x over the positions with a weight, whatever stands at the others.

    Shapes: x, weights [..] -> []. weights at least 0.
    """
    return (torch.where(weights > 0, x, torch.zeros_like(x)) * weights).sum()


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """x scaled to unit variance over the positions that count, and to mean 0 if shift_mean.

    (x - mean) / sqrt(variance + 1e-8), with the biased variance; 0 where x does not count.

    Shapes: x [..], mask [..] bool -> [..]. Raises ValueError where no position counts.
    Source: Huang et al. 2024, details 24 (rewards, without shift) and 25 (advantages).
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask)
    whitened = (x - mean) * torch.rsqrt(variance + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, torch.zeros_like(x))


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns that the critic learns; not whitened.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  R_t = A_t + V_t,
    with V = A = 0 after the last position; gamma, lam in [0, 1].

    Shapes: rewards, values [B, T] (0 where they do not count) -> advantages, returns [B, T].
    Source: the code of Huang et al. 2024 (gamma 1, lambda 0.95); Stiennon et al. 2020, 3.4.
    """
    next_values = F.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values
    reversed_advantages = []
    running = torch.zeros_like(deltas[:, 0])
    for delta in deltas.flip(1).unbind(1):
        running = delta + gamma * lam * running
        reversed_advantages.append(running)
    advantages = torch.stack(reversed_advantages, dim=1).flip(1)
    return advantages, advantages + values


def minus_mean_return(rewards: Tensor, gamma: float) -> Tensor:
    """Advantages without a critic: each token's return minus the mean return of whole episodes.

    G_t - mean of G_0, with G_t = r_t + gamma * G_{t+1}: score and KL from this token on. Whitening
    with a shifted mean takes the constant out again. Mask it: after an episode it is not 0.

    Shapes: rewards [B, T] of all episodes, 0 where they do not count -> [B, T].
    Source: Williams 1992; one side of the gate in Pan et al. 2026 (arXiv 2604.19485).
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), gamma, 1.0)
    return returns - returns[:, 0].mean()


def minus_group_mean(rewards: Tensor, group_size: int) -> Tensor:
    """Dr.GRPO's advantages: each reward minus its group's mean, not divided by a deviation.

    Shapes: rewards [B], whole episodes, the group_size > 1 of one query are neighbours -> [B].
    Raises ValueError for small or partial groups. Source: Liu et al. 2025 (arXiv 2503.20783), 3.2.
    """
    if group_size < 2:
        raise ValueError(f"a group has at least 2 episodes, not {group_size}")
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} episodes are no full groups of {group_size}")
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """RLOO's advantages: each reward minus the mean of its group's others.

    For groups of K: K / (K - 1) times `minus_group_mean`. Raises ValueError as `minus_group_mean`.

    Shapes: rewards [B] -> [B]. Source: Ahmadian et al. 2024, section 3.2.
    """
    return minus_group_mean(rewards, group_size) * group_size / (group_size - 1)


def policy_losses(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient loss of every token, and where the clipped term is the larger.

    max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c)), with ratio = exp(new_logprobs - logprobs).

    Shapes: all [B, T]; -> losses, clipped [B, T], 0 where the mask does not count. cliprange > 0.
    Source: Schulman et al. 2017, equation 7 (cliprange 0.2 in Huang et al. 2024).
    """
    # Mask before exp: if a NaN were masked only after it, its gradient would still be NaN.
    difference = torch.where(response_mask, new_logprobs - logprobs, torch.zeros_like(logprobs))
    ratio = difference.exp()
    advantages = torch.where(response_mask, advantages, torch.zeros_like(advantages))
    losses = -advantages * ratio
    clipped_losses = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(losses, clipped_losses), (clipped_losses > losses).to(losses.dtype)


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
) -> tuple[Tensor, Tensor]:
    """Mean of `policy_losses` over real tokens, and the clipped share (stages: `loss_weights`).

    Shapes: all [B, T]; -> loss [], clipfrac []. cliprange > 0.
    Raises ValueError where no position counts. Source: as `policy_losses`.
    """
    losses, clipped = policy_losses(new_logprobs, logprobs, advantages, response_mask, cliprange)
    return masked_mean(losses, response_mask), masked_mean(clipped, response_mask)


def value_losses(
    new_values: Tensor, values: Tensor, returns: Tensor, value_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Clipped loss of the critic at every position, and where the clipped term is the larger.

    0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); an infinite c clips nothing.

    Shapes: all [B, T]; -> losses, clipped [B, T], 0 where the mask does not count. c > 0.
    Source: the code of Huang et al. 2024 (range 0.2; its weight of 0.1 is not here).
    """
    new_values, values, returns = (
        torch.where(value_mask, x, torch.zeros_like(x)) for x in (new_values, values, returns)
    )
    clipped_values = values + (new_values - values).clamp(-cliprange_value, cliprange_value)
    losses = (new_values - returns).square()
    clipped_losses = (clipped_values - returns).square()
    # V_old + (V - V_old) rounds: a difference within the range is no clipping.
    clipped = ((new_values - values).abs() > cliprange_value) & (clipped_losses > losses)
    return 0.5 * torch.maximum(losses, clipped_losses), clipped.to(losses.dtype)


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, value_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Mean of `value_losses` where the mask counts, and the share of positions that is clipped.

    Shapes: all [B, T]; -> loss [], clipfrac []. cliprange_value > 0, reward units.
    Raises ValueError where no position counts. Source: as `value_losses`.
    """
    losses, clipped = value_losses(new_values, values, returns, value_mask, cliprange_value)
    return masked_mean(losses, value_mask), masked_mean(clipped, value_mask)


def loss_weights(mask: Tensor, mean: str) -> Tensor:
    """Weight of each token's loss; the caller divides the weighted sum by `count_divisors`.

    `tokens` and `episodes`: 1; `sequences`: 1 / its sequence's tokens; `microbatches`: 1 / all
    tokens of this tensor. The divisor is the number of what `mean` names, over the minibatch.

    Shapes: mask [B, T] bool -> [B, T] float32, 0 where the mask does not count.
    Raises ValueError for another mean. Source: the code of Huang et al. 2024 (`microbatches`).
    """
    counted = mask.float()
    if mean in ("tokens", "episodes"):
        return counted
    if mean == "sequences":
        return counted / counted.sum(dim=-1, keepdim=True).clamp(min=1)
    if mean == "microbatches":
        return counted / counted.sum().clamp(min=1)
    raise ValueError(f"loss_weights: no mean is called {mean!r}")


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 - Var(R - V) / Var(R).

    1 is a perfect critic, 0 one that says a constant. The variance is the biased one.

    Shapes: values, returns [..], mask [..] bool -> []. Raises ValueError where no position counts.
    Source: a diagnostic of our own, not in Huang et al. 2024.
    """

    def variance(x: Tensor) -> Tensor:
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    return 1 - variance(returns - values) / (variance(returns) + WHITEN_EPS)


def preference_loss(chosen_scores: Tensor, rejected_scores: Tensor, center: float = 0.0) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected) + center * (chosen + rejected)^2, nats.

    Shapes: chosen_scores, rejected_scores [B] -> []. Source: Huang et al. 2024, detail 10 (center
    0); Eisenstein et al. 2023, arXiv 2312.09244 (the second term, which sets a pair's mean to 0).
    """
    losses = -F.logsigmoid(chosen_scores - rejected_scores)
    return (losses + center * (chosen_scores + rejected_scores).square()).mean()


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each whole sequence: the sum over its tokens that count.

    Shapes: logprobs [B, T], mask [B, T] bool -> [B], nats.
    Source: the DPO of Huang et al. 2024 (a sum over the completion with its EOS, not a mean).
    """
    return torch.where(mask, logprobs, torch.zeros_like(logprobs)).sum(dim=-1)


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """Rewards that DPO implies, up to a constant of the query: beta * (logprobs - ref_logprobs).

    Shapes: logprobs, ref_logprobs [B] nats, of whole responses -> [B]. beta > 0.
    Raises ValueError for a beta that is not positive. Source: Rafailov et al. 2023 section 4.
    """
    _require_positive("beta", beta)
    return beta * (logprobs - ref_logprobs)


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of the policy as its own reward model, and its implicit rewards, chosen and rejected.

    mean of -log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).

    Shapes: all [B], nats, of whole responses; -> loss [] nats, chosen and rejected rewards [B].
    Source: Rafailov et al. 2023 equation 7; Huang et al. 2024, B.4 (beta 0.05, no label smoothing).
    """
    chosen_rewards = implicit_rewards(chosen_logprobs, ref_chosen_logprobs, beta)
    rejected_rewards = implicit_rewards(rejected_logprobs, ref_rejected_logprobs, beta)
    return preference_loss(chosen_rewards, rejected_rewards), chosen_rewards, rejected_rewards


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be above 0, not {value}")
