"""RLOO, a rival of PPO without a critic (Ahmadian et al. 2024).

One update is that of `stages/rl/grouped.py`. An episode's advantage is its summed reward, KL
penalty included, minus the mean of the other episodes of its query; one step, unclipped.
"""

from stages.driving.start import run_stage
from stages.functional import leave_one_out
from stages.rl.grouped import train_grouped
from stages.settings.config import Config


def train_rloo(config: Config) -> None:
    """Run the stage."""
    train_grouped(config, config.rloo, leave_one_out)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("rloo", train_rloo, argv, "RLOO, beside PPO")


if __name__ == "__main__":
    main()
