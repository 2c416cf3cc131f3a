"""The settings of PPO, RLOO and Dr.GRPO, and of adapters. Standard library only.

Defaults are the paper's, names are TRL's. Where the paper's code has quirks (`PAPER_QUIRKS`), the
defaults are what we hold to be right; `compat="paper"` sets the quirks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from stages.settings.checks import Section, require
from stages.settings.stages import LORA_STAGES

CHOICES = {
    "compat": ("", "paper"),
    "eos_trick": ("replace", "subtract", "off"),
    "score_at": ("after_eos", "eos"),
    "whiten_over": ("batch", "process"),
    "critic_init": ("reward_model", "zero", "sft"),
    "baseline": ("critic", "mean", "gated"),
    "kl_in": ("reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3"),
    "loss_mean": ("tokens", "sequences", "episodes", "microbatches"),
    "logprobs": ("recomputed", "sampled"),
    "logprob_dtype": ("float32", "bf16"),
}
MANY_BELOW = 0.3
"""A warning if more responses end and score below what a missing EOS is given."""
ALL_LINEAR = "all-linear"
# Settings that are no more -> what turned them off.
REMOVED: dict[str, Any] = {
    "kl_target": 0.0,
    "kl_horizon": 10_000,
    "entropy_coef": 0.0,
    "critic_max_grad_norm": 0.0,
    "lam_value": -1.0,
    "ptx_coef": 0.0,
}
PAPER_QUIRKS = {
    "whiten_over": "process",
    "loss_mean": "microbatches",
    "logprobs": "sampled",
    "logprob_dtype": "bf16",
}


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Section):
    """What PPO and its rivals have in common; names as in TRL."""

    choices = CHOICES
    ranges: ClassVar = {"dropout": (0, 0.9), "gamma": (0, 1), "lam": (0, 1)}
    may_be_0 = ("kl_coef", "vf_coef")

    learning_rate: float = 3e-6
    """Decays linearly; the last of N updates has learning_rate / N."""
    max_grad_norm: float = 0.0
    """The policy's gradient is scaled down to this norm; 0: never, as in Huang et al. 2024."""
    total_episodes: int = 1_000_000
    """Episodes of the whole run."""
    batch_size: int = 512
    """Episodes per update, over all devices."""
    samples_per_query: int = 1
    """Episodes of each query, in one minibatch and one row: their query is computed once."""
    num_ppo_epochs: int = 4
    """Passes over the episodes of an update."""
    num_minibatches: int = 1
    """Optimizer steps per pass. Above 1, which episodes meet in a minibatch depends on the number
    of processes, as in Huang et al. 2024."""
    target_kl: float = 0.0
    """An update ends after an epoch whose policy/approxkl_avg is above this, nats per token. Each
    step measures it before it learns. 0: never, as in Huang et al. 2024."""
    loss_mean: str = "tokens"
    """`tokens`: mean over the minibatch's tokens; `sequences`: over its sequences' own means;
    `episodes`: over its sequences' sums, so that length divides nothing (RLOO, Dr.GRPO);
    `microbatches`: over its microbatches' means, as in Huang et al. 2024."""
    temperature: float = 0.7
    """Of sampling, and of every log-probability."""
    dropout: float = 0.0
    """Probability in policy and critic while they learn; Huang et al. 2024, detail 7: off."""
    logprobs: str = "recomputed"
    """Of the rollout: `recomputed` in the training pass, or `sampled` (Huang et al. 2024)."""
    logprob_dtype: str = "float32"
    """Precision of the log-softmax; Huang et al. 2024 has `bf16`."""

    reward_normalization: bool = True
    """Whether scores, and a critic from the reward model, are normalised (detail 15)."""
    eos_trick: str = "replace"
    """For a response without EOS, missing_eos_penalty replaces the score (`replace`, as in Huang et
    al. 2024, detail 23), is added to it (`subtract`, as in TRL), or does nothing (`off`)."""
    missing_eos_penalty: float = -1.0
    """Reward units, at most 0. TRL subtracts a 1 where `subtract` adds this -1."""
    kl_coef: float = 0.05
    """Weight of the KL penalty, reward units per nat."""
    kl_in: str = "reward"
    """Where the KL penalty stands: in every token's `reward` (Huang et al. 2024) or the `loss`."""
    kl_estimator: str = "k1"
    """Estimator of the KL that is trained on: k1 (Huang et al. 2024), k2 or k3."""

    cliprange: float = 0.2
    """The policy's ratio stays within 1 - cliprange and 1 + cliprange; 0: free (not in PPO)."""
    samples_every: int = 20
    """Updates between two tables of samples in samples.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        section = self.section()
        k1_in_loss = self.kl_in == "loss" and self.kl_estimator == "k1"
        require(
            not k1_in_loss,
            f"{section}.kl_estimator",
            f"be k2 or k3 with {section}.kl_in=loss (k1's gradient is 0 on average)",
        )
        costs = self.missing_eos_penalty <= 0
        require(costs, f"{section}.missing_eos_penalty", "be at most 0: -1 costs 1 (1.0 in TRL)")
        fills = self.total_episodes >= self.batch_size
        require(fills, f"{section}.total_episodes", "fill one batch")
        least = self.samples_per_query * self.num_minibatches
        by = f"be divisible by {section}.samples_per_query times {section}.num_minibatches, {least}"
        require(self.batch_size % least == 0, f"{section}.batch_size", by)

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; a batch that is not full is left out (Huang et al. 2024)."""
        return self.total_episodes // self.batch_size

    def policy_learns(self, update: int) -> bool:
        """Whether the policy learns in an update, counted from 0."""
        return True


