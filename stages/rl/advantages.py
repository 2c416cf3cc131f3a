"""Steps 4 and 5 of an update: rewards per token from scores and KL, then advantages.

The settings switch shaping and whitening (Huang et al. 2024, details 23 to 25). The formulas are in
`functional.py`.
"""

from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.rl.episodes import Episodes, Rollout, Shaped
from stages.settings.ppo import PolicyGradient, Ppo


def eos_trick(scores: Tensor, responses: Tensor, eos_id: int, settings: PolicyGradient) -> Tensor:
    """Scores [B] with what a missing EOS costs (detail 23; TRL subtracts)."""
    if settings.eos_trick == "off":
        return scores
    rest = responses, eos_id, settings.missing_eos_penalty
    if settings.eos_trick == "replace":
        return functional.penalize_missing_eos(scores, *rest)
    return scores + functional.penalize_missing_eos(torch.zeros_like(scores), *rest)


def shape(
    episodes: Episodes, settings: PolicyGradient, pad_id: int, score_at: str = "after_eos"
) -> Shaped:
    """Step 4: -kl_coef * KL at every token, plus the score at the end, and where values count.

    `score_at` as in `functional.shape_rewards`.
    """
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    if score_at == "eos":  # the episode is over after EOS: no value of later text may enter
        value_mask = response_mask
    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs, settings.kl_estimator)
    in_reward = settings.kl_coef if settings.kl_in == "reward" else 0.0
    return Shaped(
        **vars(episodes),
        response_mask=response_mask,
        value_mask=value_mask,
        rewards=functional.shape_rewards(kl, episodes.scores, response_mask, in_reward, score_at),
    )


@torch.no_grad()
def credit(accelerator: Accelerator, shaped: Shaped, ppo: Ppo) -> Rollout:
    """Step 5: GAE, the baseline that `ppo.baseline` names, whitening.

    Raises ValueError if there is no critic.
    """
    rewards, mask, values = shaped.rewards, shaped.value_mask, counted_values(shaped)
    if ppo.whiten_rewards:
        rewards = whiten(accelerator, rewards, mask, ppo, shift_mean=False)
    advantages, returns = functional.gae(rewards, values, ppo.gamma, ppo.lam)
    # Values stay as measured, for `check_critic`: with score_at=eos the one at EOS does not count.
    changed = {"rewards": rewards, "advantages": advantages, "returns": returns}
    rollout = Rollout(**vars(shaped) | changed)
    if not uses_critic(accelerator, rollout, ppo):
        advantages = by_mean(accelerator, rollout, ppo.gamma)
    if ppo.whiten_advantages:
        advantages = whiten(accelerator, advantages, shaped.response_mask, ppo, shift_mean=True)
    return replace(rollout, advantages=advantages)


def counted_values(shaped: Shaped) -> Tensor:
    """Values [B, T], 0 where they do not count. Raises ValueError if there is no critic."""
    if shaped.values is None:
        raise ValueError("GAE needs a critic's values, and these episodes have none")
    return torch.where(shaped.value_mask, shaped.values, 0.0)


def explained_by_critic(accelerator: Accelerator, rollout: Rollout) -> float:
    """Share of the returns' variance that the critic explains, over the batch of all processes."""
    everything = (rollout.values, rollout.returns, rollout.value_mask)
    gathered = (accelerator.gather(x) for x in everything)
    return functional.explained_variance(*gathered).item()


def uses_critic(accelerator: Accelerator, rollout: Rollout, ppo: Ppo) -> bool:
    """Whether advantages come from the critic: gated, where it beats a constant (EVPO)."""
    if ppo.baseline == "gated":
        return explained_by_critic(accelerator, rollout) > 0
    return ppo.baseline == "critic"


def by_mean(accelerator: Accelerator, rollout: Rollout, gamma: float) -> Tensor:
    """This process's advantages [B, T] under the mean return of all processes' episodes."""
    everything = functional.minus_mean_return(accelerator.gather(rollout.rewards), gamma)
    own = own_rows(accelerator, everything, len(rollout.rewards))
    return torch.where(rollout.response_mask, own, 0.0)


def own_rows(accelerator: Accelerator, everything: Tensor, count: int) -> Tensor:
    """The rows of this process in what was gathered from all, which have `count` each."""
    return everything[accelerator.process_index * count :][:count]


def whiten(accelerator: Accelerator, x: Tensor, mask: Tensor, ppo: Ppo, shift_mean: bool) -> Tensor:
    """`masked_whiten` over the batch of all processes, or over this process's part of it.

    Returns this process's rows, [B, T]. Raises ValueError where no position counts.
    differs: over the global batch by default, where Huang et al. 2024 whitens each process's part.
    """
    if ppo.whiten_over == "process":
        return functional.masked_whiten(x, mask, shift_mean=shift_mean)
    everything, counted = accelerator.gather(x), accelerator.gather(mask)
    whitened = functional.masked_whiten(everything, counted, shift_mean=shift_mean)
    return own_rows(accelerator, whitened, len(x))
