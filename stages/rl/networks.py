"""PPO's networks and their optimizer, as the settings switch them.

Policy and ref_policy start as the SFT model, critic and reward model as the normalised reward model
(Huang et al. 2024, detail 22). All four are in float32 without dropout unless a setting says
otherwise. Under LoRA there are three: the ref_policy is the policy with its adapter off.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stages.finished import read_manifest
from stages.learning.batches import stream
from stages.learning.heads import head_name, in_float32, shift_scores
from stages.learning.loop import make_optimizer, use_gradient_checkpointing
from stages.learning.lora import WithoutAdapter, adapt
from stages.learning.models import load_policy, load_reward_model, new_reward_model
from stages.learning.passes import PolicyAndCritic
from stages.learning.sharding import place, prepare, whole
from stages.runs import Run
from stages.settings.ppo import Ppo


@dataclass(frozen=True, kw_only=True)
class Models:
    """Trained and frozen networks of a run, and the ids that their tokenizer gives EOS and PAD."""

    trained: nn.Module
    """`PolicyAndCritic`, wrapped by the accelerator; `policy` and `critic` are its parts."""
    policy: PreTrainedModel
    critic: Any
    """A model like the reward model, or None in a stage that learns without one."""
    ref_policy: nn.Module
    """Called like the policy; under LoRA it is the policy with its adapter off."""
    reward_model: PreTrainedModel
    eos_id: int
    pad_id: int


def load_models(
    run: Run, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> tuple[Models, Any]:
    """Load the networks and the optimizer."""
    ppo, memory = run.config.ppo, run.config.memory
    sft = run.require("sft") / "model"
    networks = PolicyAndCritic(load_policy(sft, ppo.dropout), load_critic(run))
    adapt(networks.policy, run.config, "ppo", "policy")
    adapt(networks.critic, run.config, "ppo", "critic")
    use_gradient_checkpointing(networks.policy, memory)
    use_gradient_checkpointing(networks.critic, memory)
    groups = parameter_groups(networks, ppo)
    optimizer = make_optimizer(groups, ppo.learning_rate, run.config.optimizer)
    trained, optimizer = prepare(accelerator, networks, optimizer)
    reward_model = place(accelerator, freeze(load_scorer(run), memory.frozen_dtype))
    models = Models(
        trained=trained,
        policy=networks.policy,
        critic=networks.critic,
        ref_policy=load_reference(run, accelerator, networks.policy),
        reward_model=reward_model,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    return models, optimizer


def load_reference(run: Run, accelerator: Accelerator, policy: PreTrainedModel) -> nn.Module:
    """The SFT model, frozen: a copy of its own, or the adapted policy with its adapter off."""
    if "ppo" in run.config.lora.adapted_stages:
        return WithoutAdapter(policy)
    reference = load_policy(run.require("sft") / "model")
    return place(accelerator, freeze(reference, run.config.memory.frozen_dtype))


def freeze(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """A model that never learns, held in `float32` or `bf16`; a scalar head stays in float32."""
    if dtype == "bf16":
        model.to(torch.bfloat16)
        if head_name(model):
            in_float32(model)
    return model.eval().requires_grad_(False)


def load_scorer(run: Run, dropout: float = 0.0) -> PreTrainedModel:
    """The normalised reward model. With detail 15 switched off, its arbitrary mean is put back."""
    model = load_reward_model(run.require("normalize") / "model", dropout)
    shift_scores(model, reward_shift(run))
    return model


def reward_shift(run: Run) -> float:
    """What ppo.reward_normalization=false adds back to every score, reward units."""
    if run.config.ppo.reward_normalization:
        return 0.0
    manifest = read_manifest(run.require("normalize")) or {}
    return float(manifest["results"]["mean_before"])


def load_critic(run: Run) -> PreTrainedModel:
    """The reward model, or the SFT model's backbone with a new head (detail 22 switched off)."""
    ppo = run.config.ppo
    if ppo.critic_init == "reward_model":
        return load_scorer(run, ppo.dropout)
    generator = stream(run.config.seed, "critic head")
    return new_reward_model(run.require("sft") / "model", generator, ppo.dropout)


def parameter_groups(networks: PolicyAndCritic, ppo: Ppo) -> list[dict[str, Any]]:
    """Policy and critic as two groups, so that each can have its own learning rate."""
    scale = ppo.critic_learning_rate / ppo.learning_rate if ppo.critic_learning_rate else 1.0
    return [
        {"params": list(networks.policy.parameters()), "lr_scale": 1.0},
        {"params": list(networks.critic.parameters()), "lr_scale": scale},
    ]


def clip_gradients(networks: PolicyAndCritic, ppo: Ppo) -> dict[str, float]:
    """Scale each network's gradient down to its largest allowed norm; returns the norms before."""
    norms = {}
    for name, network, largest in (
        ("policy", networks.policy, ppo.max_grad_norm),
        ("critic", networks.critic, ppo.critic_max_grad_norm),
    ):
        trained = [one for one in network.parameters() if one.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm([one.grad for one in trained]))
        if largest:
            torch.nn.utils.clip_grads_with_norm_(trained, largest, norm)
        norms[f"{name}/grad_norm"] = norm.item()
    return norms
