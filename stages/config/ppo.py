"""The settings of policy-gradient algorithms: what all share, and what PPO's critic adds.

Defaults are the paper's, names are TRL's. Where the paper's code has quirks (`PAPER_QUIRKS`), the
defaults are what we hold to be right; `compat="paper"` sets the quirks. Algorithms without a critic
change a few defaults in `stages/rl/algorithms.py`. Standard library only.
"""

from dataclasses import dataclass
from typing import ClassVar

from stages.config.checks import Section, require

CHOICES = {
    "compat": ("", "paper"),
    "eos_trick": ("replace", "subtract", "off"),
    "score_at": ("after_eos", "eos"),
    "whiten_over": ("batch", "process"),
    "critic_init": ("reward_model", "zero", "sft"),
    "baseline": ("critic", "mean", "gated"),
    "kl_in": ("reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_correction": ("off", "token", "sequence"),
    "loss_mean": ("tokens", "sequences", "episodes", "microbatches"),
    "logprobs": ("recomputed", "sampled"),
    "logprob_dtype": ("float32", "bf16"),
}
MANY_BELOW = 0.3
"""A warning if more responses end and score below what a missing EOS is given."""
PAPER_QUIRKS = {
    "whiten_over": "process",
    "loss_mean": "microbatches",
    "logprobs": "sampled",
    "logprob_dtype": "bf16",
}


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Section):
    """What all policy-gradient algorithms have in common; names as in TRL."""

    choices = CHOICES
    ranges: ClassVar = {"dropout": (0, 0.9), "gamma": (0, 1), "lam": (0, 1), "lam_value": (-1, 1)}
    may_be_0 = ("kl_coef", "vf_coef", "cliprange")

    learning_rate: float = 3e-6
    """Decays linearly; the last of N updates has learning_rate / N."""
    max_grad_norm: float = 0.0
    """The policy's gradient is clipped to this norm; 0: never, as in Huang et al. 2024."""
    total_episodes: int = 1_000_000
    """Episodes of the whole run."""
    batch_size: int = 512
    """Episodes per update, over all devices."""
    samples_per_query: int = 1
    """Responses to each query. They are in one minibatch and share the computation of the query."""
    num_ppo_epochs: int = 4
    """Passes over the episodes of an update."""
    num_minibatches: int = 1
    """Optimizer steps per pass. Above 1, which episodes share a minibatch depends on the number of
    processes, as in Huang et al. 2024."""
    target_kl: float = 0.0
    """An update ends after an epoch whose mean policy/approxkl_avg is above this, nats per token. A
    step measures it before it changes the weights. 0: never, as in Huang et al. 2024."""
    loss_mean: str = "tokens"
    """`tokens`: mean over the minibatch's tokens; `sequences`: over its sequences' own means;
    `episodes`: over its sequences' sums, so that length divides nothing (RLOO, Dr.GRPO);
    `microbatches`: over its microbatches' means, as in Huang et al. 2024."""
    temperature: float = 0.7
    """Temperature of sampling and of every log-probability."""
    dropout: float = 0.0
    """Dropout in policy and critic while they are trained; Huang et al. 2024, detail 7: off."""
    logprobs: str = "recomputed"
    """The rollout's log-probabilities: `recomputed` by the training pass, or `sampled`, those of
    the sampler (Huang et al. 2024)."""
    logprob_dtype: str = "float32"
    """Precision of the log-softmax; Huang et al. 2024 uses `bf16`."""

    reward_normalization: bool = True
    """Whether scores, and a critic that starts as the reward model, are normalized (detail 15)."""
    eos_trick: str = "replace"
    """For a response without EOS, missing_eos_penalty replaces the score (`replace`, as in Huang et
    al. 2024, detail 23), is added to it (`subtract`, as in TRL), or does nothing (`off`)."""
    missing_eos_penalty: float = -1.0
    """Reward units, at most 0. TRL subtracts a 1 where `subtract` adds this -1."""
    whiten_rewards: bool = False
    """Scale rewards to unit variance, without shifting the mean (Huang et al. 2024, detail 24)."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and unit variance (Huang et al. 2024, detail 25)."""
    whiten_over: str = "batch"
    """`batch`: whiten over the global batch; `process`: over each device's part, as in Huang et al.
    2024."""

    kl_coef: float = 0.05
    """Weight of the KL penalty, reward units per nat."""
    kl_in: str = "reward"
    """Where the KL penalty is applied: to every token's `reward` (Huang et al. 2024), or as a term
    of the `loss`."""
    kl_estimator: str = "k1"
    """Estimator of the KL that is trained on: k1 in the reward (Huang et al. 2024); k2 or k3 in the
    loss, and with kl_correction k1 too."""
    kl_correction: str = "off"
    """Importance weight of the KL in the loss: `off`; the `token`'s ratio, exact for responses of
    one token; or the product of the `sequence`'s ratios, exact for whole responses (k1, k3)."""
    kl_target: float = 0.0
    """kl_coef adapts so that objective/kl approaches this, nats per episode (Ziegler et al. 2019);
    0: kl_coef is fixed, as in Huang et al. 2024."""
    kl_horizon: int = 10_000
    """Episodes over which an adaptive kl_coef reacts; more than a fifth of batch_size."""

    cliprange: float = 0.2
    """The policy's ratio is clipped to 1 - cliprange and 1 + cliprange; 0: no clipping."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (mean entropy per token) in the loss; Huang et al. 2024: 0."""
    samples_every: int = 20
    """Updates between two tables of samples in samples.jsonl."""

    def __post_init__(self) -> None:
        super().__post_init__()
        section = self.section()
        self._check_kl(section)
        costs = self.missing_eos_penalty <= 0
        require(costs, f"{section}.missing_eos_penalty", "be at most 0: -1 costs 1 (1.0 in TRL)")
        fills = self.total_episodes >= self.batch_size
        require(fills, f"{section}.total_episodes", "fill one batch")
        least = self.samples_per_query * self.num_minibatches
        by = f"be divisible by {section}.samples_per_query times {section}.num_minibatches, {least}"
        require(self.batch_size % least == 0, f"{section}.batch_size", by)

    def _check_kl(self, section: str) -> None:
        is_k1 = self.kl_estimator == "k1"
        in_loss = self.kl_in == "loss"
        is_corrected = self.kl_correction != "off"
        require(
            is_k1 or in_loss,
            f"{section}.kl_estimator",
            f"be k1 with {section}.kl_in=reward: as a reward, {self.kl_estimator} hardly restrains "
            f"the policy, or pushes it the wrong way. Keep k1, or set {section}.kl_in=loss",
        )
        require(
            not (is_k1 and in_loss) or is_corrected,
            f"{section}.kl_estimator",
            f"be k2 or k3 with {section}.kl_in=loss (k1's gradient is 0 on average), or set "
            f"{section}.kl_correction=sequence",
        )
        require(
            in_loss or not is_corrected,
            f"{section}.kl_correction",
            f"be off with {section}.kl_in=reward: samples of the reward need no correction",
        )
        require(
            not is_corrected or self.kl_estimator != "k2",
            f"{section}.kl_estimator",
            f"be k1 or k3 with {section}.kl_correction: the mean of k2 is not the KL",
        )
        if not self.kl_target:
            return
        moves = f"be above 0 with {section}.kl_target: an adaptive coefficient of 0 stays 0"
        require(self.kl_coef > 0, f"{section}.kl_coef", moves)
        # An update lowers the coefficient by at most 0.2 * batch_size / kl_horizon of itself.
        least = f"be above {self.batch_size // 5}, a fifth of {section}.batch_size"
        require(5 * self.kl_horizon > self.batch_size, f"{section}.kl_horizon", least)

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; a batch that is not full is left out (Huang et al. 2024)."""
        return self.total_episodes // self.batch_size

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained."""
        return False

    def policy_learns(self, update: int) -> bool:
        """Whether the policy is trained in an update, counted from 0."""
        return True