@dataclass(frozen=True, kw_only=True)
class Ppo(PolicyGradient):
    """PPO (Huang et al. 2024, details 20 to 25): its critic, GAE and whitening."""

    compat: str = ""
    """`paper`: whiten_over, loss_mean, logprobs and logprob_dtype as in the paper's code."""

    critic_init: str = "reward_model"
    """`reward_model` (Huang et al. 2024, detail 22); `zero`: its backbone with a head of zeros, so
    that every value is 0 at the start; `sft`: the SFT model's backbone with a new head."""
    baseline: str = "critic"
    """What a return is compared with: the `critic`'s values (GAE, as in Huang et al. 2024), the
    batch's `mean` return, or `gated`: the critic in batches where its explained variance is above
    0, else the mean (Pan et al. 2026, arXiv 2604.19485). The critic learns in every case."""
    critic_updates: int = 0
    """First updates, of total_episodes, in which the critic alone learns (VC-PPO, arXiv
    2503.01491); the policy begins at a lower rate than learning_rate. 0 in Huang et al. 2024."""
    critic_learning_rate: float = 0.0
    """Of the critic, with the same decay; 0: learning_rate, as in Huang et al. 2024."""
    score_at: str = "after_eos"
    """Where the score stands among the rewards: at `eos`, or one position after it (`after_eos`, as
    in Huang et al. 2024)."""
    whiten_rewards: bool = False
    """Scale rewards to unit variance, without shifting the mean (Huang et al. 2024, detail 24)."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and unit variance (Huang et al. 2024, detail 25)."""
    whiten_over: str = "batch"
    """`batch`: the global batch; `process`: each device apart, as in Huang et al. 2024."""

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of GAE."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    clip_values: bool = True
    """Whether the value loss is clipped."""
    cliprange_value: float = 0.2
    """New values are clipped to this distance from the rollout's, reward units."""
    checkpoints: int = 0
    """Policies kept on the way at most, at about equal steps of KL, whole models on the disk. They
    are judged as the last one is; 0: none."""

    def __post_init__(self) -> None:
        for name, value in self.quirks.items():
            object.__setattr__(self, name, value)  # as dataclasses themselves do when frozen
        super().__post_init__()
        fewer, updates = self.critic_updates < self.num_updates, self.num_updates
        require(fewer, "ppo.critic_updates", f"be fewer than the {updates} updates of the run")
        learns = updates - self.critic_updates
        fewer = self.checkpoints < learns
        require(fewer, "ppo.checkpoints", f"be fewer than the {learns} updates of the policy")

    def policy_learns(self, update: int) -> bool:
        """Whether the policy learns in an update, counted from 0, or the critic alone."""
        return update >= self.critic_updates

    @property
    def quirks(self) -> dict[str, str]:
        """The settings that `compat` fixes."""
        return PAPER_QUIRKS if self.compat == "paper" else {}


@dataclass(frozen=True, kw_only=True)
class Grouped(PolicyGradient):
    """Policy gradients without a critic: the other samples of a query are the baseline."""

    may_be_0 = ("kl_coef", "cliprange")
    loss_mean: str = "episodes"
    samples_per_query: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        several = self.samples_per_query > 1
        require(several, f"{self.section()}.samples_per_query", "be at least 2")


@dataclass(frozen=True, kw_only=True)
class Rloo(Grouped):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024): one pass, no clipping."""

    num_ppo_epochs: int = 1
    cliprange: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Grpo(Grouped):
    """GRPO as Dr.GRPO corrects it (Liu et al. 2025): no deviation, no division by length."""


@dataclass(frozen=True, kw_only=True)
class Lora(Section):
    """Adapters (LoRA): they learn instead of linear layers, and are merged into them when saved.

    Off by default, as in Huang et al. 2024.
    """

    rank: int = 0
    """Width of an adapter; 0: no adapters, all weights learn."""
    alpha: int = 32
    """An adapter's product is scaled by alpha / rank."""
    target_modules: str = ALL_LINEAR
    """The layers that get adapters: `all-linear`, or names of linear layers separated by commas. A
    name may be the end of a longer one: `dense` stands for `layers.0.attention.dense` too."""
    stages: str = ",".join(LORA_STAGES)
    """The stages that learn adapters, separated by commas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            all(self.target_names),
            "lora.target_modules",
            f"be {ALL_LINEAR}, or names of layers separated by commas",
        )
        known = set(self.stages.split(",")) <= set(LORA_STAGES)
        require(known, "lora.stages", f"be some of {','.join(LORA_STAGES)}")

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `target_modules`."""
        return tuple(name.strip() for name in self.target_modules.split(","))

    @property
    def adapted_stages(self) -> tuple[str, ...]:
        """The stages that learn adapters; none if the rank is 0."""
        return tuple(self.stages.split(",")) if self.rank else ()
