"""Load and save policies, reward models and critics.

The policy is an `AutoModelForCausalLM`. The reward model and the critic are an
`AutoModelForTokenClassification` with one label, a scalar for every token, whose head bias carries
the reward normalization. Both load in plain transformers. A causal family that has no such class
gets transformers' generic one here (`heads.py`); outside this project, such a model loads as an
`AutoModelForSequenceClassification` with one label, without the bias.
Source: Huang et al. 2024, details 11 and 15.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from stages.config.errors import UserError, first_line
from stages.config.fitting import check_context_length
from stages.config.out_of_memory import is_out_of_memory
from stages.models.heads import head_name, register_head_class, reset_head, use_float32_head
from stages.models.reward_function import RECORD, TextReward, load_text_reward
from stages.models.tokenizers import load_tokenizer
from stages.models.weights import (
    check_no_adapter,
    check_weight_names,
    check_weight_values,
    read_weights,
)

LM_HEAD_WEIGHTS = {"lm_head.weight", "lm_head.bias", "embed_out.weight"}
# Outputs that a checkpoint's config.json may ask for, and their values here.
PLAIN_OUTPUTS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}


# -- load ------------------------------------------------------------------------------------------


def load_policy(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A causal LM in float32. Raises UserError for missing or unexpected weights."""
    loaded = _load(AutoModelForCausalLM, source, dropout)
    check_weight_names(source, missing=loaded.missing, unexpected=loaded.unexpected)
    return loaded.model


def load_reward_model(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A saved reward model or critic in float32, or the `TextReward` that was saved in its place.

    Raises UserError for missing or unexpected weights.
    """
    if (Path(source) / RECORD).exists():
        # Not a PreTrainedModel: the functions that need one check for TextReward first.
        return cast(PreTrainedModel, load_text_reward(Path(source), load_tokenizer(source)))
    loaded = _load(AutoModelForTokenClassification, source, dropout, num_labels=1)
    check_weight_names(source, missing=loaded.missing, unexpected=loaded.unexpected)
    use_float32_head(loaded.model)
    return loaded.model


def new_reward_model(
    policy_folder: Path, generator: torch.Generator, dropout: float = 0.0
) -> PreTrainedModel:
    """A reward model on the policy's backbone, with a new head (`reset_head`)."""
    loaded = _load(
        AutoModelForTokenClassification,
        policy_folder,
        dropout,
        num_labels=1,
        token_classification_bias=True,  # some families may leave the bias out
    )
    name = head_name(loaded.model)
    new_weights = {f"{name}.weight", f"{name}.bias"}
    check_weight_names(
        policy_folder,
        missing=loaded.missing - new_weights,
        unexpected=loaded.unexpected - LM_HEAD_WEIGHTS,
    )
    reset_head(loaded.model, generator)
    use_float32_head(loaded.model)
    return loaded.model


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A model in float32, and the names of its weights that were missing or unexpected."""

    model: PreTrainedModel
    missing: set[str]
    unexpected: set[str]


def _load(auto_class: Any, source: str | Path, dropout: float, **config_changes: Any) -> _Loaded:
    """Load a folder with one of transformers' Auto classes.

    Raises UserError if anything is wrong with the folder, except for the names of weights.
    """
    quiet_loading()
    check_no_adapter(Path(source))
    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False, **config_changes)
        _check_not_quantized(config, source)
        if auto_class is AutoModelForTokenClassification:
            register_head_class(config, str(source))
        config = with_plain_outputs(with_dropout(config, dropout), source)
        loaded = _load_weights(auto_class, Path(source), config)
    except UserError:
        raise
    except Exception as error:  # a library may raise anything for a file that the user supplied
        if is_out_of_memory(error):
            raise
        raise UserError(f"model {source} does not load: {first_line(error)}") from None
    check_weight_values(source, loaded.model)
    return loaded


def _check_not_quantized(config: PretrainedConfig, source: str | Path) -> None:
    """Raise UserError for quantized weights: they cannot be trained, and most need a package."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise UserError(
        f"model {source} is quantized ({method or 'quantization_config in config.json'}): "
        "use the weights before quantization"
    )


