"""The settings of RLOO: those that it shares with PPO, and its groups. Standard library only."""

from dataclasses import dataclass

from stages.settings.checks import require
from stages.settings.ppo import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class Rloo(PolicyGradient):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024): no critic, no clipping."""

    num_ppo_epochs: int = 1
    cliprange: float = 0.0
    samples_per_query: int = 4
    """Episodes of each query, whose mean is the others' baseline; they share a batch."""

    def __post_init__(self) -> None:
        self.check("rloo")
        require(self.samples_per_query > 1, "rloo.samples_per_query", "be at least 2")
        whole = self.batch_size % self.samples_per_query == 0
        require(whole, "rloo.batch_size", "divide by rloo.samples_per_query")
