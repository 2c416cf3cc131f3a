"""Whether the gate opens for critics of a chosen quality, in one or several processes."""

from dataclasses import replace
from typing import Any

from stages.config.ppo import Ppo
from stages.functional import explained_variance
from stages.rl.metrics import describe_critic
from tests.lib.episodes import PAD, two_episodes
from tests.lib.learners import rollout_from

# With lambda 1 the returns do not depend on the values.
GATED = Ppo(total_episodes=640, batch_size=64, baseline="gated", lam=1.0)


def open_gate(accelerator: Any, factor: float) -> tuple[float, bool]:
    """What the critic explains of this process's returns, and whether it is used for the batch.

    The episodes differ between processes. Values are `factor` times as far from the mean return as
    the returns are, so the critic explains 1 - (1 - factor)^2 of their variance.
    """
    episodes = two_episodes(seed=accelerator.process_index)
    rollout = rollout_from(episodes, GATED, PAD, accelerator=accelerator)
    assert rollout.returns is not None
    mean_return = rollout.returns[rollout.value_mask].mean()
    values = mean_return + factor * (rollout.returns - mean_return)

    rollout = rollout_from(replace(episodes, values=values), GATED, PAD, accelerator=accelerator)
    assert rollout.returns is not None
    explained = explained_variance(values, rollout.returns, rollout.value_mask).item()
    described = describe_critic(accelerator, rollout, GATED)
    return explained, described["policy/critic_used"] == 1.0
