"""RLOO, a rival of PPO without a critic (Ahmadian et al. 2024).

One update is that of `stages/rl/grouped.py`. An episode's advantage is its summed reward, KL
penalty included, minus the mean of the other episodes of its query; one step, unclipped.
"""

from stages.functional import leave_one_out
from stages.rl.grouped import train_grouped
from stages.settings.config import Config


def train_rloo(config: Config) -> None:
    """Run the stage."""
    train_grouped(config, config.rloo, leave_one_out)
