"""Steps 4 and 5 of an update: rewards per token from scores and KL, then advantages.

The settings switch shaping and whitening (Huang et al. 2024, details 23 to 25). The formulas are in
`functional.py`.
"""

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
    replaced = settings.eos_trick == "replace"
    formula = functional.penalize_missing_eos if replaced else functional.subtract_missing_eos
    return formula(scores, responses, eos_id, settings.missing_eos_penalty)


def shape(
    episodes: Episodes,
    settings: PolicyGradient,
    pad_id: int,
    kl_coef: float,
    score_at: str = "after_eos",
) -> Shaped:
    """Step 4: -kl_coef * KL at every token, plus the score at the end, and where values count.

    kl_coef is this update's, in reward units per nat. `score_at` as in `functional.shape_rewards`.
    """
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    if score_at == "eos":  # the episode is over after EOS: no value of later text may enter
        value_mask = response_mask
    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs, settings.kl_estimator)
    in_reward = kl_coef if settings.kl_in == "reward" else 0.0
    return Shaped(
        **vars(episodes),
        response_mask=response_mask,
        value_mask=value_mask,
        rewards=functional.shape_rewards(kl, episodes.scores, response_mask, in_reward, score_at),
    )


@torch.no_grad()
def credit(accelerator: Accelerator, shaped: Shaped, ppo: Ppo) -> Rollout:
    """Step 5 by a critic: values that count, GAE, whitening. The critic's returns may have a lambda
    of their own.

    Raises ValueError if there is no critic.
    """
    if shaped.values is None:
        raise ValueError("GAE needs a critic's values, and these episodes have none")
    rewards, mask = shaped.rewards, shaped.value_mask
    if ppo.whiten_rewards:
        rewards = whiten(accelerator, rewards, mask, ppo, shift_mean=False)
    values = torch.where(mask, shaped.values, 0.0)
    advantages, returns = functional.gae(rewards, values, ppo.gamma, ppo.lam)
    if ppo.critic_lam != ppo.lam:
        _, returns = functional.gae(rewards, values, ppo.gamma, ppo.critic_lam)
    if ppo.whiten_advantages:
        advantages = whiten(accelerator, advantages, shaped.response_mask, ppo, shift_mean=True)
    # Values stay as measured, for `check_critic`: with score_at=eos the one at EOS does not count.
    changed = {"rewards": rewards}
    return Rollout(**vars(shaped) | changed, advantages=advantages, returns=returns)


def whiten(accelerator: Accelerator, x: Tensor, mask: Tensor, ppo: Ppo, shift_mean: bool) -> Tensor:
    """`masked_whiten` over the batch of all processes, or over this process's part of it.

    Returns this process's rows, [B, T]. Raises ValueError where no position counts.
    differs: over the global batch by default, where Huang et al. 2024 whitens each process's part.
    """
    if ppo.whiten_over == "process":
        return functional.masked_whiten(x, mask, shift_mean=shift_mean)
    everything, counted = accelerator.gather(x), accelerator.gather(mask)
    whitened = functional.masked_whiten(everything, counted, shift_mean=shift_mean)
    start = accelerator.process_index * len(x)
    return whitened[start : start + len(x)]
