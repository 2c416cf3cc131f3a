"""What must hold in every update before anything is learned from it, computed a second way.

The checks at the start see a KL of 0 and an optimizer without moments. Errors in what follows from
these train on without a word. So every update's rewards, credit and policy gradient are computed
again in float64, by closed formulas instead of recursions, and with masks read off the tokens. The
costs are sums over [B, T].
"""

import copy
import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.rl import loss
from stages.rl.episodes import Rollout
from stages.rl.metrics import NOTHING_ENDS
from stages.rl.networks import PolicyLearner
from stages.settings.checks import UserError
from stages.settings.ppo import PolicyGradient, Ppo

TOLERANCE = 2e-3
"""Of a difference to the largest number compared: float32 rounds to 1e-7, sums of it to 1e-5."""
LEAST_VARIANCE = 1e-6
"""Advantages that vary less than this are not compared after whitening: rounding decides them."""
FLOOR = 1e-8
"""Of the variance under whitening's root, in the code of Huang et al. 2024."""


@torch.no_grad()
def check_update(learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient) -> None:
    """All checks of one update. They compare what this stage has made, so they name its steps.

    Raises UserError that says which update, what does not hold, by how much, and the likely causes.
    """
    update = f"{learner.stage}, update {learner.update + 1}"
    real = rollout.responses != learner.networks.pad_id
    check_rewards(update, rollout, real, settings)
    check_moments(update, learner, settings)
    if learner.update >= 2 and settings.policy_learns(learner.update - 2):
        check_reference(update, rollout, real, learner.networks.eos_id)
    if isinstance(settings, Ppo):
        check_credit(update, learner.accelerator, rollout, real, settings)
    else:
        check_groups(update, rollout)
    if settings.policy_learns(learner.update):
        check_gradient(update, learner, rollout, settings)


def check_rewards(update: str, rollout: Rollout, real: Tensor, settings: PolicyGradient) -> None:
    """An episode's rewards add up to its score minus kl_coef times its KL (Stiennon et al. 2020,
    section 3.4). Whitened rewards have another scale and are not compared.
    """
    if isinstance(settings, Ppo) and settings.whiten_rewards:
        return
    ratio = (rollout.logprobs.double() - rollout.ref_logprobs.double()).masked_fill(~real, 0)
    kl = {"k1": ratio, "k2": ratio**2 / 2, "k3": torch.exp(-ratio) - 1 + ratio}
    penalty = kl[settings.kl_estimator].sum(dim=1) * settings.kl_coef
    if settings.kl_in != "reward":
        penalty = torch.zeros_like(penalty)
    _require_equal(
        rollout.rewards.double().sum(dim=1),
        rollout.scores.double() - penalty,
        f"{update}: the rewards of an episode are not its score minus kl_coef times its KL",
        "step 4 (kl_coef, kl_in, kl_estimator, score_at)",
    )


def check_credit(
    update: str, accelerator: Accelerator, rollout: Rollout, real: Tensor, ppo: Ppo
) -> None:
    """Advantages and returns are those of this update's rewards and values: GAE as the sum over
    later steps, sum (gamma * lam)^l * delta (Schulman et al. 2016, equation 16), whitened over the
    tokens that count; returns of advantages that are not whitened (Huang et al. 2024, detail 25).
    """
    if rollout.values is None or rollout.returns is None:
        raise ValueError("these episodes have no critic's values")
    # A value counts at every real token, and where a score after EOS stands.
    one_further = torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)
    counted = real if ppo.score_at == "eos" else one_further
    values = rollout.values.double().masked_fill(~counted, 0)
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rollout.rewards.double() + ppo.gamma * after - values
    _require_equal(
        rollout.returns.double()[counted],
        (_summed(deltas, ppo.gamma * ppo.lam) + values)[counted],
        f"{update}: the critic's targets are not the returns of this update's rewards and values",
        "step 4 (what counts: score_at) or step 5 (gamma, lam, whitening)",
    )
    positions = (values, rollout.returns.double(), counted)
    explained = _explained(*(accelerator.gather(x) for x in positions))
    if ppo.baseline == "gated" and abs(explained) < TOLERANCE:
        return  # rounding decides which baseline it is
    advantages = _summed(deltas, ppo.gamma * ppo.lam)
    if ppo.baseline == "mean" or (ppo.baseline == "gated" and explained <= 0):
        to_go = _summed(rollout.rewards.double(), ppo.gamma)
        advantages = to_go - accelerator.gather(to_go[:, 0]).mean()
    if ppo.whiten_advantages:
        one_process = ppo.whiten_over == "process"
        everything = advantages if one_process else accelerator.gather(advantages)
        tokens = everything[real if one_process else accelerator.gather(real)]
        variance = tokens.var(correction=0)
        if variance < LEAST_VARIANCE:
            return
        advantages = (advantages - tokens.mean()) / (variance + FLOOR).sqrt()
    _require_equal(
        rollout.advantages.double()[real],
        advantages[real],
        f"{update}: advantages are not those of this update's rewards and values, whitened over"
        " the tokens that count",
        "step 5 (gamma, lam, baseline, whitening)",
    )


