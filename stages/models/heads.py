"""The scalar head of a reward model or critic, in any family of models.

A family without a token-classification class in transformers gets the generic one here.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from stages.config.errors import UserError
from stages.models.reward_function import TextReward


class Float32Head(nn.Linear):
    """A scalar head that computes in float32, also under bf16 autocast.

    The head's bias carries the reward normalization, and bf16 would round it: between 4 and 8, bf16
    numbers are 0.03 apart.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Take over the parameters of `head`, converted to float32 in place."""
        # On the meta device nothing is allocated, and no random number is drawn.
        super().__init__(
            in_features=head.in_features,
            out_features=head.out_features,
            bias=head.bias is not None,
            device="meta",
        )
        self.weight = head.weight
        self.bias = head.bias
        self.float()
        self.train(head.training)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [.., H] in any precision -> [.., labels] in the weights' precision."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def use_float32_head(model: nn.Module) -> None:
    """Replace a model's scalar head by a `Float32Head`. The names of the weights do not change."""
    model.set_submodule(head_name(model), Float32Head(scalar_head(model)))


def head_name(model: nn.Module) -> str:
    """The name of a model's scalar head; empty for a causal LM."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear) and layer.out_features == 1:
            return name
    return ""


def scalar_head(model: nn.Module) -> nn.Linear:
    """The scalar head of a reward model or critic."""
    return cast(nn.Linear, model.get_submodule(head_name(model)))


def register_head_class(config: PretrainedConfig, source: str) -> None:
    """Register a token-classification class for a model's family, if transformers has none.

    Raises UserError for a family without a causal LM.
    """
    family = type(config)
    if family in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return

    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(family, None)
    if causal_class is None:
        raise UserError(
            f"model {source} is a {config.model_type}, a family without a causal LM in "
            "transformers: choose another base.checkpoint"
        )

    # The family's own PreTrainedModel knows how to initialize and to load its layers.
    pretrained_class = next(
        parent
        for parent in causal_class.__mro__
        if parent.__name__.endswith("PreTrainedModel") and parent.config_class is not None
    )
    head_class = type(
        family.__name__.removesuffix("Config") + "ForTokenClassification",
        (GenericForTokenClassification, pretrained_class),
        {"config_class": family, "base_model_prefix": causal_class.base_model_prefix},
    )
    AutoModelForTokenClassification.register(family, head_class, exist_ok=True)


def reset_head(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw the head's weights from a normal with mean 0 and std 1 / sqrt(H + 1); set its bias to 0.

    Source: Huang et al. 2024, detail 11.
    """
    head = scalar_head(model)
    standard_deviation = (head.in_features + 1) ** -0.5
    with torch.no_grad():
        head.weight.normal_(0, standard_deviation, generator=generator)
        head.bias.zero_()


def shift_scores(model: nn.Module, amount: float) -> None:
    """Add a number to every score of a reward model, through its head's bias (reward units)."""
    if isinstance(model, TextReward):
        model.bias += amount
        return
    with torch.no_grad():
        scalar_head(model).bias.add_(amount)
