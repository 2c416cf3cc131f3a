"""The scalar head of a reward model or critic, in any family that has token classification.

Each family names its head itself: GPT-NeoX and GPT-2 `classifier`; Llama, Qwen and Gemma `score`.
The head is found as the one linear layer beside the backbone. It always computes in float32: its
bias holds the reward normalization, which bf16 would round to three digits.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, PretrainedConfig, PreTrainedModel

from stages.settings.checks import UserError


class Float32Head(nn.Linear):
    """A linear layer whose product and sum are in its weights' precision, under autocast too."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [.., H] in any precision -> [.., labels]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def require_heads(config: PretrainedConfig, source: str) -> None:
    """Raise UserError if a model family has no token-classification head in transformers."""
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise UserError(
            f"model {source} is a {config.model_type}, a family without a token-classification "
            "head in transformers, so it can be no reward model: choose another base.checkpoint"
        )


def head_name(model: nn.Module) -> str:
    """The name of a model's scalar head; empty for a causal LM."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear) and layer.out_features == 1:
            return name
    return ""


def head_of(model: nn.Module) -> nn.Linear:
    """The scalar head of a reward model or critic."""
    return cast(nn.Linear, model.get_submodule(head_name(model)))


def in_float32(model: nn.Module) -> None:
    """Let the head of a model compute in float32 from now on; its weights keep their names."""
    head = head_of(model)
    head.__class__ = Float32Head
    head.float()


def shift_scores(model: nn.Module, amount: float) -> None:
    """Add a number to every score of a reward model, through its head's bias (reward units)."""
    with torch.no_grad():
        head_of(model).bias.add_(amount)


def reset_head(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Weights normal with mean 0 and standard deviation 1 / sqrt(H + 1), bias 0.

    Source: Huang et al. 2024, detail 11.
    """
    head = head_of(model)
    with torch.no_grad():
        head.weight.normal_(0, (head.in_features + 1) ** -0.5, generator=generator)
        head.bias.zero_()


def read_scores_before(model: PreTrainedModel, token_id: int) -> None:
    """Let a reward model's scores be read before this token, EOS; its config.json will say so."""
    model.config.score_before_token = token_id


def token_read_before(model: nn.Module) -> int | None:
    """The token before which a model's scores are read; None where they are read at the last one,
    as from any model whose config.json does not say otherwise.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "score_before_token", None)


def zero_head(model: nn.Module) -> None:
    """Weights and bias 0, so that the model says 0 of every text until it learns."""
    head = head_of(model)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
