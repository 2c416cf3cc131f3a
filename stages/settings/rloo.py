"""The settings of RLOO and Dr.GRPO: those that they share with PPO. Standard library only."""

from dataclasses import dataclass
from typing import ClassVar

from stages.settings.checks import require
from stages.settings.ppo import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class Grouped(PolicyGradient):
    """Policy gradients without a critic: the other samples of a query are the baseline."""

    section: ClassVar[str]
    loss_mean: str = "episodes"
    samples_per_query: int = 4

    def __post_init__(self) -> None:
        self.check(self.section)
        alone = f"{self.section}.samples_per_query"
        require(self.samples_per_query > 1, alone, "be at least 2")


@dataclass(frozen=True, kw_only=True)
class Rloo(Grouped):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024): one pass, no clipping."""

    section = "rloo"
    num_ppo_epochs: int = 1
    cliprange: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Grpo(Grouped):
    """GRPO as Dr.GRPO corrects it (Liu et al. 2025): no deviation, no division by length."""

    section = "grpo"