def _explained(values: Tensor, returns: Tensor, counted: Tensor) -> float:
    """Explained variance over the counted positions."""
    wrong, whole = ((returns - x)[counted].var(correction=0).item() for x in (values, 0.0))
    return 1 - wrong / (whole + FLOOR)


def _summed(deltas: Tensor, decay: float) -> Tensor:
    """Sum over later steps s of decay^(s - t) * deltas[s]: [B, T] -> [B, T]."""
    step = torch.arange(deltas.shape[1], device=deltas.device)
    distance = step.unsqueeze(1) - step
    weights = torch.where(distance >= 0, float(decay) ** distance.clamp(min=0), 0.0)
    return deltas @ weights.double()


def check_groups(update: str, rollout: Rollout) -> None:
    """Without a critic, the advantages of a query's samples add up to 0."""
    by_query = rollout.advantages.double()[:, 0].reshape(-1, rollout.samples_per_query)
    sums = by_query.sum(dim=1)
    scale = rollout.advantages.abs().max().item()
    what = f"{update}: the advantages of a query's samples do not add up to 0"
    _require_equal(sums, torch.zeros_like(sums), what, "step 5 (samples_per_query)", scale)


@torch.enable_grad()
def check_gradient(
    update: str, learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient
) -> None:
    """The loss has, for each token, the gradient of a ratio and a clip of its own (Schulman et al.
    2017, equation 7), at log-probabilities that a later step might have: some beyond the clip.
    """
    real = rollout.responses != learner.networks.pad_id
    steps = torch.linspace(-0.5, 0.5, real.shape[1], device=real.device)
    new = (rollout.logprobs + steps).requires_grad_()
    stand_in: Any = copy.copy(learner)
    stand_in.trained = lambda network, batch, **options: (new, torch.zeros_like(new))
    sums = loss.Divisors(policy=1.0, value=1.0, tokens=1.0, positions=1.0)
    policy_loss, _ = next(loss.microbatch_losses(stand_in, rollout, sums, settings))
    (learned,) = torch.autograd.grad(policy_loss, new)
    log_ratio, advantages = new.double() - rollout.logprobs.double(), rollout.advantages.double()
    ratio, clip = log_ratio.exp(), settings.cliprange or math.inf
    clipped = torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip)
    expected = (-advantages * ratio).masked_fill(clipped, 0)
    if settings.kl_in == "loss":
        kl = new.double() - rollout.ref_logprobs.double()
        expected += settings.kl_coef * (kl if settings.kl_estimator == "k2" else 1 - torch.exp(-kl))
    # What a token's loss is divided by before the caller divides the sum.
    shares = {"sequences": real.sum(dim=1, keepdim=True), "microbatches": real.sum()}
    learned = learned.double() * shares.get(settings.loss_mean, 1)
    clear = real & ((ratio - 1).abs() - clip).abs().gt(TOLERANCE)  # at the clip, rounding decides
    what = f"{update}: the policy's gradient is not that of a ratio for each token, clipped"
    _require_equal(learned[clear], expected[clear], what, "step 6 (cliprange, loss_mean, kl_in)")


def check_reference(update: str, rollout: Rollout, real: Tensor, eos_id: int) -> None:
    """Once the policy has learned, not every token's KL is 0.

    Where no response ends, the EOS trick gives all the same score. Without a critic no advantage is
    left then, so the policy cannot learn.
    """
    if not torch.equal(rollout.logprobs[real], rollout.ref_logprobs[real]):
        return
    fault = "step 2 (ref_policy follows the policy) or step 6 (the policy does not learn)"
    if not (rollout.responses == eos_id).any() and not rollout.advantages.any():
        fault = "no response ends, so a query's samples have equal scores and nothing is learned: "
        fault += NOTHING_ENDS
    what = f"{update}: KL(policy, ref_policy) is 0 at every token after the policy learned"
    raise UserError(f"{what}. Likely causes: {fault}")


def check_moments(update: str, learner: PolicyLearner, settings: PolicyGradient) -> None:
    """Adam has counted every step of the updates before; with target_kl, at least one pass each."""
    passes = 1 if settings.target_kl else settings.num_ppo_epochs
    least = learner.update * passes * settings.num_minibatches
    counted = [int(state["step"]) for state in learner.optimizer.state.values() if "step" in state]
    steps = max(counted, default=0)
    if steps < least:
        what = f"{update}: the optimizer has counted {steps} steps, not {least}"
        raise UserError(f"{what}. Likely causes: step 6 or a checkpoint has lost its moments")


def _require_equal(first: Tensor, again: Tensor, what: str, fault: str, scale: float = 0.0) -> None:
    distance = (first - again).abs()
    if not len(distance):
        return
    worst, scale = distance.max().item(), max(1.0, scale, again.abs().max().item())
    if worst > TOLERANCE * scale:  # what is not finite is refused with its batch, before a step
        numbers = f"by {worst:.3g} at most, where {scale:.3g} is the largest"
        raise UserError(f"{what} ({numbers}). Likely causes: {fault}")