def _load_weights(auto_class: Any, folder: Path, config: PretrainedConfig) -> _Loaded:
    weights = read_weights(folder)
    options = {
        "config": config,
        "dtype": torch.float32,
        "output_loading_info": True,
    }
    if weights.has_copies:
        # If given the folder, transformers would keep whichever copy it reads last.
        with torch.device("meta"):
            model_class = type(auto_class.from_config(config))
        model, info = model_class.from_pretrained(
            None, state_dict=weights.tensors, trust_remote_code=False, **options
        )
    else:
        model, info = auto_class.from_pretrained(str(folder), trust_remote_code=False, **options)
    return _Loaded(
        model=model,
        missing=set(info["missing_keys"]),
        unexpected=set(info["unexpected_keys"]),
    )


def quiet_loading() -> None:
    """Turn off transformers' progress bars and load reports. Our errors say what is wrong."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


# -- configurations --------------------------------------------------------------------------------


def with_dropout(config: PretrainedConfig, probability: float) -> PretrainedConfig:
    """The same configuration, changed in place, with every dropout probability as given.

    Source: Huang et al. 2024, detail 7 (probability 0).
    """
    for name in config.to_dict():
        is_dropout = "dropout" in name or "pdrop" in name
        # The exact type, because False is an int too. JSON may hold 0 for 0.0.
        if is_dropout and type(getattr(config, name)) in (int, float):
            setattr(config, name, probability)
    # Where this is not set, most families put a dropout of 0.1 before a token-classification head.
    config.classifier_dropout = probability
    return config


def with_plain_outputs(config: PretrainedConfig, source: str | Path) -> PretrainedConfig:
    """The same configuration, changed in place, with `PLAIN_OUTPUTS`; a note names the changes."""
    changed = [name for name, plain in PLAIN_OUTPUTS.items() if getattr(config, name) != plain]
    for name in changed:
        setattr(config, name, PLAIN_OUTPUTS[name])
    if changed:
        print(
            f"note: model {source}: {', '.join(changed)} in its config.json is ignored, because "
            "no stage reads it",
            file=sys.stderr,
        )
    return config


def max_positions(model: nn.Module) -> int:
    """The number of positions of a model; `sys.maxsize` if its config sets no limit."""
    config: Any = model.config
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit or sys.maxsize


def require_room(model: nn.Module, query: int, response: int, setting: str) -> None:
    """Raise UserError unless a model has positions for a query and a response of these lengths."""
    check_context_length(max_positions(model), query, response, setting)


# -- save ------------------------------------------------------------------------------------------


def save_model(
    model: PreTrainedModel | TextReward,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer in the plain transformers layout.

    `weights` contains all weights by name if the model itself holds only a part of them. If the
    model's embedding has no row for [PAD], the saved tokenizer pads with EOS, which has one;
    `load_tokenizer` restores [PAD].
    """
    quiet_loading()
    if isinstance(model, TextReward):
        folder.mkdir(parents=True, exist_ok=True)
        model.save(folder)
        pad_has_embedding = True  # nothing embeds it
    else:
        model.save_pretrained(folder, state_dict=weights)
        pad_has_embedding = tokenizer.pad_token_id < model.config.get_text_config().vocab_size
    _save_tokenizer(tokenizer, folder, pads_with_eos=not pad_has_embedding)


def _save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, *, pads_with_eos: bool
) -> None:
    # Not a property of the tokenizer: whether the hub could be reached.
    tokenizer.init_kwargs.pop("local_files_only", None)
    # Generation needs padding on the left. Attributes are saved only if init_kwargs name them.
    tokenizer.padding_side = "left"
    tokenizer.init_kwargs["padding_side"] = "left"

    pad_token = tokenizer.pad_token
    if pads_with_eos:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    tokenizer.pad_token = pad_token
