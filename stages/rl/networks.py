"""The networks of a policy-gradient stage and their optimizer, as the settings choose them.

Policy and ref_policy start as the SFT model, critic and reward model as the normalized reward model
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
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.config.ppo import PolicyGradient, Ppo
from stages.config.sections import Memory, Optimizer
from stages.models.forward import ResponseBatch, response_logprobs, response_values
from stages.models.heads import head_name, scalar_head, shift_scores, use_float32_head
from stages.models.loading import load_policy, load_reward_model, new_reward_model
from stages.models.lora import adapt, adapter_layers, adapter_off, keep_model
from stages.models.policy import PolicyModel
from stages.models.reward_function import RECORD
from stages.rl.episodes import ValueRange
from stages.runs.files import read_record
from stages.runs.run import Run
from stages.training.accelerator import place, prepare
from stages.training.memory import MemoryBudget, use_gradient_checkpointing
from stages.training.optimizer import make_optimizer
from stages.training.random_streams import stream
from stages.training.sharding import full_tensor
from stages.training.step import Learner


class PolicyAndCritic(nn.Module):
    """The trained networks in one module, so that one optimizer and one engine serve both (Huang et
    al. 2024, detail 22). A stage may train without a critic.
    """

    def __init__(self, policy: PolicyModel, critic: PreTrainedModel | None) -> None:
        super().__init__()
        self.policy = policy
        self.critic: Any = critic

    def forward(self, network: str, batch: ResponseBatch, **options: Any) -> Any:
        """`response_logprobs` of the "policy", with its options, or `response_values` of the
        "critic".

        One network per call, so that the activations of both are never in memory at the same time.
        """
        if network == "policy":
            return response_logprobs(self.policy, batch, **options)
        if network == "critic" and self.critic is not None:
            return response_values(self.critic, batch)
        raise ValueError(f"this module has no network {network!r}")


@dataclass(frozen=True, kw_only=True)
class Origins:
    """The models from which the networks of a policy-gradient stage start."""

    policy: Path
    """The SFT model, from which policy and ref_policy start."""
    reward_model: Path
    """The normalized reward model, from which reward model and critic start."""
    score_shift: float = 0.0
    """Added to every score: the mean that normalization subtracted, with detail 15 off."""
    reference_scores: tuple[float, ...] = ()
    """The lowest and the highest score of a reference, if they are recorded, with that shift."""
    seed: int = 0
    """Seed of a critic's new head."""
    adapt: Callable[..., None] | None = None
    """Called as adapt(network, part=name), it may put an adapter into `policy` and `critic`."""


def origins_of(run: Run, settings: PolicyGradient) -> Origins:
    """The models from which a stage's networks start: the run's SFT model and its reward model."""
    normalized = run.require("normalize")
    shift = score_shift(normalized, settings)
    return Origins(
        policy=run.require("sft") / "model",
        reward_model=normalized / "model",
        score_shift=shift,
        reference_scores=reference_scores(normalized, shift),
        seed=run.config.seed,
        adapt=partial(adapt, config=run.config, stage=run.stage),
    )


def score_shift(normalized: Path, settings: PolicyGradient) -> float:
    """The mean that `normalize` subtracted and that reward_normalization=false adds back."""
    if settings.reward_normalization:
        return 0.0
    manifest = read_record(normalized / "manifest.json") or {}
    return float(manifest["results"]["mean_before"])


def reference_scores(normalized: Path, shift: float) -> tuple[float, ...]:
    """The lowest and the highest score that a finished `normalize` stage has given a reference.

    `shift` is `Origins.score_shift`. Empty if the stage has recorded none.
    """
    manifest = read_record(normalized / "manifest.json") or {}
    results = manifest.get("results", {})
    if "minimum" not in results or "maximum" not in results:
        return ()
    # They were recorded before the mean was subtracted.
    added = shift - results["mean_before"]
    return results["minimum"] + added, results["maximum"] + added


class WithoutAdapter(nn.Module):
    """A policy with its adapter off. It is called like the policy and shares its weights."""

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What the policy returned before it was adapted, without gradients."""
        with torch.no_grad(), adapter_off(self.policy.model):
            logprobs, entropies = self.policy(*args, **kwargs)
        return logprobs, entropies

    @property
    def config(self) -> Any:
        """The configuration of the policy."""
        return self.policy.config


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Trained and frozen networks, and the ids that their tokenizer gives EOS and PAD."""

    policy: PolicyModel
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
    has_warned: bool = False
    """Whether an update check has printed a warning, after which no update is checked."""


