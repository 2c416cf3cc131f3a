"""Models: load and save them; the scalar head of a reward model or critic, in any family.

The policy is an `AutoModelForCausalLM`; the reward model and the critic are an
`AutoModelForTokenClassification` with one label, a scalar for every token, whose head bias carries
the reward normalization. Both open with plain transformers. A causal family that has no such class
gets transformers' generic one here; elsewhere such a model opens as an
`AutoModelForSequenceClassification` with one label, without the bias.
Source: Huang et al. 2024, details 11 and 15.
"""

import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GenericForTokenClassification
from transformers.utils import logging as transformers_logging

from stages.models.reward_function import RECORD, TextReward, load_text_reward
from stages.settings.checks import UserError, check_room, first_line, is_out_of_memory
from stages.training import checkpoints

PAD_TOKEN = "[PAD]"
LM_HEAD = {"lm_head.weight", "lm_head.bias", "embed_out.weight"}
# What a checkpoint's config may ask a model to give, and what it gives here.
OUTPUTS = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
# Tokenizers that give these equal ids, and those ids equal texts, cut texts alike.
SAMPLES = (
    "TL;DR: In 2023 I'm 21 (F), they'RE 1,000.50 km away!!! I’ve  said   so\n\n\n\tTwice.  ",
    " a_b camelCase HTML5 http://a.b/c?d=1%20&e=[2] <|endoftext|></s> don't\r\n",
    "café cafe\u0301 \uff21\uff22 ½ x² 你好 рус ١٢ \U0001f600\u200d",
)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer with a [PAD] of our own as its last id, whatever pad it has had.

    If the pad were the EOS, as in many chat models, masking pads would hide every EOS from the loss
    and the model would never learn to stop. If it were another real token, sampling would leave out
    all ids above it. Raises UserError if the tokenizer does not load, has no EOS or no other token.
    Source: Huang et al. 2024, detail 3.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
        tokenizer = _as_the_file_says(tokenizer, Path(source) / "tokenizer.json")
    except Exception as error:  # whatever a library says of a file that the user has given
        raise UserError(f"tokenizer {source} does not load: {first_line(error)}") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"tokenizer {source} is no fast one: save it with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {source} has no EOS token: set eos_token in its config")
    _without_dropout(tokenizer.backend_tokenizer)
    words = tokenizer.backend_tokenizer.encode_batch(SAMPLES[0].split(), add_special_tokens=False)
    if not any(word.ids for word in words):  # some hold added tokens for white space alone
        raise UserError(f"tokenizer {source} has no tokens for texts: its vocabulary is empty")
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary.values())
    final = tokenizer.convert_ids_to_tokens(last)
    if final.startswith(PAD_TOKEN) and tokenizer.pad_token in (final, tokenizer.eos_token):
        tokenizer.pad_token = final  # saved by an earlier stage
        return tokenizer
    name = PAD_TOKEN
    while name in vocabulary:  # an encoder's own [PAD], which is a token among others here
        name += PAD_TOKEN
    tokenizer.add_special_tokens({"pad_token": name})
    if tokenizer.pad_token_id <= last:
        raise UserError(f"tokenizer {source} has gaps in its ids: no id is free for {PAD_TOKEN}")
    return tokenizer


def _as_the_file_says(tokenizer: Any, file: Path) -> Any:
    """The tokenizer, or what its file says where the two read texts differently.

    Some classes of transformers take the vocabulary from the file and nothing else.
    """
    if type(tokenizer) is PreTrainedTokenizerFast or not file.exists():
        return tokenizer
    if _reading(tokenizer.backend_tokenizer) == _reading(Tokenizer.from_file(str(file))):
        return tokenizer
    kind = f"{type(tokenizer).__name__} of transformers"
    print(f"note: {kind} does not read texts as {file} says: the file is taken", file=sys.stderr)
    return PreTrainedTokenizerFast.from_pretrained(
        str(file.parent), eos_token=tokenizer.eos_token, trust_remote_code=False
    )