@dataclass(frozen=True, kw_only=True)
class Ppo(PolicyGradient):
    """PPO (Huang et al. 2024, details 20 to 25): its critic, GAE, and the pretraining term."""

    compat: str = ""
    """`paper`: whiten_over, loss_mean, logprobs and logprob_dtype as in the paper's code."""

    critic_init: str = "reward_model"
    """`reward_model` (Huang et al. 2024, detail 22); `zero`: its backbone with a head of zeros, so
    that every value is 0 at the start; `sft`: the SFT model's backbone with a new head."""
    baseline: str = "critic"
    """What a return is compared with: the `critic`'s values (GAE, as in Huang et al. 2024), the
    batch's `mean` return, without any critic, or `gated`: the critic in batches where it explains
    some of the returns, else the mean (Pan et al. 2026, arXiv 2604.19485)."""
    critic_updates: int = 0
    """Number of critic warm-up updates, of total_episodes, in which only the critic is trained
    (VC-PPO, arXiv 2503.01491). The policy starts at a lower rate than learning_rate. 0 in Huang et
    al. 2024."""
    critic_learning_rate: float = 0.0
    """The critic's learning rate, decaying alike; 0: learning_rate, as in Huang et al. 2024."""
    critic_max_grad_norm: float = 0.0
    """The critic's gradient is clipped to this norm; 0: never, as in Huang et al. 2024."""
    score_at: str = "after_eos"
    """Where the score is added to the rewards: at `eos`, or one position after it (`after_eos`, as
    in Huang et al. 2024)."""

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of GAE."""
    lam_value: float = -1.0
    """Lambda of the critic's targets (decoupled GAE, VC-PPO); -1: that of the advantages."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    clip_values: bool = True
    """Whether the value loss is clipped."""
    cliprange_value: float = 0.2
    """New values are clipped to this distance from the rollout's, reward units."""
    ptx_coef: float = 0.0
    """Weight of the SFT loss on as many reference summaries as episodes (InstructGPT's PPO-ptx)."""
    checkpoints: int = 0
    """Most policies kept during training, at about equal steps of KL, as whole models on disk. They
    are judged as the final one is; 0: none."""

    def __post_init__(self) -> None:
        for name, value in self.quirks.items():
            object.__setattr__(self, name, value)  # as dataclasses themselves do when frozen
        super().__post_init__()
        require(self.cliprange > 0, "ppo.cliprange", f"be above 0, not {self.cliprange}")
        is_own = self.lam_value == -1 or self.lam_value >= 0
        require(is_own, "ppo.lam_value", f"be -1 or lie in [0, 1], not {self.lam_value}")
        fewer, updates = self.critic_updates < self.num_updates, self.num_updates
        require(fewer, "ppo.critic_updates", f"be fewer than the {updates} updates of the run")
        without = "be 0 with ppo.baseline=mean, which trains no critic"
        require(self.uses_critic or not self.critic_updates, "ppo.critic_updates", without)
        policy_updates = updates - self.critic_updates
        fewer = self.checkpoints < policy_updates
        require(
            fewer, "ppo.checkpoints", f"be fewer than the {policy_updates} updates of the policy"
        )

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained: not where the batch's mean return takes its place."""
        return self.baseline != "mean"

    @property
    def critic_lam(self) -> float:
        """Lambda of the critic's targets."""
        return self.lam if self.lam_value < 0 else self.lam_value

    def policy_learns(self, update: int) -> bool:
        """Whether the policy is trained in an update, counted from 0, or only the critic."""
        return update >= self.critic_updates

    @property
    def quirks(self) -> dict[str, str]:
        """The settings that `compat` fixes."""
        return PAPER_QUIRKS if self.compat == "paper" else {}
