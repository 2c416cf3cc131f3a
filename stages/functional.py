"""Every formula of the pipeline: masks, log-probabilities, KL, rewards, advantages, losses.

Functions take tensors and floats and return tensors. They know no config, tokenizer, model, device
or random generator, and they change no argument. A mask is True where a position counts. Detail
numbers are those of Huang et al. 2024.

Letters in shapes: B sequences, T response tokens, L any length, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WHITEN_EPS = 1e-8

# Log-ratios are clamped to this before exp. In float32 exp overflows at 88.7, and the gradient of
# an infinite ratio is NaN even where the clipped loss does not depend on it (0 * inf).
MAX_LOG_RATIO = 80.0


def first_true_index(x: Tensor) -> Tensor:
    """Index of the first True along the last axis.

    Shapes: x [.., L] bool -> [..] int64; L where no element is True.
    Source: Huang et al. 2024, detail 12 (the search for the first padding token).
    """
    length = x.shape[-1]
    positions = torch.arange(length, device=x.device).expand_as(x)
    return torch.where(x, positions, length).amin(dim=-1)


def truncate_after(responses: Tensor, stop_id: int, pad_id: int) -> Tensor:
    """Cut each response after its first stop token; what follows the stop token becomes padding.

    Shapes: responses [B, T] -> [B, T]. Source: Huang et al. 2024, detail 23 (EOS trick).
    """
    stop_index = first_true_index(responses == stop_id).unsqueeze(-1)
    positions = torch.arange(responses.shape[1], device=responses.device)
    return responses.masked_fill(positions > stop_index, pad_id)


def response_masks(postprocessed_responses: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """Masks of the response tokens that count, and of the values that count.

    With `last` the index of the last real token: response_mask[t] = t <= last, and
    value_mask[t] = t <= last + 1. `values[last + 1]` is the critic's value at the EOS token, where
    the reward model reads its score.

    Shapes: postprocessed_responses [B, T] -> response_mask, value_mask [B, T] bool.
    Source: the code of Huang et al. 2024 (inverted: padding_mask and padding_mask_p1).
    """
    length = first_true_index(postprocessed_responses == pad_id).unsqueeze(-1)
    positions = torch.arange(postprocessed_responses.shape[1], device=length.device)
    return positions < length, positions <= length


def penalize_missing_eos(
    scores: Tensor, postprocessed_responses: Tensor, eos_id: int, penalty: float
) -> Tensor:
    """Scores, with `penalty` replacing the score of every response without EOS.

    Shapes: scores [B], postprocessed_responses [B, T] -> [B]. penalty: in reward units.
    Source: Huang et al. 2024, detail 23 (EOS trick, penalty -1).
    """
    contains_eos = (postprocessed_responses == eos_id).any(dim=-1)
    return torch.where(contains_eos, scores, torch.full_like(scores, penalty))


def subtract_missing_eos(
    scores: Tensor, postprocessed_responses: Tensor, eos_id: int, penalty: float
) -> Tensor:
    """Scores, with `penalty` added to the score of every response without EOS.

    Shapes: scores [B], postprocessed_responses [B, T] -> [B]. penalty: in reward units, below 0.
    Source: TRL since September 2024; Huang et al. 2024 replaces the score instead.
    """
    contains_eos = (postprocessed_responses == eos_id).any(dim=-1)
    return torch.where(contains_eos, scores, scores + penalty)


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

    log_softmax(logits / (temperature + 1e-7)) at each token, accurate to about three digits.

    Shapes: logits [B, T, V], tokens [B, T] -> [B, T] float32, nats.
    Raises ValueError if temperature <= 0. Source: the code of Huang et al. 2024, run in bf16.
    """
    _require_positive("temperature", temperature)
    scaled = logits.to(torch.bfloat16) / (temperature + 1e-7)
    logprobs = torch.log_softmax(scaled, dim=-1, dtype=torch.bfloat16)
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()


def entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) at each position: logsumexp(x) - sum(softmax(x) * x).

    A token of probability 0 (a logit of -inf) adds nothing.

    Shapes: logits [B, T, V] -> [B, T], nats.
    Source: the code of Huang et al. 2024 (logged, never a bonus).
    """
    wide = _at_least_float32(logits)
    # 0 * -inf would be NaN, in the value and in the gradient.
    finite = wide.masked_fill(wide == -torch.inf, 0.0)
    return wide.logsumexp(dim=-1) - (wide.softmax(dim=-1) * finite).sum(dim=-1)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || ref_policy) from samples of the policy.

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
        return torch.expm1((-difference).clamp(max=MAX_LOG_RATIO)) + difference
    raise ValueError(f"kl_estimate: kind is k1, k2 or k3, not {kind!r}")


def kl_penalty(
    new_logprobs: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    kind: str,
    correction: str = "off",
) -> Tensor:
    """KL(policy || ref_policy) of each token as a term of the loss, estimated on older samples.

    The responses were sampled by the policy before the update (`logprobs`), but the loss is that of
    the policy now (`new_logprobs`). `correction` weights the estimate k accordingly:

    - off: k. The gradient is exact in one case only: k2, one token, a ratio of 1. k3 descends
      KL(ref_policy || policy) there. No token gets credit for the KL of the tokens after it.
    - token: ratio * k, with ratio = exp(new_logprobs - logprobs) of the same token. Exact for
      responses of one token, with k1 or k3, at any ratio.
    - sequence: the product of all the response's ratios times k. Exact for whole responses, with k1
      or k3, at any ratio; its variance grows with KL(policy now || policy before) and length.

    Gradients flow through the ratios. With k2 neither correction is exact, because the mean of k2
    is not the KL. `tests/rl/test_kl_gradient.py` shows each of these by enumeration.

    Shapes: all [B, T]; -> [B, T] nats, 0 where the mask does not count.
    Raises ValueError for another kind or correction.
    Source: TRL's use_bias_correction_kl and DeepSeek-V3.2, arXiv 2512.02556, equation 7 (`token`);
    importance sampling of whole responses (`sequence`).
    """
    zeros = torch.zeros_like(ref_logprobs)
    new_logprobs = torch.where(response_mask, new_logprobs, zeros)
    logprobs = torch.where(response_mask, logprobs, zeros)
    ref_logprobs = torch.where(response_mask, ref_logprobs, zeros)

    kl = kl_estimate(new_logprobs, ref_logprobs, kind)
    if correction == "off":
        return kl
    log_ratios = new_logprobs - logprobs
    if correction == "sequence":
        log_ratios = log_ratios.sum(dim=-1, keepdim=True)
    elif correction != "token":
        raise ValueError(f"kl_penalty: correction is off, token or sequence, not {correction!r}")
    return log_ratios.clamp(max=MAX_LOG_RATIO).exp() * kl


def preference_over_reference(scores: Tensor, reference_scores: Tensor) -> Tensor:
    """The reward model's probability that a response is preferred to its query's reference.

    sigmoid(score - reference score). Any constant in the reward model's scores cancels out.

    Shapes: scores, reference_scores [B], reward units -> [B] in [0, 1].
    Source: PAR, Fu et al. 2025 (arXiv 2502.18770).
    differs: PAR's reference is a response of the SFT model, or the mean of sigmoids over several.
    Here it is the human summary.
    """
    return torch.sigmoid(scores - reference_scores)


def adapt_kl_coef(kl_coef: float, kl: float, target: float, episodes: int, horizon: int) -> float:
    """The KL coefficient after one batch: larger where the KL is above its target, smaller below.

    kl_coef * (1 + clip(kl / target - 1, -0.2, 0.2) * episodes / horizon).

    kl, target > 0: nats per episode; episodes: of this batch; horizon > episodes / 5.
    Source: Ziegler et al. 2019, section 2.2 (off in the runs of Huang et al. 2024).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * episodes / horizon)


