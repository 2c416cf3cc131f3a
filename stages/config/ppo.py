"""The settings of policy-gradient algorithms: what all share, and what PPO's critic adds.

Defaults are the paper's, names are TRL's. Where the paper's code has quirks (`PAPER_QUIRKS`), the
defaults are what we consider right; `compat="paper"` restores the quirks. Algorithms without a
critic change a few defaults in `stages/rl/algorithms.py`.
"""

from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from stages.config.section import (
    MOST,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

MANY_BELOW = 0.3
"""A warning if more responses end and score below what a missing EOS is given."""
PAPER_QUIRKS = {
    "whiten_over": "process",
    "loss_mean": "microbatches",
    "logprobs": "sampled",
    "logprob_dtype": "bf16",
}

LossMean = Literal["tokens", "sequences", "episodes", "microbatches"]


class PolicyGradient(Section):
    """What all policy-gradient algorithms have in common. Names are TRL's."""

    learning_rate: PositiveFloat = 3e-6
    """Learning rate of the first update. It decays linearly: the last of N updates uses
    learning_rate / N."""
    max_grad_norm: NonNegativeFloat = 0.0
    """Maximum norm of the policy's gradient. 0: no clipping, as in Huang et al. 2024."""
    total_episodes: PositiveInt = 1_000_000
    """Episodes of the whole run."""
    batch_size: PositiveInt = 512
    """Episodes per update, over all devices."""
    samples_per_query: PositiveInt = 1
    """Responses to each query. They share a minibatch, and the query is computed once for all."""
    num_ppo_epochs: PositiveInt = 4
    """Passes over the episodes of an update."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass. If above 1, which episodes share a minibatch depends on the number
    of processes, as in Huang et al. 2024."""
    target_kl: NonNegativeFloat = 0.0
    """An update stops after an epoch whose mean policy/approxkl_avg is above this, nats per token.
    Each step measures it before it changes the weights. 0: never, as in Huang et al. 2024."""
    loss_mean: LossMean = "tokens"
    """How the losses of tokens are averaged. `tokens`: mean over the minibatch's tokens.
    `sequences`: mean of the sequences' means. `episodes`: mean of the sequences' sums, so that
    nothing is divided by a length (RLOO, Dr.GRPO). `microbatches`: mean of the microbatches' means,
    as in Huang et al. 2024."""
    temperature: float = Field(default=0.7, ge=1e-6, le=100)
    """Temperature of sampling and of every log-probability."""
    dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Dropout in policy and critic during training. Huang et al. 2024, detail 7: off."""
    logprobs: Literal["recomputed", "sampled"] = "recomputed"
    """Source of the rollout's log-probabilities: `recomputed` by the training pass, or `sampled`,
    taken from the sampler (Huang et al. 2024)."""
    logprob_dtype: Literal["float32", "bf16"] = "float32"
    """Precision of the log-softmax. Huang et al. 2024 uses `bf16`."""

    reward_normalization: bool = True
    """Whether the mean score of the references is subtracted from all scores, and from a critic
    that starts as the reward model (detail 15)."""
    eos_trick: Literal["replace", "subtract", "off"] = "replace"
    """For a response without EOS, missing_eos_penalty replaces the score (`replace`, as in Huang et
    al. 2024, detail 23), is added to it (`subtract`, as in TRL), or is not used (`off`)."""
    missing_eos_penalty: float = Field(default=-1.0, le=0, ge=-MOST)
    """Score, or change of the score, of a response without EOS, reward units, at most 0. TRL
    subtracts 1 where `subtract` adds this -1."""
    score_shaping: Literal["off", "preference"] = "off"
    """What of a score is rewarded: the score (`off`); or its `preference`, sigmoid(score -
    reference score), the reward model's probability that the response is preferred to its query's
    human reference (PAR, arXiv 2502.18770). Each query then needs a reference. A preference lies in
    [0, 1], so reward_normalization cancels out, the EOS trick's -1 is below all preferences, and
    kl_coef weighs more than it does against scores."""
    whiten_rewards: bool = False
    """Scale rewards to unit variance, without shifting the mean (Huang et al. 2024, detail 24)."""
    whiten_advantages: bool = True
    """Scale advantages to mean 0 and unit variance (Huang et al. 2024, detail 25)."""
    whiten_over: Literal["batch", "process"] = "batch"
    """What is whitened together: the global `batch`, or the part of each `process`, as in Huang et
    al. 2024."""

    kl_coef: NonNegativeFloat = 0.05
    """Weight of the KL penalty, reward units per nat."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL penalty is applied: to every token's `reward` (Huang et al. 2024), or as a term
    of the `loss`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty: k1 in the reward (Huang et al. 2024); k2 or k3 in the loss, or
    k1 or k3 with kl_correction."""
    kl_correction: Literal["off", "token", "sequence"] = "off"
    """Importance weight of the KL in the loss: `off`; the ratio of each `token`, which is exact for
    responses of one token; or the product of the ratios of the `sequence`, which is exact for whole
    responses (k1, k3)."""
    kl_target: NonNegativeFloat = 0.0
    """Target of objective/kl, nats per episode, to which kl_coef adapts (Ziegler et al. 2019). 0:
    kl_coef is fixed, as in Huang et al. 2024."""
    kl_horizon: PositiveInt = 10_000
    """Number of episodes over which an adaptive kl_coef reacts; more than a fifth of batch_size."""

    cliprange: NonNegativeFloat = 0.2
    """The policy's ratio is clipped to [1 - cliprange, 1 + cliprange]. 0: no clipping."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus (mean entropy per token) in the loss. 0 in Huang et al. 2024."""
    samples_every: PositiveInt = 20
    """Number of updates between two groups of samples in samples.jsonl."""

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        section = self.section()
        if self.total_episodes < self.batch_size:
            raise ValueError(
                f"{section}.total_episodes must fill one batch, {section}.batch_size="
                f"{self.batch_size}"
            )
        parts = self.samples_per_query * self.num_minibatches
        if self.batch_size % parts:
            raise ValueError(
                f"{section}.batch_size must be divisible by {section}.samples_per_query times"
                f" {section}.num_minibatches, {parts}"
            )
        return self

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        section = self.section()
        is_k1 = self.kl_estimator == "k1"
        is_in_loss = self.kl_in == "loss"
        is_corrected = self.kl_correction != "off"

        if not is_k1 and not is_in_loss:
            raise ValueError(
                f"{section}.kl_estimator must be k1 with {section}.kl_in=reward: as a reward,"
                f" {self.kl_estimator} hardly restrains the policy, or pushes it the wrong way;"
                f" keep k1, or set {section}.kl_in=loss"
            )
        if is_k1 and is_in_loss and not is_corrected:
            raise ValueError(
                f"{section}.kl_estimator must be k2 or k3 with {section}.kl_in=loss (k1's gradient"
                f" is 0 on average), or set {section}.kl_correction=sequence"
            )
        if is_corrected and not is_in_loss:
            raise ValueError(
                f"{section}.kl_correction must be off with {section}.kl_in=reward: samples of the"
                " reward need no correction"
            )
        if is_corrected and self.kl_estimator == "k2":
            raise ValueError(
                f"{section}.kl_estimator must be k1 or k3 with {section}.kl_correction: the mean of"
                " k2 is not the KL"
            )
        return self

    @model_validator(mode="after")
    def _check_adaptive_kl(self) -> Self:
        section = self.section()
        if self.kl_target and not self.kl_coef:
            raise ValueError(
                f"{section}.kl_coef must be above 0 with {section}.kl_target: an adaptive"
                " coefficient of 0 stays 0"
            )
        # An update lowers the coefficient by at most 0.2 * batch_size / kl_horizon of itself.
        if self.kl_target and 5 * self.kl_horizon <= self.batch_size:
            raise ValueError(
                f"{section}.kl_horizon must be above {self.batch_size // 5}, a fifth of"
                f" {section}.batch_size"
            )
        return self

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; an incomplete batch is left out (Huang et al. 2024)."""
        return self.total_episodes // self.batch_size

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained."""
        return False

    def policy_learns(self, update: int) -> bool:
        """Whether the policy is trained in an update, counted from 0."""
        return True


class Ppo(PolicyGradient):
    """PPO (Huang et al. 2024, details 20 to 25): its critic, GAE, and the pretraining term."""

    compat: Literal["", "paper"] = ""
    """`paper` sets whiten_over, loss_mean, logprobs and logprob_dtype as in the paper's code."""

    critic_init: Literal["reward_model", "zero", "sft"] = "reward_model"
    """What the critic starts from. `reward_model`: the reward model (Huang et al. 2024, detail 22).
    `zero`: the reward model's backbone with a head of zeros, so that every value is 0 at first, or
    the middle of the range with bound_values. `sft`: the SFT model's backbone with a new head."""
    baseline: Literal["critic", "mean", "gated"] = "critic"
    """What a return is compared with. `critic`: the critic's values (GAE, as in Huang et al. 2024).
    `mean`: the batch's mean return, without any critic. `gated`: the critic in batches where it
    explains some of the returns, otherwise the mean (Pan et al. 2026, arXiv 2604.19485)."""
    critic_updates: NonNegativeInt = 0
    """Number of critic warm-up updates, in which only the critic is trained (VC-PPO, arXiv
    2503.01491). They count toward total_episodes and the learning rate's decay, so the policy
    starts below learning_rate. 0 in Huang et al. 2024."""
    critic_learning_rate: NonNegativeFloat = 0.0
    """The critic's learning rate, which decays in the same way. 0: the policy's, as in Huang et al.
    2024."""
    critic_max_grad_norm: NonNegativeFloat = 0.0
    """Maximum norm of the critic's gradient. 0: no clipping, as in Huang et al. 2024."""
    score_at: Literal["after_eos", "eos"] = "after_eos"
    """Where the score is added to the rewards: at `eos`, or one position after it (`after_eos`, as
    in Huang et al. 2024)."""

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of GAE."""
    lam_value: float = Field(default=-1.0, ge=-1, le=1)
    """Lambda of the critic's targets (decoupled GAE, VC-PPO). -1: the same as lam."""
    lam_length_alpha: NonNegativeFloat = 0.0
    """Lambda of the advantages is 1 - 1 / (lam_length_alpha * response tokens), at least 0, in
    place of lam (0.05 in VAPO, arXiv 2504.05118; 0.4 in BPCO, arXiv 2608.23566). 0: lam."""
    bound_values: bool = False
    """Whether the critic's outputs are squashed into the range of the scores (BPCO, arXiv
    2608.23566): that of the references, of the first update's responses and of a missing EOS; with
    score_shaping=preference, of 0 to 1 and a missing EOS. The KL penalty does not widen it, so
    returns may lie outside: see val/returns_outside_range."""
    vf_coef: NonNegativeFloat = 0.1
    """Weight of the value loss."""
    clip_values: bool = True
    """Whether the value loss is clipped."""
    cliprange_value: PositiveFloat = 0.2
    """New values are clipped to this distance from the rollout's, reward units."""
    ptx_coef: NonNegativeFloat = 0.0
    """Weight of the SFT loss on reference summaries, one for each episode (InstructGPT's
    PPO-ptx)."""
    checkpoints: NonNegativeInt = 0
    """Maximum number of policies to keep during training, at about equal steps of KL. Each is saved
    as a whole model and judged like the final one. 0: none."""

    @model_validator(mode="before")
    @classmethod
    def _set_quirks(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`compat=paper` overrides the settings in `PAPER_QUIRKS`."""
        return values | PAPER_QUIRKS if values.get("compat") == "paper" else values

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if not self.cliprange:
            raise ValueError(f"ppo.cliprange must be above 0, not {self.cliprange}")
        if self.lam_value < 0 and self.lam_value != -1:
            raise ValueError(f"ppo.lam_value must be -1 or lie in [0, 1], not {self.lam_value}")

        if self.lam_length_alpha and not self.uses_critic:
            raise ValueError(
                "ppo.lam_length_alpha must be 0 with ppo.baseline=mean, which has no lambda"
            )
        if self.lam_length_alpha and self.lam_value < 0:
            raise ValueError(
                "ppo.lam_value must be set with ppo.lam_length_alpha: the critic's targets have one"
                " lambda for all lengths, 1 in VAPO and BPCO"
            )
        if self.bound_values and not self.uses_critic:
            raise ValueError(
                "ppo.bound_values must be false with ppo.baseline=mean, which trains no critic"
            )
        if self.bound_values and self.whiten_rewards:
            raise ValueError(
                "ppo.bound_values must be false with ppo.whiten_rewards, which gives the rewards"
                " another scale than the scores"
            )

        updates = self.num_updates
        if self.critic_updates >= updates:
            raise ValueError(
                f"ppo.critic_updates must be fewer than the {updates} updates of the run"
            )
        if self.critic_updates and not self.uses_critic:
            raise ValueError(
                "ppo.critic_updates must be 0 with ppo.baseline=mean, which trains no critic"
            )
        policy_updates = updates - self.critic_updates
        if self.checkpoints >= policy_updates:
            raise ValueError(
                f"ppo.checkpoints must be fewer than the {policy_updates} updates of the policy"
            )
        return self

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained. With baseline=mean, the batch's mean return replaces it."""
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
