"""The table of policy-gradient algorithms.

An entry says how rewards become advantages (step 5 of an update), and gives the defaults of the
settings. The rest is one loop, `train_policy` in `stages/ppo.py`. The make target, the settings
section, the stage, the part in `make algorithms` and the name on pages all come from this table.
Other code only asks whether the settings are `Ppo`, which adds a critic to the common settings.

To add an algorithm, write its formula in `stages/functional.py`. Then add three things to this
file: a function that calls the formula, a settings class with the defaults, and an entry. To change
a default, only write a line such as `samples_per_query: int = 4`: range and description are kept.

Advantages are computed on the batch of all devices, so a formula may use statistics of the whole
batch. Afterwards `compute_advantages` masks them, and whitens them if `whiten_advantages` is on.

The settings and the command line read this table, so importing it must not load torch, which takes
five seconds. That is why the functions import their formulas when they are called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from typing_extensions import Self

from stages.config.ppo import LossMean, PolicyGradient, Ppo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """What advantages are computed from: the episodes of an update, from all devices.

    Shapes: rewards [B, T], reward units, KL penalty included, 0 where they do not count;
    response_mask, value_mask [B, T] bool, True = counts; values [B, T], None without a critic.
    """

    rewards: "Tensor"
    response_mask: "Tensor"
    value_mask: "Tensor"
    values: "Tensor | None"
    samples_per_query: int
    """How many neighboring episodes answer each query."""

    def counted_values(self) -> "Tensor":
        """Values [B, T], 0 where they do not count. Raises ValueError without a critic."""
        if self.values is None:
            raise ValueError("GAE needs a critic's values, and these episodes have none")
        return self.values.masked_fill(~self.value_mask, 0.0)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One policy-gradient algorithm."""

    title: str
    """Its name on pages."""
    summary: str
    """One line for `make help`."""
    settings: type[PolicyGradient]
    """The class of its settings, with this algorithm's defaults."""
    advantages: "Callable[[GlobalBatch, Any], tuple[Tensor, Tensor | None]]"
    """Step 5. Takes the batch and the settings; returns advantages [B, T] before whitening, and the
    critic's targets [B, T] (None without a critic)."""

    @property
    def name(self) -> str:
        """Its stage, its settings section and its make target."""
        return self.settings.section()


# -- PPO -------------------------------------------------------------------------------------------


def ppo_advantages(batch: GlobalBatch, ppo: Ppo) -> "tuple[Tensor, Tensor | None]":
    """GAE with the critic, or returns minus the batch's mean return, depending on `ppo.baseline`.

    With baseline=gated each batch uses one of the two, and the critic learns in either case.
    """
    if not ppo.uses_critic:
        return mean_return_advantages(batch, ppo), None
    advantages, returns = critic_advantages(batch, ppo)
    if not critic_passes_gate(batch, returns, ppo):
        advantages = mean_return_advantages(batch, ppo)
    return advantages, returns


def critic_advantages(batch: GlobalBatch, ppo: Ppo) -> "tuple[Tensor, Tensor]":
    """GAE's advantages, and the critic's targets, which may have their own lambda."""
    from stages.functional import gae, length_adaptive_lambda

    lam: float | Tensor = ppo.lam
    if ppo.lam_length_alpha:
        lam = length_adaptive_lambda(batch.response_mask.sum(dim=1), ppo.lam_length_alpha)
    values = batch.counted_values()
    advantages, _ = gae(batch.rewards, values, ppo.gamma, lam)
    _, returns = gae(batch.rewards, values, ppo.gamma, ppo.critic_lam)
    return advantages, returns


def mean_return_advantages(batch: GlobalBatch, ppo: Ppo) -> "Tensor":
    """Each token's return minus the mean return of the batch's episodes."""
    from stages.functional import minus_mean_return

    return minus_mean_return(batch.rewards, ppo.gamma)


def critic_passes_gate(batch: GlobalBatch, returns: "Tensor", ppo: Ppo) -> bool:
    """Whether this batch's advantages come from the critic.

    With baseline=gated, only if the critic predicts the batch's returns better than a constant.
    """
    from stages.functional import critic_beats_constant

    if ppo.baseline != "gated":
        return True
    return critic_beats_constant(batch.counted_values(), returns, batch.value_mask)


# -- critic-free algorithms ------------------------------------------------------------------------


class Grouped(PolicyGradient):
    """Settings of algorithms in which the responses to a query are each other's baseline."""

    loss_mean: LossMean = "episodes"
    samples_per_query: int = 4
    whiten_advantages: bool = False

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.samples_per_query < 2:
            raise ValueError(f"{self.section()}.samples_per_query must be at least 2")
        return self


class Rloo(Grouped):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024): one pass, no clipping."""

    num_ppo_epochs: int = 1
    cliprange: float = 0.0


def leave_one_out_advantages(
    batch: GlobalBatch, settings: PolicyGradient
) -> "tuple[Tensor, Tensor | None]":
    """An episode's reward minus the mean of its query's other episodes, at each of its tokens.

    The reward is the sum over the tokens, KL penalty included.
    """
    from stages.functional import leave_one_out

    advantages = leave_one_out(batch.rewards.sum(dim=1), batch.samples_per_query)
    return advantages.unsqueeze(1).expand_as(batch.rewards), None


class Grpo(Grouped):
    """GRPO as Dr.GRPO corrects it (Liu et al. 2025).

    The advantage is not divided by the group's standard deviation, and the loss is a mean over
    episodes of sums over tokens (`loss_mean`), so nothing is divided by a response's length.

    differs: the KL penalty is part of the reward, as in PPO here; Dr.GRPO has none.
    """


def group_mean_advantages(
    batch: GlobalBatch, settings: PolicyGradient
) -> "tuple[Tensor, Tensor | None]":
    """An episode's reward minus the mean of its query's episodes, at each of its tokens."""
    from stages.functional import minus_group_mean

    advantages = minus_group_mean(batch.rewards.sum(dim=1), batch.samples_per_query)
    return advantages.unsqueeze(1).expand_as(batch.rewards), None


class Reinforce(PolicyGradient):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): PPO's loss, without a critic or groups.

    One response per query, the KL penalty in the reward, PPO's clip, and returns normalized over
    the tokens of the whole batch (`whiten_advantages`).
    """


def return_advantages(
    batch: GlobalBatch, settings: PolicyGradient
) -> "tuple[Tensor, Tensor | None]":
    """Each token's return: the sum of the rewards from this token on, without a discount.

    With kl_in=reward, the default, that is the score minus kl_coef times the KL from here on.
    """
    from stages.functional import returns_to_go

    return returns_to_go(batch.rewards, gamma=1.0), None


ALGORITHMS = {
    "ppo": Algorithm(
        title="PPO",
        summary="PPO against the reward model",
        settings=Ppo,
        advantages=ppo_advantages,
    ),
    "rloo": Algorithm(
        title="RLOO",
        summary="RLOO against the reward model: no critic",
        settings=Rloo,
        advantages=leave_one_out_advantages,
    ),
    "grpo": Algorithm(
        title="Dr.GRPO",
        summary="Dr.GRPO against the reward model: no critic",
        settings=Grpo,
        advantages=group_mean_advantages,
    ),
    "reinforce": Algorithm(
        title="REINFORCE++",
        summary="REINFORCE++ against the reward model: no critic, no groups",
        settings=Reinforce,
        advantages=return_advantages,
    ),
}
"""In the order in which they run and are listed. PPO is part of every run, the others are optional.
"""
