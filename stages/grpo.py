"""Dr.GRPO, a rival of PPO without a critic (Liu et al. 2025, arXiv 2503.20783).

One update is that of `stages/rl/grouped.py`. An episode's advantage is its summed reward minus its
group's mean, and several clipped steps are taken on a batch, as in PPO.
differs: the KL penalty stands in the reward, as in PPO here; Dr.GRPO has none.
"""

from stages.functional import minus_group_mean
from stages.rl.grouped import train_grouped
from stages.settings.config import Config


def train_grpo(config: Config) -> None:
    """Run the stage."""
    train_grouped(config, config.grpo, minus_group_mean)
