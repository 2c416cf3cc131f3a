"""Steps 4 and 5 of an update: rewards per token from scores and KL, then advantages.

The formulas are in `stages/functional.py`; `stages/rl/algorithms.py` says which of them an
algorithm uses. Settings control whitening, and where the score is added (Huang et al. 2024, details
24 and 25).
"""

import torch
from accelerate import Accelerator
from torch import Tensor

from stages import functional
from stages.config.ppo import PolicyGradient, Ppo
from stages.rl.algorithms import Algorithm, GlobalBatch
from stages.rl.episodes import Episodes, Rollout, Shaped


def assign_rewards(
    episodes: Episodes, settings: PolicyGradient, pad_id: int, kl_coef: float
) -> Shaped:
    """Step 4: rewards per token, and the masks of the tokens and values that count.

    The reward is -kl_coef * KL at every token, plus the score at the end. `kl_coef` is the
    coefficient of this update, in reward units per nat.
    """
    # By default the score is at the position after EOS. That position has a value, the critic's at
    # EOS, but no token: the value mask reaches one position further than the response mask.
    response_mask, value_mask = functional.response_masks(episodes.responses, pad_id)
    score_at = "after_eos"  # only PPO has a setting for this
    if isinstance(settings, Ppo) and settings.score_at == "eos":
        # The episode is then over at EOS, so the value one position further does not count.
        score_at = "eos"
        value_mask = response_mask

    kl = functional.kl_estimate(episodes.logprobs, episodes.ref_logprobs)
    rewards = functional.shape_rewards(
        kl,
        episodes.rewarded_scores,
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
    """Step 5: the algorithm's advantages, whitened if `settings.whiten_advantages` is on.

    Returns this process's episodes. Raises ValueError if the algorithm needs a critic's values and
    there are none.
    """
    rewards = shaped.rewards
    if settings.whiten_rewards:
        # The mean is not shifted (detail 24): a shift would add a constant to the reward of every
        # token, and so reward or punish length.
        rewards = whiten(accelerator, rewards, shaped.value_mask, settings, shift_mean=False)

    # Compute on the episodes of all devices, then keep this process's rows.
    batch = global_batch(accelerator, shaped, rewards)
    batch_advantages, batch_returns = algorithm.advantages(batch, settings)
    count = len(rewards)
    advantages = own_rows(accelerator, batch_advantages, count)
    returns = None
    if batch_returns is not None:
        returns = own_rows(accelerator, batch_returns, count)

    # The position after EOS has no token, so its advantage is 0 in either case.
    if settings.whiten_advantages:
        advantages = whiten(accelerator, advantages, shaped.response_mask, settings)
    else:
        advantages = torch.where(shaped.response_mask, advantages, 0.0)

    columns = vars(shaped) | {"rewards": rewards}
    return Rollout(**columns, advantages=advantages, returns=returns)


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
    """This process's rows of a gathered tensor that has `count` rows from each process."""
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