def make_learner(
    accelerator: Accelerator,
    networks: Networks,
    settings: PolicyGradient,
    optimizer: Optimizer,
    memory: Memory,
) -> PolicyLearner:
    """Place all networks on their devices, and create the optimizer of policy and critic."""
    trained = PolicyAndCritic(networks.policy, networks.critic)
    use_gradient_checkpointing(networks.policy.model, memory)
    if networks.critic is not None:
        use_gradient_checkpointing(networks.critic, memory)
    new_optimizer = make_optimizer(
        parameter_groups(trained, settings), settings.learning_rate, optimizer
    )
    wrapped, wrapped_optimizer = prepare(accelerator, trained, new_optimizer)

    place(accelerator, networks.reward_model)
    if not isinstance(networks.ref_policy, WithoutAdapter):
        place(accelerator, networks.ref_policy)

    stage = settings.section()
    fixed_by = ""
    if settings.loss_mean == "microbatches":
        fixed_by = f"{stage}.loss_mean=microbatches"
    return PolicyLearner(
        stage=stage,
        accelerator=accelerator,
        trained=wrapped,
        optimizer=wrapped_optimizer,
        networks=networks,
        budget=MemoryBudget.from_settings(memory),
        fixed_by=fixed_by,
    )


def load_networks(
    origins: Origins,
    tokenizer: PreTrainedTokenizerBase,
    settings: PolicyGradient,
    frozen_dtype: str,
) -> Networks:
    """Load all networks. `frozen_dtype`, float32 or bf16, is the dtype of the frozen ones."""
    policy_model = load_policy(origins.policy, settings.dropout)
    critic = None
    if isinstance(settings, Ppo) and settings.uses_critic:
        critic = load_critic(origins, settings)
    if origins.adapt is not None:
        origins.adapt(policy_model, part="policy")
        if critic is not None:
            origins.adapt(critic, part="critic")

    policy = PolicyModel(policy_model)
    ref_policy: nn.Module
    if any(adapter_layers(policy_model)):
        ref_policy = WithoutAdapter(policy)
    else:
        ref_policy = PolicyModel(freeze(load_policy(origins.policy), frozen_dtype))

    return Networks(
        policy=policy,
        critic=critic,
        ref_policy=ref_policy,
        reward_model=freeze(load_scorer(origins), frozen_dtype),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )


def freeze(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """A frozen model in `float32` or `bf16`; a scalar head stays in float32."""
    if dtype == "bf16":
        # Not `model.to`: it would round the frequencies of rotary positions too, which are buffers.
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        if head_name(model):
            use_float32_head(model)
    return model.eval().requires_grad_(False)


def load_scorer(origins: Origins, dropout: float = 0.0) -> PreTrainedModel:
    """The normalized reward model. With detail 15 off, the mean that it subtracts is added back."""
    model = load_reward_model(origins.reward_model, dropout)
    shift_scores(model, origins.score_shift)
    return model


def load_critic(origins: Origins, ppo: Ppo) -> PreTrainedModel:
    """The critic: the reward model, its backbone with a head of zeros, or the SFT model's backbone.

    A reward function has no backbone: the SFT model's takes its place.
    """
    is_reward_function = (origins.reward_model / RECORD).exists()
    if ppo.critic_init == "sft" or is_reward_function:
        generator = stream(origins.seed, "critic head")
        critic = new_reward_model(origins.policy, generator, ppo.dropout)
    else:
        critic = load_scorer(origins, ppo.dropout)
    if ppo.critic_init == "zero":
        zero_head(critic)
    return critic


def zero_head(model: nn.Module) -> None:
    """Set the head's weights and bias to 0, so that every value is 0 until the model learns."""
    head = scalar_head(model)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()


def parameter_groups(trained: PolicyAndCritic, settings: PolicyGradient) -> list[dict[str, Any]]:
    """Policy and critic as two groups, so that each can have its own learning rate."""
    groups = [{"params": list(trained.policy.parameters()), "lr_scale": 1.0}]
    if trained.critic is not None and isinstance(settings, Ppo):
        critic_rate = settings.critic_learning_rate or settings.learning_rate
        groups.append(
            {
                "params": list(trained.critic.parameters()),
                "lr_scale": critic_rate / settings.learning_rate,
            }
        )
    return groups


def clip_gradients(trained: PolicyAndCritic, settings: PolicyGradient) -> dict[str, float]:
    """Clip each network's gradient by its own norm; returns the norms before.

    A network that does not learn in this update has no gradient, and no norm.
    """
    norms = {}
    for name, network in trained.named_children():
        weights = [weight for weight in network.parameters() if weight.grad is not None]
        if not weights:
            continue
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norm = full_tensor(torch.nn.utils.get_total_norm(gradients))
        max_norm = settings.max_grad_norm
        if name == "critic":
            max_norm = settings.critic_max_grad_norm if isinstance(settings, Ppo) else 0.0
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        norms[f"{name}/grad_norm"] = norm.item()
    return norms


def save_networks(
    learner: PolicyLearner,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    value_range: ValueRange | None = None,
) -> None:
    """Write the policy to `model` and a critic to `critic`, as plain models.

    A plain model gives a bounded critic's outputs, not its values: `bound_values` of
    `stages/functional.py` turns them into values. Its config.json has the range as `value_range`.
    """
    trained: PolicyAndCritic = learner.accelerator.unwrap_model(learner.trained)
    keep_model(learner.accelerator, trained.policy, tokenizer, folder / "model")
    if trained.critic is not None:
        if value_range is not None:
            trained.critic.config.value_range = [value_range.low, value_range.high]
        keep_model(learner.accelerator, trained.critic, tokenizer, folder / "critic")