def shape_rewards(
    kl: Tensor, scores: Tensor, response_mask: Tensor, kl_coef: float, score_at: str = "after_eos"
) -> Tensor:
    """Per-token rewards: -kl_coef * kl at every real token, plus the score once.

    The score is added at the position after the last real token (`after_eos`, as in Huang et al.
    2024; at the last position where the response fills all T), or at the last real token (`eos`).

    Shapes: kl [B, T] nats, scores [B], response_mask [B, T] bool -> [B, T], 0 at other positions.
    Raises ValueError for another score_at.
    Source: the code of Huang et al. 2024; Stiennon et al. 2020, section 3.4.
    """
    if score_at not in ("after_eos", "eos"):
        raise ValueError(f"shape_rewards: score_at is after_eos or eos, not {score_at!r}")
    score_index = response_mask.sum(dim=-1)  # the position after the last real token
    if score_at == "eos":
        score_index = score_index - 1
    score_index = score_index.clamp(0, kl.shape[1] - 1).unsqueeze(-1)
    penalties = torch.where(response_mask, -kl_coef * kl, torch.zeros_like(kl))
    return penalties.scatter_add(1, score_index, scores.unsqueeze(-1).to(kl.dtype))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x over the positions that count; the others may hold anything, NaN included.

    Shapes: x, mask [..] -> []. Raises ValueError where no position counts.
    """
    if not bool(mask.any()):
        raise ValueError("masked_mean: the mask leaves no position to average over")
    return torch.where(mask, x, torch.zeros_like(x)).sum() / mask.sum()


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights * x over the positions of positive weight; the others may hold anything.

    Shapes: x, weights [..] -> []. weights at least 0.
    """
    return (torch.where(weights > 0, x, torch.zeros_like(x)) * weights).sum()


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale x to unit variance over the positions that count, and shift it to mean 0 if shift_mean.

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