def same_tokens(left: PreTrainedTokenizerBase, right: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have equal vocabularies, and give sample texts equal ids."""
    if left.get_vocab() != right.get_vocab():
        return False
    return _reading(left.backend_tokenizer) == _reading(right.backend_tokenizer)


def _reading(backend: Tokenizer) -> tuple[list[list[int]], list[str]]:
    """The ids of sample texts, and the texts of the ids."""
    _without_dropout(backend)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    ids = [each.ids for each in backend.encode_batch(SAMPLES, add_special_tokens=False)]
    return ids, backend.decode_batch(ids, skip_special_tokens=False)


def _without_dropout(backend: Tokenizer) -> None:
    """Let a text have the same tokens each time; a tokenizer's file may ask for chance."""
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None


def positions_of(model: nn.Module) -> int:
    """How many tokens a model can take; without bound if its config names no limit."""
    config: Any = model.config
    config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def require_room(model: nn.Module, query: int, response: int, setting: str) -> None:
    """Raise UserError unless a model has positions for so many tokens of query and response."""
    check_room(positions_of(model), query, response, setting)


def with_dropout(config: PretrainedConfig, probability: float) -> PretrainedConfig:
    """The same configuration with every dropout probability as given.

    Source: Huang et al. 2024, detail 7 (probability 0).
    """
    for name in config.to_dict():
        # Type, not isinstance: False is an int too. JSON may hold 0 for 0.0.
        if ("dropout" in name or "pdrop" in name) and type(getattr(config, name)) in (int, float):
            setattr(config, name, probability)
    # Where this is not set, most families put a dropout of 0.1 before a token-classification head.
    config.classifier_dropout = probability
    return config


def load_policy(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A causal LM in float32; missing or unexpected weights are a UserError."""
    model, info = _load(AutoModelForCausalLM, source, dropout)
    checkpoints.refuse_weights(source, set(info["missing_keys"]), set(info["unexpected_keys"]))
    return model


def load_reward_model(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A saved reward model or critic in float32; loading is strict. A reward of one's own is a
    `TextReward`.
    """
    if (Path(source) / RECORD).exists():
        return cast(PreTrainedModel, load_text_reward(Path(source), load_tokenizer(source)))
    model, info = _load(AutoModelForTokenClassification, source, dropout, num_labels=1)
    checkpoints.refuse_weights(source, set(info["missing_keys"]), set(info["unexpected_keys"]))
    in_float32(model)
    return model


def new_reward_model(
    policy_folder: Path, generator: torch.Generator, dropout: float = 0.0
) -> PreTrainedModel:
    """A reward model on the policy's backbone, with a new head (`reset_head`)."""
    changes = {"num_labels": 1, "token_classification_bias": True}  # some families could omit it
    model, info = _load(AutoModelForTokenClassification, policy_folder, dropout, **changes)
    head_weights = {f"{head_name(model)}.{kind}" for kind in ("weight", "bias")}
    unexpected = set(info["unexpected_keys"]) - LM_HEAD
    checkpoints.refuse_weights(policy_folder, set(info["missing_keys"]) - head_weights, unexpected)
    reset_head(model, generator)
    in_float32(model)
    return model


def _load(
    auto: Any, source: str | Path, dropout: float, **changes: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    quiet_loading()
    checkpoints.refuse_adapter(Path(source))
    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False, **changes)
        # Quantised weights do not learn, and most need a package and a device of their own.
        if quantised := getattr(config, "quantization_config", None):
            how = quantised.get("quant_method") if isinstance(quantised, dict) else None
            what = f"quantised ({how or 'quantization_config in config.json'})"
            raise UserError(f"model {source} is {what}: give the weights that it was made from")
        if auto is AutoModelForTokenClassification:
            require_heads(config, str(source))
        config = plain_config(with_dropout(config, dropout), source)
        model, info = _filled(auto, Path(source), config)
    except Exception as error:  # whatever a library says of a file that the user has given
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        raise UserError(f"model {source} does not load: {first_line(error)}") from None
    checkpoints.refuse_odd(source, model)
    return model, info


def _filled(auto: Any, folder: Path, config: PretrainedConfig) -> Any:
    """The model with the folder's weights, in float32, and which were missing or unexpected."""
    wanted = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    weights, copies = checkpoints.read_weights(folder)
    if not copies:
        return auto.from_pretrained(str(folder), trust_remote_code=False, **wanted)
    with torch.device("meta"):
        kind = type(auto.from_config(config))
    return kind.from_pretrained(None, state_dict=weights, trust_remote_code=False, **wanted)


def plain_config(config: PretrainedConfig, source: str | Path) -> PretrainedConfig:
    """The configuration with OUTPUTS alone; one line says what is left out."""
    more = [name for name, plain in OUTPUTS.items() if getattr(config, name) != plain]
    for name in more:
        setattr(config, name, OUTPUTS[name])
    if more:
        names = f"{', '.join(more)} of its config.json"
        print(f"note: model {source}: {names} is not used: no stage reads it", file=sys.stderr)
    return config


def quiet_loading() -> None:
    """Have transformers show no bars and no load report; what is wrong is said in one line."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def save_model(
    model: PreTrainedModel | TextReward,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer in the plain transformers layout.

    `weights` by name, if the model does not hold them whole itself. Where its embedding has no row
    for [PAD], the saved tokenizer pads with EOS, which has one; `load_tokenizer` takes [PAD] again.
    """
    quiet_loading()
    rows = 0
    if isinstance(model, TextReward):
        folder.mkdir(parents=True, exist_ok=True)
        model.save(folder)
    else:
        model.save_pretrained(folder, state_dict=weights)
        rows = model.config.get_text_config().vocab_size
    # Whether the hub could be asked is no part of a tokenizer.
    tokenizer.init_kwargs.pop("local_files_only", None)
    pad = tokenizer.pad_token
    if tokenizer.pad_token_id >= rows > 0:
        tokenizer.pad_token = tokenizer.eos_token
    # As whoever generates needs it; what is saved are attributes that init_kwargs name.
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    tokenizer.save_pretrained(folder)
    tokenizer.pad_token = pad


class Float32Head(nn.Linear):
    """A linear layer whose product and sum are in its weights' precision, under autocast too."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [.., H] in any precision -> [.., labels]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def require_heads(config: PretrainedConfig, source: str) -> None:
    """Let a model's family have a token-classification class, a generic one where it has none.

    Raises UserError for a family that has no causal LM either.
    """
    family = type(config)
    if family in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(family, None)
    if causal is None:
        raise UserError(
            f"model {source} is a {config.model_type}, a family without a causal LM in "
            "transformers: choose another base.checkpoint"
        )
    of_family = next(
        kind
        for kind in causal.__mro__
        if kind.__name__.endswith("PreTrainedModel") and kind.config_class is not None
    )
    made_here = type(
        family.__name__.removesuffix("Config") + "ForTokenClassification",
        (GenericForTokenClassification, of_family),
        {"config_class": family, "base_model_prefix": causal.base_model_prefix},
    )
    AutoModelForTokenClassification.register(family, made_here, exist_ok=True)


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
    if isinstance(model, TextReward):
        model.bias += amount
        return
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
