"""The networks of a policy-gradient stage and their optimizer, as the settings switch them.

Policy and ref_policy start as the SFT model, critic and reward model as the normalised reward model
(Huang et al. 2024, detail 22). All are in float32 without dropout unless a setting says otherwise.
Under LoRA the ref_policy is the policy with its adapter off. A stage may learn without a critic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.models.forward import response_statistics, response_values
from stages.models.heads import head_name, scalar_head, shift_scores, use_float32_head
from stages.models.loading import load_policy, load_reward_model, new_reward_model
from stages.models.lora import adapt, adapter_layers, adapter_off, keep_model
from stages.models.reward_function import RECORD
from stages.running.files import read_record
from stages.runs import Run
from stages.settings.ppo import PolicyGradient, Ppo
from stages.settings.sections import Memory, Optimizer
from stages.training.learner import Learner, stream
from stages.training.loop import make_optimizer, use_gradient_checkpointing
from stages.training.sharding import place, prepare, whole


class PolicyAndCritic(nn.Module):
    """The networks that learn in one module, so that one optimizer and one engine serve both (Huang
    et al. 2024, detail 22). A stage may learn without a critic.
    """

    def __init__(self, policy: PreTrainedModel, critic: PreTrainedModel | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic: Any = critic

    def forward(self, network: str, *row: Any) -> Any:
        """`response_statistics` of the "policy", or `response_values` of the "critic".

        One network a call: the other's activations need not be alive beside it.
        """
        if network == "policy":
            return response_statistics(self.policy, *row)
        return response_values(self.critic, *row)


@dataclass(frozen=True, kw_only=True)
class Origins:
    """What the networks of a policy-gradient stage start from."""

    policy: Path
    """The SFT model, of policy and ref_policy."""
    reward_model: Path
    """The normalised reward model, of reward model and critic."""
    score_shift: float = 0.0
    """Added to every score: with detail 15 switched off, the mean that normalization took away."""
    seed: int = 0
    """Of a critic's new head."""
    adapt: Callable[..., None] | None = None
    """Called as adapt(network, part=name), it may put an adapter into `policy` and `critic`."""


def origins_of(run: Run, settings: PolicyGradient) -> Origins:
    """What a stage's networks start from: the run's SFT model and its normalised reward model."""
    config, normalized = run.config, run.require("normalize")
    return Origins(
        policy=run.require("sft") / "model",
        reward_model=normalized / "model",
        score_shift=score_shift(normalized, settings),
        seed=config.seed,
        adapt=partial(adapt, config=config, stage=run.stage),
    )


def score_shift(normalized: Path, settings: PolicyGradient) -> float:
    """What reward_normalization=false adds back to every score of a finished `normalize` stage."""
    if settings.reward_normalization:
        return 0.0
    return float((read_record(normalized / "manifest.json") or {})["results"]["mean_before"])


