"""Steps 4 and 5 of an update: rewards per token from scores and KL, then advantages.

The formulas are in `stages/functional.py`, and which of them an algorithm uses is in
`stages/rl/algorithms.py`. Settings switch shaping and whitening (Huang et al. 2024, details 23 to
25).
"""

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.rl.algorithms import Algorithm, GlobalBatch
from stages.rl.episodes import Episodes, Rollout, Shaped
from stages.settings.ppo import PolicyGradient, Ppo


def eos_trick(scores: Tensor, responses: Tensor, eos_id: int, settings: PolicyGradient) -> Tensor:
    """Scores [B] after the penalty for a missing EOS (detail 23; TRL subtracts)."""
    penalty = settings.missing_eos_penalty
    if settings.eos_trick == "replace":
        return functional.penalize_missing_eos(scores, responses, eos_id, penalty)
    if settings.eos_trick == "subtract":
        return functional.subtract_missing_eos(scores, responses, eos_id, penalty)
    return scores


def shape_rewards(
    episodes: Episodes, settings: PolicyGradient, pad_id: int, kl_coef: float
) -> Shaped:
    """Step 4: -kl_coef * KL at every token, plus the score at the end; and where values count.

    `kl_coef` is this update's, reward units per nat.
    """
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    score_at = "after_eos"
    if isinstance(settings, Ppo) and settings.score_at == "eos":
        score_at = "eos"
        # The episode is over after EOS, so the value of the text after it must not count.
        value_mask = response_mask

    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs)
    rewards = functional.shape_rewards(
        kl,
        episodes.scores,
        response_mask,
        kl_coef=kl_coef if settings.kl_in == "reward" else 0.0,
        score_at=score_at,
    )
    return Shaped(
        **vars(episodes), response_mask=response_mask, value_mask=value_mask, rewards=rewards
    )


@torch.no_grad()
def compute_advantages(
    accelerator: Accelerator, shaped: Shaped, algorithm: Algorithm, settings: PolicyGradient
) -> Rollout:
    """Step 5: the algorithm's advantages on the batch of all devices, whitened if asked for.

    Returns this process's episodes. Raises ValueError if the algorithm needs a critic's values and
    there are none.
    """
    rewards = shaped.rewards
    if settings.whiten_rewards:
        rewards = whiten(accelerator, rewards, shaped.value_mask, settings, shift_mean=False)

    batch = global_batch(accelerator, shaped, rewards)
    batch_advantages, batch_returns = algorithm.advantages(batch, settings)

    # Back to this process's episodes. A value after EOS has no token whose probability could learn.
    episodes = len(rewards)
    advantages = own_rows(accelerator, batch_advantages, episodes)
    if settings.whiten_advantages:
        advantages = whiten(accelerator, advantages, shaped.response_mask, settings)
    else:
        advantages = torch.where(shaped.response_mask, advantages, 0.0)
    returns = None
    if batch_returns is not None:
        returns = own_rows(accelerator, batch_returns, episodes)
    return Rollout(**{**vars(shaped), "rewards": rewards}, advantages=advantages, returns=returns)


def global_batch(accelerator: Accelerator, shaped: Shaped, rewards: Tensor) -> GlobalBatch:
    """What advantages are computed from, gathered from all devices."""
    return GlobalBatch(
        rewards=accelerator.gather(rewards),
        values=None if shaped.values is None else accelerator.gather(shaped.values),
        response_mask=accelerator.gather(shaped.response_mask),
        value_mask=accelerator.gather(shaped.value_mask),
        samples_per_query=shaped.samples_per_query,
    )


def own_rows(accelerator: Accelerator, gathered: Tensor, count: int) -> Tensor:
    """This process's rows of a tensor gathered from all, which contribute `count` rows each."""
    first = accelerator.process_index * count
    return gathered[first : first + count]


def whiten(
    accelerator: Accelerator,
    x: Tensor,
    mask: Tensor,
    settings: PolicyGradient,
    shift_mean: bool = True,
) -> Tensor:
    """`masked_whiten` over the batch of all devices, or over this process's part of it.

    Returns this process's rows, [B, T]. Raises ValueError where no position counts.
    differs: over the global batch by default, where Huang et al. 2024 whitens each device's part.
    """
    if settings.whiten_over == "process":
        return functional.masked_whiten(x, mask, shift_mean=shift_mean)
    whitened = functional.masked_whiten(
        accelerator.gather(x), accelerator.gather(mask), shift_mean=shift_mean
    )
    return own_rows(accelerator, whitened, len(x))
