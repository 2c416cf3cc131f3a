"""The settings of PPO; defaults are the paper's, names are TRL's. Standard library only."""

from dataclasses import dataclass

from stages.errors import in_range, positive, require


@dataclass(frozen=True, kw_only=True)
class Ppo:
    """PPO (P1 details 20 to 25 and section B.3); names as in TRL."""

    learning_rate: float = 3e-6
    """Decays linearly; the last of N updates still has learning_rate / N."""
    total_episodes: int = 1_000_000
    batch_size: int = 512
    """Episodes per update, over all devices."""
    num_ppo_epochs: int = 4
    num_minibatches: int = 1
    kl_coef: float = 0.05
    """Reward units per nat."""
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    """Reward units."""
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    temperature: float = 0.7
    missing_eos_penalty: float = -1.0
    """The score of a response without EOS, in reward units (it replaces the score)."""
    whiten_rewards: bool = False
    samples_every: int = 20
    """Updates between two tables of samples in samples.jsonl."""

    def __post_init__(self) -> None:
        for name in (
            "learning_rate batch_size num_ppo_epochs num_minibatches cliprange "
            "cliprange_value temperature samples_every"
        ).split():
            positive(self, "ppo", name)
        for name in ("gamma", "lam"):
            in_range(self, "ppo", name, 0, 1)
        for name in ("kl_coef", "vf_coef"):
            require(getattr(self, name) >= 0, f"ppo.{name}", "be at least 0")
        require(self.total_episodes >= self.batch_size, "ppo.total_episodes", "fill one batch")
        require(
            self.batch_size % self.num_minibatches == 0, "ppo.batch_size", "divide by minibatches"
        )

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; episodes that do not fill a batch are left out, as in P1."""
        return self.total_episodes // self.batch_size
