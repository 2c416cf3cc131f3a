"""The settings of PPO; defaults are the paper's, names are TRL's. Standard library only.

Every detail that an ablation can turn has its switch here. `compat="paper"` sets the quirks of the
paper's code (`PAPER_QUIRKS`) where the defaults are what we hold to be right.
"""

from dataclasses import dataclass

from stages.settings.checks import at_least_0, in_range, one_of, positive, require

CHOICES = {
    "compat": ("", "paper"),
    "eos_trick": ("replace", "subtract", "off"),
    "score_at": ("after_eos", "eos"),
    "whiten_over": ("batch", "process"),
    "critic_init": ("reward_model", "sft"),
    "kl_in": ("reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3"),
    "loss_mean": ("tokens", "sequences", "microbatches"),
    "logprobs": ("recomputed", "sampled"),
    "logprob_dtype": ("float32", "bf16"),
}
PAPER_QUIRKS = {
    "whiten_over": "process",
    "loss_mean": "microbatches",
    "logprobs": "sampled",
    "logprob_dtype": "bf16",
}


@dataclass(frozen=True, kw_only=True)
class Ppo:
    """PPO (P1 details 20 to 25 and section B.3); names as in TRL."""

    compat: str = ""
    """`paper`: whiten_over, loss_mean, logprobs and logprob_dtype as in the paper's code."""

    learning_rate: float = 3e-6
    """Decays linearly; the last of N updates still has learning_rate / N."""
    critic_learning_rate: float = 0.0
    """Of the critic, with the same decay; 0: learning_rate, as in P1."""
    max_grad_norm: float = 0.0
    """The policy's gradient is scaled down to this norm; 0: never, as in P1."""
    critic_max_grad_norm: float = 0.0
    """The same for the critic's gradient."""
    total_episodes: int = 1_000_000
    batch_size: int = 512
    """Episodes per update, over all devices."""
    num_ppo_epochs: int = 4
    num_minibatches: int = 1
    """Above 1, which episodes meet in a minibatch depends on the number of processes, as in P1."""
    target_kl: float = 0.0
    """An update's epochs end after one whose policy/approxkl_avg is above this, nats per token;
    0: never, as in P1."""
    loss_mean: str = "tokens"
    """`tokens`: mean over the minibatch's tokens; `sequences`: over its sequences' own means;
    `microbatches`: over its microbatches' means as in P1, where memory knobs change results."""

    temperature: float = 0.7
    dropout: float = 0.0
    """Probability in policy and critic while they learn; P1 detail 7: off."""
    logprobs: str = "recomputed"
    """Of the rollout: `recomputed` by the training pass, or the sampler's (`sampled`, as in P1)."""
    logprob_dtype: str = "float32"
    """Precision of the log-softmax; `bf16` as in P1."""

    critic_init: str = "reward_model"
    """`reward_model` (P1 detail 22), or `sft`: its backbone with a new head."""
    reward_normalization: bool = True
    """Whether reward model and critic start from the normalised reward model (P1 detail 15)."""
    eos_trick: str = "replace"
    """A response without EOS: missing_eos_penalty replaces its score (P1 detail 23), is added to
    it (`subtract`, as in TRL), or nothing happens (`off`)."""
    missing_eos_penalty: float = -1.0
    """Reward units."""
    score_at: str = "after_eos"
    """Where the score stands among the rewards: one position after EOS as in P1, or at `eos`."""
    whiten_rewards: bool = False
    """P1 detail 24: scale to unit variance, without shifting the mean."""
    whiten_advantages: bool = True
    """P1 detail 25."""
    whiten_over: str = "batch"
    """`batch`: the global batch; `process`: each device apart, as in P1."""

    kl_coef: float = 0.05
    """Reward units per nat."""
    kl_in: str = "reward"
    """Where the KL penalty stands: in every token's `reward` (P1), or in the `loss`."""
    kl_estimator: str = "k1"
    """Of the KL that is trained on: k1 (P1), k2 or k3."""
    kl_target: float = 0.0
    """Adaptive kl_coef: steer objective/kl to this, nats per episode; 0: fixed, as in P1."""
    kl_horizon: int = 10_000
    """Episodes over which the adaptive kl_coef reacts."""

    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    vf_coef: float = 0.1
    clip_values: bool = True
    """Whether the value loss is clipped."""
    cliprange_value: float = 0.2
    """Reward units."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy per token, which the loss then rewards; 0 in P1."""
    ptx_coef: float = 0.0
    """Weight of the SFT loss on as many reference summaries as episodes (InstructGPT's PPO-ptx)."""
    samples_every: int = 20
    """Updates between two tables of samples in samples.jsonl."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            one_of(self, "ppo", name, choices)
        for name, value in self.quirks.items():
            object.__setattr__(self, name, value)  # as dataclasses themselves do when frozen
        counts = "total_episodes batch_size num_ppo_epochs num_minibatches kl_horizon samples_every"
        positive(self, "ppo", *counts.split())
        positive(self, "ppo", "learning_rate", "cliprange", "cliprange_value", "temperature")
        at_least_0(self, "ppo", "critic_learning_rate", "max_grad_norm", "critic_max_grad_norm")
        at_least_0(self, "ppo", "kl_coef", "vf_coef", "entropy_coef", "ptx_coef")
        at_least_0(self, "ppo", "target_kl", "kl_target")
        for name in ("gamma", "lam"):
            in_range(self, "ppo", name, 0, 1)
        in_range(self, "ppo", "dropout", 0, 0.9)
        k1_in_loss = self.kl_in == "loss" and self.kl_estimator == "k1"
        require(
            not k1_in_loss,
            "ppo.kl_estimator",
            "be k2 or k3 with ppo.kl_in=loss (k1's gradient is 0 on average)",
        )
        require(self.total_episodes >= self.batch_size, "ppo.total_episodes", "fill one batch")
        divides = self.batch_size % self.num_minibatches == 0
        require(divides, "ppo.batch_size", "divide by minibatches")

    @property
    def quirks(self) -> dict[str, str]:
        """The settings that `compat` fixes."""
        return PAPER_QUIRKS if self.compat == "paper" else {}

    @property
    def num_updates(self) -> int:
        """Updates of the whole run; episodes that do not fill a batch are left out, as in P1."""
        return self.total_episodes // self.batch_size
