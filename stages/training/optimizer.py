"""AdamW with the paper's settings, learning rates, gradient norms and moments."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from stages.config.sections import Optimizer
from stages.training.sharding import full_tensor


def make_optimizer(parameters: Any, learning_rate: float, settings: Optimizer) -> torch.optim.AdamW:
    """Return AdamW as in Huang et al. 2024: eps 1e-5, torch's betas and weight decay."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,  # the fused kernel makes no temporary tensors
    )


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of each parameter group, times the group's `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def cosine_rate(update: int, updates: int, warmup_fraction: float) -> float:
    """Return the share of the learning rate at an update, counted from 0.

    A linear warm-up over `warmup_fraction` of the updates, then a cosine to 0.
    """
    warmup = round(warmup_fraction * updates)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = (update - warmup) / max(1, updates - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def gradient_norm(network: nn.Module) -> float:
    """Return the norm of all gradients of a network, from all parts if it is sharded."""
    gradients = [weight.grad for weight in network.parameters() if weight.grad is not None]
    return full_tensor(get_total_norm(gradients)).item()


def make_moments(optimizer: Any) -> None:
    """Allocate the moments that AdamW would allocate in its first step: zeros.

    AdamW allocates them during that step, so a step that ran out of memory would be half done.
    Weights without a gradient get none, as in AdamW.
    """
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is None or weight in optimizer.state:
                continue
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            first_moment = torch.zeros_like(weight, memory_format=torch.preserve_format)
            second_moment = torch.zeros_like(weight, memory_format=torch.preserve_format)
            # Set all three at once: a failed allocation leaves no weight with only some of them.
            optimizer.state[weight] = {
                "step": step,
                "exp_avg": first_moment,
                "exp_avg_sq": second_moment,
            }
