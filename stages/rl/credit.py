"""Steps 4 and 5 of an update: rewards per token from scores and KL, then advantages.

The settings switch shaping and whitening (Huang et al. 2024, details 23 to 25). The formulas are in
`functional.py`.
"""

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.rl.episodes import Episodes, Rollout
from stages.settings.ppo import Ppo


def eos_trick(scores: Tensor, responses: Tensor, eos_id: int, ppo: Ppo) -> Tensor:
    """Scores [B] with what a missing EOS costs (detail 23; TRL subtracts)."""
    if ppo.eos_trick == "off":
        return scores
    replaced = ppo.eos_trick == "replace"
    formula = functional.penalize_missing_eos if replaced else functional.subtract_missing_eos
    return formula(scores, responses, eos_id, ppo.missing_eos_penalty)


@torch.no_grad()
def credit(
    accelerator: Accelerator, episodes: Episodes, ppo: Ppo, pad_id: int, kl_coef: float
) -> Rollout:
    """Steps 4 and 5: rewards, values that count, GAE, whitening.

    kl_coef is this update's, in reward units per nat. Raises ValueError if there is no critic.
    """
    if episodes.values is None:
        raise ValueError("GAE needs a critic's values, and these episodes have none")
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs, ppo.kl_estimator)
    rewards = functional.shape_rewards(  # 4. shape
        kl, episodes.scores, response_mask, kl_coef if ppo.kl_in == "reward" else 0.0, ppo.score_at
    )
    if ppo.whiten_rewards:
        rewards = whiten(accelerator, rewards, value_mask, ppo, shift_mean=False)
    values = torch.where(value_mask, episodes.values, 0.0)
    advantages, returns = functional.gae(rewards, values, ppo.gamma, ppo.lam)  # 5. credit
    if ppo.whiten_advantages:
        advantages = whiten(accelerator, advantages, response_mask, ppo, shift_mean=True)
    return Rollout(
        queries=episodes.queries,
        responses=episodes.responses,
        logprobs=episodes.logprobs,
        ref_logprobs=episodes.ref_logprobs,
        values=values,
        scores=episodes.scores,
        response_mask=response_mask,
        value_mask=value_mask,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
    )


def whiten(accelerator: Accelerator, x: Tensor, mask: Tensor, ppo: Ppo, shift_mean: bool) -> Tensor:
    """`masked_whiten` over the batch of all processes, or over this process's part of it.

    Huang et al. 2024 whitens each process's part. Returns this process's rows, [B, T].
    """
    if ppo.whiten_over == "process":
        return functional.masked_whiten(x, mask, shift_mean=shift_mean)
    everything, counted = accelerator.gather(x), accelerator.gather(mask)
    whitened = functional.masked_whiten(everything, counted, shift_mean=shift_mean)
    start = accelerator.process_index * len(x)
    return whitened[start : start + len(x)]