def gae(
    rewards: Tensor, values: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates, and the returns that the critic learns; not whitened.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  R_t = A_t + V_t,
    with V = A = 0 after the last position; gamma, lam in [0, 1]. `lam` is one number, or one per
    episode, [B].

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


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Lambda of GAE for each episode, which rises with the length of its response.

    1 - 1 / (alpha * length), at least 0. The weights lambda^k of later steps then add up to
    alpha * length, so a reward reaches back over the same share of any response. At most
    1 / alpha tokens give lambda 0.

    Shapes: lengths [B], tokens -> [B] float32. alpha > 0. Raises ValueError for another alpha.
    Source: VAPO, Yue et al. 2025 (arXiv 2504.05118), with alpha 0.05 for responses of thousands of
    tokens; BPCO, Qi et al. 2026 (arXiv 2608.23566), equation 14 as it is quoted elsewhere, with
    alpha 0.4.
    differs: lambda is at least 0, which the papers' long responses do not need.
    """
    _require_positive("alpha", alpha)
    return (1 - 1 / (alpha * lengths.float())).clamp(min=0)


def bound_values(outputs: Tensor, low: float, high: float) -> Tensor:
    """A critic's outputs squashed into the range of the score: its values.

    low + (high - low) * (1/2 + arctan(output) / pi). An output of 0 is the middle of the range.

    Shapes: outputs [..] -> [..], reward units. Raises ValueError unless low < high.
    Source: BPCO, Qi et al. 2026 (arXiv 2608.23566), equation 9, taken from texts that quote it.
    differs: the paper knows the range of its rewards, and its returns are rewards. Returns here
    also contain the KL penalty, so one may lie outside the range, where no value can follow it.
    """
    if not low < high:
        raise ValueError(f"values are bounded to a range with low < high, not {low} and {high}")
    return low + (high - low) * (0.5 + outputs.atan() / torch.pi)


def returns_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum of the rewards from each token on: G_t = r_t + gamma * G_{t+1}.

    REINFORCE++ whitens it over the batch and uses it as the advantage: with the KL penalty in the
    reward, G_t is the score minus kl_coef times the KL from this token on.

    Shapes: rewards [B, T], 0 where they do not count -> [B, T].
    Source: Williams 1992; REINFORCE++, Hu et al. 2025 (arXiv 2501.03262), section 3.
    """
    returns, _ = gae(rewards, torch.zeros_like(rewards), gamma, lam=1.0)
    return returns


def minus_mean_return(rewards: Tensor, gamma: float) -> Tensor:
    """Advantages without a critic: each token's return minus the mean return of whole episodes.

    G_t - mean of G_0, with G of `returns_to_go`. Whitening with a shifted mean takes the constant
    out again. Mask the result: after the end of an episode it is not 0.

    Shapes: rewards [B, T] of all episodes, 0 where they do not count -> [B, T].
    Source: Williams 1992; one side of the gate in Pan et al. 2026 (arXiv 2604.19485).
    """
    returns = returns_to_go(rewards, gamma)
    return returns - returns[:, 0].mean()


def minus_group_mean(rewards: Tensor, group_size: int) -> Tensor:
    """Dr.GRPO's advantages: each reward minus its group's mean, not divided by a deviation.

    Shapes: rewards [B], of whole episodes; the group_size > 1 episodes of a query are neighbors
    -> [B]. Raises ValueError for small or partial groups.
    Source: Liu et al. 2025 (arXiv 2503.20783), section 3.2.
    """
    if group_size < 2:
        raise ValueError(f"a group has at least 2 episodes, not {group_size}")
    if len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} episodes do not fill groups of {group_size}")
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(dim=1, keepdim=True)).flatten()


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """RLOO's advantages: each reward minus the mean of the other rewards of its group.

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
    """Clipped policy-gradient loss of every token, and where the clipped term is the larger one.

    max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c)), with ratio = exp(new_logprobs - logprobs).

    Shapes: all [B, T]; -> losses, clipped [B, T], 0 where the mask does not count. cliprange > 0.
    Source: Schulman et al. 2017, equation 7 (cliprange 0.2 in Huang et al. 2024).
    """
    # Mask before exp: if a NaN were masked only after it, its gradient would still be NaN.
    difference = torch.where(response_mask, new_logprobs - logprobs, torch.zeros_like(logprobs))
    ratio = difference.clamp(max=MAX_LOG_RATIO).exp()

    advantages = torch.where(response_mask, advantages, torch.zeros_like(advantages))
    losses = -advantages * ratio
    clipped_losses = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    is_clipped = (clipped_losses > losses).to(losses.dtype)
    return torch.maximum(losses, clipped_losses), is_clipped


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
) -> tuple[Tensor, Tensor]:
    """Mean of `policy_losses` over real tokens, and the share of tokens that is clipped.

    Training sums `policy_losses` with `loss_weights`, so that microbatches add up.

    Shapes: all [B, T]; -> loss [], clipfrac []. cliprange > 0.
    Raises ValueError where no position counts. Source: as `policy_losses`.
    """
    losses, clipped = policy_losses(new_logprobs, logprobs, advantages, response_mask, cliprange)
    return masked_mean(losses, response_mask), masked_mean(clipped, response_mask)


def value_losses(
    new_values: Tensor, values: Tensor, returns: Tensor, value_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Clipped loss of the critic at every position, and where the clipped term is the larger one.

    0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2); an infinite c clips nothing.

    Shapes: all [B, T]; -> losses, clipped [B, T], 0 where the mask does not count. c > 0.
    Source: the code of Huang et al. 2024 (range 0.2; its weight of 0.1 is not here).
    """
    zeros = torch.zeros_like(new_values)
    new_values = torch.where(value_mask, new_values, zeros)
    values = torch.where(value_mask, values, zeros)
    returns = torch.where(value_mask, returns, zeros)

    clipped_values = values + (new_values - values).clamp(-cliprange_value, cliprange_value)
    losses = (new_values - returns).square()
    clipped_losses = (clipped_values - returns).square()
    # V_old + (V - V_old) rounds, so a difference within the range must not count as clipping.
    is_outside = (new_values - values).abs() > cliprange_value
    is_clipped = is_outside & (clipped_losses > losses)
    return 0.5 * torch.maximum(losses, clipped_losses), is_clipped.to(losses.dtype)


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, value_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Mean of `value_losses` over the positions that count, and the share that is clipped.

    Shapes: all [B, T]; -> loss [], clipfrac []. cliprange_value > 0, reward units.
    Raises ValueError where no position counts. Source: as `value_losses`.
    """
    losses, clipped = value_losses(new_values, values, returns, value_mask, cliprange_value)
    return masked_mean(losses, value_mask), masked_mean(clipped, value_mask)


def loss_weights(mask: Tensor, mean: str) -> Tensor:
    """Weight of each token's loss in the weighted sum that stands for a mean.

    `tokens` and `episodes`: 1; `sequences`: 1 / number of tokens of its sequence; `microbatches`:
    1 / number of tokens in this tensor. The caller divides the sum by the number of what `mean`
    names, counted over the minibatch on all devices.

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

    1 for a perfect critic, 0 for a constant. The variance is the biased one. Targets with a lambda
    below 1 contain the critic's own values, which can inflate the share: `returns_to_go` does not.

    Shapes: values, returns [..], mask [..] bool -> []. Raises ValueError where no position counts.
    Source: our own diagnostic, not in Huang et al. 2024.
    """
    residual = _masked_variance(returns - values, mask)
    total = _masked_variance(returns, mask)
    return 1 - residual / (total + WHITEN_EPS)


def critic_beats_constant(values: Tensor, returns: Tensor, mask: Tensor) -> bool:
    """Whether the critic explains some of the returns: Var(R - V) < Var(R).

    The two variances are compared directly: the eps in `explained_variance` would let a constant
    critic pass where the returns hardly vary.

    Shapes: as in `explained_variance`. Source: the gate of EVPO, Pan et al. 2026 (2604.19485).
    """
    return bool(_masked_variance(returns - values, mask) < _masked_variance(returns, mask))


def preference_loss(chosen_scores: Tensor, rejected_scores: Tensor, center: float = 0.0) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected) + center * (chosen + rejected)^2, nats.

    The second term pulls the mean score of a pair to 0.

    Shapes: chosen_scores, rejected_scores [B] -> [].
    Source: Huang et al. 2024, detail 10 (center 0); Eisenstein et al. 2023, arXiv 2312.09244.
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
    """Rewards that DPO implies, up to a constant per query: beta * (logprobs - ref_logprobs).

    Shapes: logprobs, ref_logprobs [B] nats, of whole responses -> [B].
    Raises ValueError if beta <= 0. Source: Rafailov et al. 2023, section 4.
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
    """DPO's loss, and the implicit rewards of the chosen and of the rejected responses.

    Mean of -log sigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).

    Shapes: all [B], nats, of whole responses; -> loss [] nats, chosen and rejected rewards [B].
    Source: Rafailov et al. 2023 equation 7; Huang et al. 2024, B.4 (beta 0.05, no label smoothing).
    """
    chosen_rewards = implicit_rewards(chosen_logprobs, ref_chosen_logprobs, beta)
    rejected_rewards = implicit_rewards(rejected_logprobs, ref_rejected_logprobs, beta)
    return preference_loss(chosen_rewards, rejected_rewards), chosen_rewards, rejected_rewards


def _masked_variance(x: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((x - masked_mean(x, mask)).square(), mask)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be above 0, not {value}")