class WithoutAdapter(nn.Module):
    """A model with its adapter off. It is called like the model and shares its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model before it was adapted, without gradients."""
        with torch.no_grad(), adapter_off(self.model):
            return self.model(*args, **kwargs)

    @property
    def config(self) -> Any:
        """The model's."""
        return self.model.config


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Trained and frozen networks, and the ids that their tokenizer gives EOS and PAD."""

    policy: PreTrainedModel
    critic: Any
    """A model like the reward model, or None in a stage that learns without one."""
    ref_policy: nn.Module
    """Called like the policy; under LoRA it is the policy with its adapter off."""
    reward_model: PreTrainedModel
    eos_id: int
    pad_id: int


@dataclass(kw_only=True)
class PolicyLearner(Learner):
    """A learner whose `trained` is a `PolicyAndCritic` of these networks."""

    networks: Networks
    forward_batch_size: int
    """Sequences per forward pass where nothing learns."""


def make_learner(
    accelerator: Accelerator,
    networks: Networks,
    settings: PolicyGradient,
    optimizer: Optimizer,
    memory: Memory,
) -> PolicyLearner:
    """A learner of whole networks: places them, and makes the optimizer of policy and critic."""
    trained = PolicyAndCritic(networks.policy, networks.critic)
    for network in trained.children():
        use_gradient_checkpointing(network, memory)
    stepper = make_optimizer(parameter_groups(trained, settings), settings.learning_rate, optimizer)
    wrapped, stepper = prepare(accelerator, trained, stepper)
    for frozen in (networks.reward_model, networks.ref_policy):
        if not isinstance(frozen, WithoutAdapter):
            place(accelerator, frozen)
    stage = settings.section()
    fixed_by = f"{stage}.loss_mean=microbatches"
    return PolicyLearner(
        stage=stage,
        accelerator=accelerator,
        trained=wrapped,
        optimizer=stepper,
        networks=networks,
        microbatch_size=memory.microbatch_size,
        forward_batch_size=memory.forward_batch_size,
        fixed_by=fixed_by if settings.loss_mean == "microbatches" else "",
    )


def load_networks(
    origins: Origins,
    tokenizer: PreTrainedTokenizerBase,
    settings: PolicyGradient,
    frozen_dtype: str,
) -> Networks:
    """Load all networks. `frozen_dtype`, float32 or bf16, is that of those that do not learn."""
    policy = load_policy(origins.policy, settings.dropout)
    critic = None
    if isinstance(settings, Ppo) and settings.uses_critic:
        critic = load_critic(origins, settings)
    for name, network in (("policy", policy), ("critic", critic)):
        if network is not None and origins.adapt is not None:
            origins.adapt(network, part=name)
    adapted = any(adapter_layers(policy))
    ref_policy = WithoutAdapter(policy) if adapted else load_policy(origins.policy)
    return Networks(
        policy=policy,
        critic=critic,
        ref_policy=ref_policy if adapted else freeze(ref_policy, frozen_dtype),
        reward_model=freeze(load_scorer(origins), frozen_dtype),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )


def freeze(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """A model that never learns, held in `float32` or `bf16`; a scalar head stays in float32."""
    if dtype == "bf16":
        # Not `model.to`: it would round the frequencies of rotary positions too, which are buffers.
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        if head_name(model):
            use_float32_head(model)
    return model.eval().requires_grad_(False)


def load_scorer(origins: Origins, dropout: float = 0.0) -> PreTrainedModel:
    """The normalised reward model. With detail 15 switched off, its arbitrary mean is put back."""
    model = load_reward_model(origins.reward_model, dropout)
    shift_scores(model, origins.score_shift)
    return model


def load_critic(origins: Origins, ppo: Ppo) -> PreTrainedModel:
    """The reward model; its backbone with a head of zeros; or the SFT model's with a new head.

    A reward of one's own has no backbone: the SFT model's takes its place.
    """
    if ppo.critic_init == "sft" or (origins.reward_model / RECORD).exists():
        generator = stream(origins.seed, "critic head")
        critic = new_reward_model(origins.policy, generator, ppo.dropout)
    else:
        critic = load_scorer(origins, ppo.dropout)
    if ppo.critic_init == "zero":
        zero_head(critic)
    return critic


def zero_head(model: nn.Module) -> None:
    """Weights and bias 0, so that the model says 0 of every text until it learns."""
    head = scalar_head(model)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()


def parameter_groups(trained: PolicyAndCritic, settings: PolicyGradient) -> list[dict[str, Any]]:
    """Policy and critic as two groups, so that each can have its own learning rate."""
    groups = [{"params": list(trained.policy.parameters()), "lr_scale": 1.0}]
    if trained.critic is not None and isinstance(settings, Ppo):
        rate = settings.critic_learning_rate or settings.learning_rate
        scale = rate / settings.learning_rate
        groups.append({"params": list(trained.critic.parameters()), "lr_scale": scale})
    return groups


def clip_gradients(trained: PolicyAndCritic, settings: PolicyGradient) -> dict[str, float]:
    """Clip each network's gradient by its own norm; returns the norms before.

    A network that does not learn in this update has no gradient, and no norm.
    """
    norms = {}
    for name, network in trained.named_children():
        learned = [weight for weight in network.parameters() if weight.grad is not None]
        gradients = [weight.grad for weight in learned if weight.grad is not None]
        if not gradients:
            continue
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        max_norm = settings.max_grad_norm
        if name == "critic":
            max_norm = settings.critic_max_grad_norm if isinstance(settings, Ppo) else 0.0
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(learned, max_norm, norm)
        norms[f"{name}/grad_norm"] = norm.item()
    return norms


def save_networks(learner: PolicyLearner, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy to `model` and a critic to `critic`, as plain models."""
    trained = learner.accelerator.unwrap_model(learner.trained)
    names = {"policy": "model", "critic": "critic"}
    for name, network in list(trained.named_children()):
        keep_model(learner.accelerator, network, tokenizer, folder / names[name])
