"""Reward models that others have saved, in our layout. Weights are read as data; no code is run.

The paper's released checkpoints have the mean score of the references in their configuration
(Huang et al. 2024, detail 15). Here it is folded into the head's bias.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from stages.config.config import Config
from stages.config.errors import UserError, first_line
from stages.models.heads import (
    head_name,
    register_head_class,
    scalar_head,
    shift_scores,
    use_float32_head,
)
from stages.models.loading import load_reward_model, with_dropout, with_plain_outputs
from stages.models.tokenizers import load_tokenizer, same_tokens
from stages.models.weights import (
    check_no_adapter,
    check_weight_names,
    check_weight_values,
    read_weights,
)
from stages.runs.files import read_record
from stages.runs.hub import fetch_model, model_source

# The prefix of backbone weights in the paper's checkpoints.
BACKBONE = "lm_backbone."
# Buffers that older versions of transformers saved. They are computed, not learned.
OLD_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
# Fields of a backbone's configuration that describe the saved file, not the architecture.
SAVED_MODEL_FIELDS = {
    "model_type",
    "architectures",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "num_labels",
}


def fetch_reward_model(
    config: Config, policy_folder: Path, instead: str
) -> tuple[PreTrainedModel, float | None]:
    """Load the model that `released.reward_model` names, as `load_released_reward_model` does.

    Raises UserError, which says what to do `instead`, if the model's tokenizer differs from the
    policy's.
    """
    source = model_source("released.reward_model", config.released.reward_model)
    folder = fetch_model(source).folder
    model, mean = load_released_reward_model(folder)

    # A folder without a tokenizer is assumed to use the policy's.
    policy_tokenizer = load_tokenizer(policy_folder)
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer = load_tokenizer(folder) if has_tokenizer else policy_tokenizer
    vocabulary_size = model.config.get_text_config().vocab_size
    can_embed = vocabulary_size >= policy_tokenizer.pad_token_id
    if not same_tokens(tokenizer, policy_tokenizer) or not can_embed:
        raise UserError(
            f"{source.label} has a different tokenizer than {config.base.checkpoint}, whose tokens "
            f"it would read: {instead}"
        )
    return model, mean


def load_released_reward_model(folder: Path) -> tuple[PreTrainedModel, float | None]:
    """Return a reward model in our layout, in float32, and the mean folded into its bias.

    The mean is None if the folder is in our layout already. Other layouts are a `ScalarModel`
    (Huang et al. 2024), an `AutoModelForSequenceClassification` with one label (TRL), and a
    backbone with a head of one row (OpenRLHF, whose config may hold mean and standard deviation of
    the scores). A head without a bias gets a bias of 0. Raises UserError for any other folder.
    """
    saved_config = read_record(folder / "config.json")
    if saved_config is None:
        raise UserError(f"{folder} is not a reward model: config.json is missing")
    if _is_our_layout(saved_config):
        return load_reward_model(folder).eval(), None

    check_no_adapter(folder)
    weights = read_weights(folder).tensors
    model_config = _model_config(folder, saved_config)
    model = AutoModelForTokenClassification.from_config(model_config).float()
    head_weight = _find_head(folder, weights, width=scalar_head(model).in_features)
    _load_renamed(folder, model, _renamed(weights, model, head_weight))

    # The foreign model's score is (scalar - mean) / std.
    normalization = _normalization(folder, saved_config)
    shift_scores(model, -normalization.mean)
    with torch.no_grad():
        for parameter in scalar_head(model).parameters():
            parameter.div_(normalization.std)
    use_float32_head(model)
    return model.eval(), normalization.mean


def _is_our_layout(saved_config: dict[str, Any]) -> bool:
    architectures = str(saved_config.get("architectures"))
    labels = saved_config.get("id2label", ())
    return "TokenClassification" in architectures and len(labels) == 1


def _find_head(folder: Path, weights: dict[str, Tensor], *, width: int) -> str:
    """The name of the only weight of shape [1, H]."""
    candidates = [name for name, tensor in weights.items() if tensor.shape == (1, width)]
    if len(candidates) != 1:
        raise UserError(
            f"{folder} is not a reward model: it has {len(candidates)} heads of one row, not 1. "
            "Use token or sequence classification with one label, or a ScalarModel"
        )
    return candidates[0]


def _renamed(
    weights: dict[str, Tensor], model: PreTrainedModel, head_weight: str
) -> dict[str, Tensor]:
    """The weights in float32 by the names that our model gives them."""
    their_head = head_weight.removesuffix("weight")
    our_head = f"{head_name(model)}."
    our_backbone = f"{model.base_model_prefix}."

    renamed = {f"{our_head}bias": torch.zeros(1)}  # unless they have one
    for name, tensor in weights.items():
        if name.startswith(their_head):
            renamed[name.replace(their_head, our_head)] = tensor.float()
        elif not name.endswith(OLD_BUFFERS):
            renamed[name.replace(BACKBONE, our_backbone)] = tensor.float()
    return renamed


def _load_renamed(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    try:
        loaded = model.load_state_dict(weights, strict=False)
    except RuntimeError:  # it lists every weight of another shape, on a line of its own
        raise UserError(
            f"{folder} does not load: the shapes of its weights differ from its configuration"
        ) from None
    check_weight_names(
        folder,
        missing=set(loaded.missing_keys),
        unexpected=set(loaded.unexpected_keys),
    )
    check_weight_values(folder, model)


@dataclass(frozen=True, kw_only=True)
class _Normalization:
    """A score is (scalar - mean) / std."""

    mean: float
    std: float = 1.0


def _normalization(folder: Path, saved_config: dict[str, Any]) -> _Normalization:
    """The normalization in a configuration: OpenRLHF's, or the paper's `bias`."""
    if saved_config.get("normalize_reward"):
        return _Normalization(
            mean=_number(folder, saved_config, "mean", default=0.0),
            std=_number(folder, saved_config, "std", default=1.0),
        )
    return _Normalization(mean=_number(folder, saved_config, "bias", default=0.0))


def _number(folder: Path, saved_config: dict[str, Any], name: str, *, default: float) -> float:
    value = saved_config.get(name, default)
    # The exact type, because True is an int too.
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{folder}/config.json: {name} must be a number, not {value!r}")
    return float(value)


def _model_config(folder: Path, saved_config: dict[str, Any]) -> PretrainedConfig:
    """The configuration of a folder, or of its backbone: one label, a bias, and no dropout."""
    head_options = {"num_labels": 1, "token_classification_bias": True}
    backbone = saved_config.get("base_config")  # in the paper's checkpoints
    try:
        if backbone:
            fields = {
                name: value for name, value in backbone.items() if name not in SAVED_MODEL_FIELDS
            }
            model_config = AutoConfig.for_model(
                backbone["model_type"], **{**fields, **head_options}
            )
        else:
            model_config = AutoConfig.from_pretrained(
                str(folder), trust_remote_code=False, **head_options
            )
    except Exception as error:  # a library may raise anything for a file that the user supplied
        raise UserError(
            f"{folder}: its configuration does not load ({first_line(error)}): download it again"
        ) from None
    register_head_class(model_config, str(folder))
    return with_plain_outputs(with_dropout(model_config, 0.0), folder)
