"""Checks of an update before anything is learned from it, by computing it a second way.

The checks before the first update see a KL of 0 and an optimizer without moments, so they miss
errors that depend on these. Therefore the rewards, advantages and policy gradient of a few updates
are computed again in float64, with closed formulas instead of recursions, and with masks derived
from the tokens: in the first three updates of critic warm-up, and in the first three that train the
policy. The cost is a few sums over [B, T].

`checks.updates` says what happens at a difference: `warn` prints one line (the default), `stop`
ends the stage, `off` computes nothing. The checks use the original formulas. If you change one on
purpose, you should see a warning.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from stages.config.errors import UserError, say_error
from stages.config.ppo import PolicyGradient, Ppo
from stages.rl import loss
from stages.rl.algorithms import Grouped
from stages.rl.episodes import Rollout
from stages.rl.metrics import NOTHING_ENDS
from stages.rl.networks import PolicyLearner

CHECKED_UPDATES = 3
"""Number of updates to check in critic warm-up, and again when the policy is trained."""
TOLERANCE = 2e-3
"""Maximum difference relative to the largest number: float32 rounds to 1e-7, its sums to 1e-5."""
MIN_VARIANCE = 1e-6
"""Advantages that vary less than this are not compared after whitening, because of rounding."""
WHITEN_EPS = 1e-8
"""Added to the variance in whitening by the code of Huang et al. 2024."""
ON_PURPOSE = (
    "If you changed a formula, this is expected, because the checks use the original one: "
    "checks.updates=off turns them off"
)


class UpdateCheckError(UserError):
    """A number of an update differs from its definition."""


def is_checked(update: int, settings: PolicyGradient) -> bool:
    """Whether an update, counted from 0, is one of those that are checked."""
    first_policy_update = next(n for n in range(settings.num_updates) if settings.policy_learns(n))
    if update < first_policy_update:
        return update < CHECKED_UPDATES
    return update < first_policy_update + CHECKED_UPDATES


def check_update(
    learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient, kl_coef: float, mode: str
) -> None:
    """All checks of one update, before its first optimizer step.

    `mode` is checks.updates. With `stop`, raises an UpdateCheckError that names the update, what is
    wrong, by how much, and the likely causes. With `warn` the same is printed, and later updates
    are not checked, because a changed formula would differ in each of them.
    """
    if is_checked(learner.update, settings) and not skips_checks(learner, mode):
        report(learner, compare_update(learner, rollout, settings, kl_coef), mode)


def check_statistics(
    learner: PolicyLearner, statistics: dict[str, float], settings: PolicyGradient, mode: str
) -> None:
    """Check an update's statistics after its optimizer steps; options as in `check_update`.

    A step changes the policy, so with several steps the mean of the log-ratio's square cannot be
    exactly 0. It is 0 if the old log-probabilities are computed again at each step, and then
    nothing is ever clipped.
    """
    if skips_checks(learner, mode) or not is_checked(learner.update, settings):
        return
    steps = statistics["policy/epochs"] * settings.num_minibatches
    if steps > 1 and statistics.get("policy/approxkl_avg") == 0:
        what = "the ratio is exactly 1 in every step, although the policy was changed between them"
        failure = (
            f"{learner.stage}, update {learner.update + 1}: {what}. Likely causes: step 6 (old "
            f"log-probabilities computed again, or a learning rate of 0). {ON_PURPOSE}"
        )
        report(learner, [failure], mode)


def skips_checks(learner: PolicyLearner, mode: str) -> bool:
    """Whether checks are off: by request, or because one of them has already warned."""
    return mode == "off" or learner.has_warned


def report(learner: PolicyLearner, failures: Sequence[str], mode: str) -> None:
    """Print the first failed check of all processes, or raise it with `stop`."""
    all_failures = gather_object([*failures])
    if not all_failures:
        return
    if mode == "stop":
        raise UpdateCheckError(all_failures[0])
    learner.has_warned = True
    if learner.accelerator.is_main_process:
        say_error(f"warning: {all_failures[0]}")


@torch.no_grad()
def compare_update(
    learner: PolicyLearner, rollout: Rollout, settings: PolicyGradient, kl_coef: float
) -> list[str]:
    """Compare an update's numbers with their definitions; return what failed in this process.

    A failed check does not stop the others, because some of them wait for all processes.
    """
    update = f"{learner.stage}, update {learner.update + 1}"
    accelerator = learner.accelerator
    real = rollout.responses != learner.networks.pad_id  # [B, T]
    failures: list[str] = []

    with collected(failures):
        check_rewards(update, accelerator, rollout, real, settings, kl_coef)
    if rollout.shaped_scores is not None:
        with collected(failures):
            check_preferences(update, rollout, learner.networks.eos_id)
    with collected(failures):
        check_moments(update, learner, settings)
    if learner.update >= 2 and settings.policy_learns(learner.update - 2):
        with collected(failures):
            check_reference(update, rollout, real, learner.networks.eos_id)
    if isinstance(settings, Ppo):
        if settings.uses_critic:
            with collected(failures):
                check_returns(update, rollout, real, settings)
        with collected(failures):
            check_advantages(update, accelerator, rollout, real, settings)
    elif isinstance(settings, Grouped) and not settings.whiten_advantages:
        with collected(failures):
            check_groups(update, rollout)
    if settings.policy_learns(learner.update):
        with collected(failures):
            check_gradient(update, learner, rollout, settings, kl_coef)
    return failures


@contextmanager
def collected(failures: list[str]) -> Iterator[None]:
    """Add the text of an UpdateCheckError to the failures, and continue after the block."""
    try:
        yield
    except UpdateCheckError as error:
        failures.append(str(error))


def check_rewards(
    update: str,
    accelerator: Accelerator,
    rollout: Rollout,
    real: Tensor,
    settings: PolicyGradient,
    kl_coef: float,
) -> None:
    """An episode's rewards add up to its score minus kl_coef times its KL (Stiennon et al. 2020,
    section 3.4). Whitened rewards have another scale, but the same mean over the batch.
    """
    log_ratios = (rollout.logprobs.double() - rollout.ref_logprobs.double()).masked_fill(~real, 0)
    expected = rollout.rewarded_scores.double()  # [B]
    if settings.kl_in == "reward":
        expected = expected - kl_coef * log_ratios.sum(dim=1)
    found = rollout.rewards.double().sum(dim=1)
    if not settings.whiten_rewards:
        _require_equal(
            found,
            expected,
            f"{update}: the rewards of an episode are not its score minus kl_coef times its KL",
            "step 4 (kl_coef, kl_in, score_at)",
        )
    elif settings.whiten_over == "batch":
        positions = accelerator.gather(rollout.value_mask).sum()
        _require_equal(
            (accelerator.gather(found).sum() / positions).unsqueeze(0),
            (accelerator.gather(expected).sum() / positions).unsqueeze(0),
            f"{update}: whitening the rewards has changed their mean",
            "step 5 (whiten_rewards must not shift the mean)",
        )


def check_preferences(update: str, rollout: Rollout, eos_id: int) -> None:
    """Where a response ends, log(p / (1 - p)) of its shaped score p is its score minus that of its
    query's reference (Fu et al. 2025).
    """
    if rollout.shaped_scores is None or rollout.reference_scores is None:
        raise ValueError("these episodes have no shaped scores")
    margins = (rollout.scores.double() - rollout.reference_scores.double()).clamp(-10, 10)
    odds = margins.exp()
    has_eos = (rollout.responses == eos_id).any(dim=1)
    _require_equal(
        rollout.shaped_scores.double()[has_eos],
        (odds / (1 + odds))[has_eos],
        f"{update}: a shaped score is not the probability that the reference loses",
        "step 3 (score_shaping, or references of other queries)",
    )


def check_returns(update: str, rollout: Rollout, real: Tensor, ppo: Ppo) -> None:
    """The critic's targets are the returns of this update's rewards and values.

    They belong to advantages that are not whitened (Huang et al. 2024, detail 25).
    """
    if rollout.values is None or rollout.returns is None:
        raise ValueError("these episodes have no critic's values")
    values, deltas = _values_and_deltas(rollout, real, ppo)
    counted = _value_positions(real, ppo)
    _require_equal(
        rollout.returns.double()[counted],
        (_discounted_sums(deltas, ppo.gamma * ppo.critic_lam) + values)[counted],
        f"{update}: the critic's targets are not the returns of this update's rewards and values",
        "step 4 (what counts: score_at) or step 5 (gamma, lam, whitening)",
    )


def check_advantages(
    update: str, accelerator: Accelerator, rollout: Rollout, real: Tensor, ppo: Ppo
) -> None:
    """Advantages are those of this update's rewards and values, whitened over what counts.

    GAE as the sum over later steps, sum (gamma * lam)^l * delta (Schulman et al. 2016, equation
    16), or returns minus the batch's mean return.
    """
    returns_to_go = _discounted_sums(rollout.rewards.double(), ppo.gamma)
    mean_return = accelerator.gather(returns_to_go[:, 0]).mean()
    advantages = returns_to_go - mean_return

    if ppo.uses_critic:
        if rollout.returns is None:
            raise ValueError("these episodes have no critic's values")
        values, deltas = _values_and_deltas(rollout, real, ppo)
        explained = _explained_variance(
            accelerator.gather(values),
            accelerator.gather(rollout.returns.double()),
            accelerator.gather(_value_positions(real, ppo)),
        )
        if ppo.baseline == "gated" and abs(explained) < TOLERANCE:
            return  # rounding decides which baseline it is
        if ppo.baseline == "critic" or explained > 0:
            advantages = _discounted_sums(deltas, ppo.gamma * _policy_lambda(real, ppo))

    if ppo.whiten_advantages:
        if ppo.whiten_over == "process":
            counted_advantages = advantages[real]
        else:
            counted_advantages = accelerator.gather(advantages)[accelerator.gather(real)]
        variance = counted_advantages.var(correction=0)
        if variance < MIN_VARIANCE:
            return
        advantages = (advantages - counted_advantages.mean()) / (variance + WHITEN_EPS).sqrt()
    _require_equal(
        rollout.advantages.double()[real],
        advantages[real],
        f"{update}: advantages are not those of this update's rewards and values, whitened over "
        "the tokens that count",
        "step 5 (gamma, lam, baseline, whitening)",
    )


def _value_positions(real: Tensor, ppo: Ppo) -> Tensor:
    """Where a value counts, [B, T] bool: at every real token, and at the one after the last if the
    score is there.
    """
    if ppo.score_at == "eos":
        return real
    return torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1)


def _values_and_deltas(rollout: Rollout, real: Tensor, ppo: Ppo) -> tuple[Tensor, Tensor]:
    """The values that count and the TD errors r + gamma * V' - V, both [B, T]."""
    if rollout.values is None:
        raise ValueError("these episodes have no critic's values")
    values = rollout.values.double().masked_fill(~_value_positions(real, ppo), 0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    return values, rollout.rewards.double() + ppo.gamma * next_values - values


def _explained_variance(values: Tensor, returns: Tensor, counted: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the counted positions."""
    residual = (returns - values)[counted].var(correction=0).item()
    total = returns[counted].var(correction=0).item()
    return 1 - residual / (total + WHITEN_EPS)


def _policy_lambda(real: Tensor, ppo: Ppo) -> float | Tensor:
    """Lambda of the advantages: one number, or with lam_length_alpha one for each episode, [B]."""
    if not ppo.lam_length_alpha:
        return ppo.lam
    reach = ppo.lam_length_alpha * real.sum(dim=1).double()
    return torch.where(reach > 1, (reach - 1) / reach, 0.0)


def _discounted_sums(deltas: Tensor, decay: float | Tensor) -> Tensor:
    """Sum over later steps s of decay^(s - t) * deltas[s]: [B, T] -> [B, T].

    `decay` is one number, or one for each episode, [B].
    """
    step = torch.arange(deltas.shape[1], device=deltas.device)
    distance = step.unsqueeze(1) - step
    decay = torch.as_tensor(decay, dtype=torch.float64, device=deltas.device)
    powers = decay.view(-1, 1, 1) ** distance.clamp(min=0)  # [B or 1, T, T]
    weights = torch.where(distance >= 0, powers, 0.0)
    return (deltas.unsqueeze(1) @ weights).squeeze(1)


def check_groups(update: str, rollout: Rollout) -> None:
    """The advantages of a query's samples are proportional to their rewards minus the mean reward.

    The factor is 1 in Dr.GRPO and K / (K - 1) in RLOO, so it is left free.
    """
    rewards = rollout.rewards.double().sum(dim=1).reshape(-1, rollout.samples_per_query)
    relative = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = rollout.advantages.double()[:, 0].reshape(-1, rollout.samples_per_query)
    total = relative.square().sum()
    if total < MIN_VARIANCE * relative.numel():
        return
    factor = (advantages * relative).sum() / total
    _require_equal(
        advantages.flatten(),
        (factor * relative).flatten(),
        f"{update}: the advantages of a query's samples do not follow their rewards",
        "step 5 (samples_per_query, or advantages of other episodes)",
    )


@torch.enable_grad()
def check_gradient(
    update: str,
    learner: PolicyLearner,
    rollout: Rollout,
    settings: PolicyGradient,
    kl_coef: float,
) -> None:
    """The loss has, for each token, the gradient of its own ratio, clipped (Schulman et al. 2017,
    equation 7), plus that of the KL if it is in the loss.

    It is computed at log-probabilities that a later step might have, some of them beyond the clip.
    """
    real = rollout.responses != learner.networks.pad_id
    shifts = torch.linspace(-0.5, 0.5, real.shape[1], device=real.device)
    new_logprobs = (rollout.logprobs + shifts).requires_grad_()
    policy_loss, _ = loss.policy_loss(
        new_logprobs,
        entropies=torch.zeros_like(new_logprobs),
        part=rollout,
        divisors=loss.Divisors(policy=1.0, value=1.0, tokens=1.0, positions=1.0),
        settings=settings,
        kl_coef=kl_coef,
    )
    (gradient,) = torch.autograd.grad(policy_loss, new_logprobs)
    gradient = gradient.double()
    # Undo the division by the number of the sequence's or the microbatch's tokens.
    if settings.loss_mean == "sequences":
        gradient = gradient * real.sum(dim=1, keepdim=True)
    elif settings.loss_mean == "microbatches":
        gradient = gradient * real.sum()

    log_ratios = new_logprobs.double() - rollout.logprobs.double()
    ratios = log_ratios.exp()
    advantages = rollout.advantages.double()
    cliprange = settings.cliprange or math.inf
    is_clipped = torch.where(advantages > 0, ratios > 1 + cliprange, ratios < 1 - cliprange)
    expected = (-advantages * ratios).masked_fill(is_clipped, 0)
    if settings.kl_in == "loss":
        if settings.kl_correction == "sequence":
            return  # a token's gradient depends on the whole response: the tests enumerate it
        difference = new_logprobs.double() - rollout.ref_logprobs.double()
        expected += kl_coef * _kl_gradient(difference, ratios, settings)

    # At the edge of the clip, rounding decides.
    is_clear = real & ((ratios - 1).abs() - cliprange).abs().gt(TOLERANCE)
    _require_equal(
        gradient[is_clear],
        expected[is_clear],
        f"{update}: the policy's gradient is not that of a ratio for each token, clipped",
        "step 6 (cliprange, loss_mean, kl_in)",
    )


def _kl_gradient(difference: Tensor, ratios: Tensor, settings: PolicyGradient) -> Tensor:
    """Derivative of a token's KL penalty with respect to its new log-probability.

    With d the log-ratio to the reference and r the ratio to the policy before the update:
    k1' = 1, k2' = d, k3' = 1 - exp(-d), and (r * k)' = r * (k + k').
    """
    k3 = torch.exp(-difference) - 1 + difference
    value = {"k1": difference, "k2": difference.square() / 2, "k3": k3}[settings.kl_estimator]
    slopes = {"k1": torch.ones_like(difference), "k2": difference, "k3": 1 - torch.exp(-difference)}
    slope = slopes[settings.kl_estimator]
    return ratios * (value + slope) if settings.kl_correction == "token" else slope


def check_reference(update: str, rollout: Rollout, real: Tensor, eos_id: int) -> None:
    """After two updates of the policy, not every token's KL is 0.

    If no response ends, the EOS trick gives all of them the same score. Without a critic, all
    advantages are then 0, and the policy cannot learn.
    """
    if not torch.equal(rollout.logprobs[real], rollout.ref_logprobs[real]):
        return
    cause = "step 2 (ref_policy follows the policy) or step 6 (the policy is not updated)"
    if not (rollout.responses == eos_id).any() and not rollout.advantages.any():
        cause = (
            "no response ends, so a query's samples have equal scores and nothing is learned: "
            f"{NOTHING_ENDS}"
        )
    raise UpdateCheckError(
        f"{update}: KL(policy, ref_policy) is 0 at every token although the policy was updated. "
        f"Likely causes: {cause}. {ON_PURPOSE}"
    )


def check_moments(update: str, learner: PolicyLearner, settings: PolicyGradient) -> None:
    """Adam must have counted all steps of earlier updates; with target_kl, at least a pass each."""
    passes = 1 if settings.target_kl else settings.num_ppo_epochs
    expected = learner.update * passes * settings.num_minibatches
    states = learner.optimizer.state.values()
    counted = max((int(state["step"]) for state in states if "step" in state), default=0)
    if counted < expected:
        raise UpdateCheckError(
            f"{update}: the optimizer has counted {counted} steps, not {expected}. Likely causes: "
            f"step 6 (optimizer steps), or a checkpoint without its moments. {ON_PURPOSE}"
        )


def _require_equal(found: Tensor, expected: Tensor, what: str, causes: str) -> None:
    if not len(found):
        return
    worst = (found - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    # NaN is not above the tolerance: a step that is not finite is refused before it is taken.
    if worst > TOLERANCE * scale:
        raise UpdateCheckError(
            f"{what} (by up to {worst:.3g}, where the largest is {scale:.3g}). Likely causes: "
            f"{causes}. {ON_PURPOSE}"
        )
