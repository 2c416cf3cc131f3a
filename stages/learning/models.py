"""Models on disk and in memory: load and save them, also with adapters or in parts.

The policy is an `AutoModelForCausalLM`; the reward model and the critic are an
`AutoModelForTokenClassification` with one label, a scalar for every token, whose head bias carries
the reward normalization. Both open with plain transformers. Any causal family that has both
classes will do.

A released reward model may also be in the layout of the code of Huang et al. 2024: a class of its
own with a backbone under `lm_backbone`, a linear layer `scalar_head` on its last hidden state, and
the mean score of the references in `config.bias`, which its forward pass subtracts. It is converted
to a native class: the head's bias becomes `scalar_head.bias - config.bias`, so every score stays
what it was. Its weights are read as data; no code is run.
Source: Huang et al. 2024, details 11 and 15; `ScalarModel` of their code.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from stages.learning.heads import head_name, head_of, in_float32, require_heads, reset_head
from stages.learning.lora import merge
from stages.learning.sharding import gathered, is_sharded, whole_weights
from stages.learning.vocabulary import give_reading_head
from stages.running.files import read_json, read_record
from stages.settings.checks import UserError, check_room, first_line, is_out_of_memory

PAD_TOKEN = "[PAD]"
LM_HEAD = {"lm_head.weight", "lm_head.bias", "embed_out.weight"}
# In released reward models. Checkpoints of older versions of transformers hold the buffers; they
# are computed, not learned.
BACKBONE, HEAD = "lm_backbone.", "scalar_head."
OLD_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer with a [PAD] of our own as its last id, whatever pad it has had.

    If the pad were the EOS, as in many chat models, masking pads would hide every EOS from the loss
    and the model would never learn to stop. If it were another real token, sampling would leave out
    all ids above it. Raises UserError if the tokenizer does not load or has no EOS.
    Source: Huang et al. 2024, detail 3.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:  # whatever a library says of a file that the user has given
        raise UserError(f"tokenizer {source} does not load: {first_line(error)}") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"tokenizer {source} is no fast one: save it with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {source} has no EOS token: set eos_token in its config")
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary.values())
    if tokenizer.pad_token_id == last and tokenizer.pad_token.startswith(PAD_TOKEN):
        return tokenizer  # saved by an earlier stage
    name = PAD_TOKEN
    while name in vocabulary:  # an encoder's own [PAD], which is a token among others here
        name += PAD_TOKEN
    tokenizer.add_special_tokens({"pad_token": name})
    if tokenizer.pad_token_id <= last:
        raise UserError(f"tokenizer {source} has gaps in its ids: no id is free for {PAD_TOKEN}")
    return tokenizer


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
    _refuse_weights(source, set(info["missing_keys"]), set(info["unexpected_keys"]))
    give_reading_head(model)
    return model


def load_reward_model(source: str | Path, dropout: float = 0.0) -> PreTrainedModel:
    """A saved reward model or critic in float32; loading is strict."""
    model, info = _load(AutoModelForTokenClassification, source, dropout, num_labels=1)
    _refuse_weights(source, set(info["missing_keys"]), set(info["unexpected_keys"]))
    in_float32(model)
    return model


def new_reward_model(
    policy_folder: Path, generator: torch.Generator, dropout: float = 0.0
) -> PreTrainedModel:
    """A reward model on the policy's backbone, with a new head (`reset_head`)."""
    changes = {"num_labels": 1, "token_classification_bias": True}  # some families could omit it
    model, info = _load(AutoModelForTokenClassification, policy_folder, dropout, **changes)
    ours = {f"{head_name(model)}.{kind}" for kind in ("weight", "bias")}
    unexpected = set(info["unexpected_keys"]) - LM_HEAD
    _refuse_weights(policy_folder, set(info["missing_keys"]) - ours, unexpected)
    reset_head(model, generator)
    in_float32(model)
    return model


def _load(
    auto: Any, source: str | Path, dropout: float, **changes: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    quiet_loading()
    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False, **changes)
        # Quantised weights do not learn, and most need a package and a device of their own.
        if quantised := getattr(config, "quantization_config", None):
            how = quantised.get("quant_method") if isinstance(quantised, dict) else None
            what = f"quantised ({how or 'quantization_config in config.json'})"
            raise UserError(f"model {source} is {what}: give the weights that it was made from")
        model, info = auto.from_pretrained(
            str(source),
            config=with_dropout(config, dropout),
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except Exception as error:  # whatever a library says of a file that the user has given
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        raise UserError(f"model {source} does not load: {first_line(error)}") from None
    _refuse_non_finite(source, model)
    return model, info


def _refuse_non_finite(source: str | Path, model: PreTrainedModel) -> None:
    """One such weight makes every token of a policy alike, and every score."""
    # A sum is finite where all its terms are; an overflow is told apart by looking at each.
    suspects = [name for name, x in model.state_dict().items() if not x.sum().isfinite()]
    bad = [name for name in suspects if not model.state_dict()[name].isfinite().all()]
    if bad:
        raise UserError(
            f"model {source} has weights that are not finite ({bad[0]}): make or fetch it anew"
        )


def quiet_loading() -> None:
    """Have transformers show no bars and no load report; what is wrong is said in one line."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _refuse_weights(source: str | Path, missing: set[str], unexpected: set[str]) -> None:
    for kind, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise UserError(f"model {source} {kind} {len(names)} weights ({some}): wrong folder?")


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer in the plain transformers layout.

    `weights` by name, if the model does not hold them whole itself.
    """
    quiet_loading()
    model.save_pretrained(folder, state_dict=weights)
    # Whether the hub could be asked is no part of a tokenizer.
    tokenizer.init_kwargs.pop("local_files_only", None)
    tokenizer.save_pretrained(folder)


def keep_model(
    accelerator: Accelerator, network: Any, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> PreTrainedModel:
    """Merge adapters, write the plain model, and return it whole on this process's device.

    The main process writes. A sharded network cannot be used afterwards: what is returned was read
    from what was written. All processes must call this.
    """
    model = accelerator.unwrap_model(network)
    if not is_sharded(model):
        merge(model)
        if accelerator.is_main_process:
            save_model(model, tokenizer, folder)
        return model
    with gathered(model):
        merge(model)
        weights = whole_weights(model, accelerator.is_main_process)
        if accelerator.is_main_process:
            save_model(model, tokenizer, folder, weights)
    accelerator.wait_for_everyone()
    load = load_reward_model if head_name(model) else load_policy
    return load(folder).to(accelerator.device)


# -- released reward models ------------------------------------------------------------------------


def load_released_reward_model(folder: Path) -> tuple[PreTrainedModel, float | None]:
    """A reward model in our layout, in float32, and the mean that was folded into its bias.

    The mean is None where the folder is in our layout already. Raises UserError for a folder that
    holds neither.
    """
    saved = read_record(folder / "config.json")
    if saved is None:
        raise UserError(f"{folder} holds no reward model: config.json is missing")
    if "base_config" not in saved and "base_model" not in saved:
        if len(saved.get("id2label", ())) != 1:
            raise UserError(
                f"{folder} holds no reward model: that is an AutoModelForTokenClassification with"
                " one label, or a released ScalarModel"
            )
        return load_reward_model(folder).eval(), None
    weights = read_weights(folder)
    missing = {f"{HEAD}weight", f"{HEAD}bias"} - weights.keys()
    if missing:
        raise UserError(f"{folder} lacks {', '.join(sorted(missing))}: no released reward model")
    model = AutoModelForTokenClassification.from_config(_base_config(folder, saved))
    _fill_backbone(folder, model.float().base_model, weights)
    head, mean = head_of(model), float(saved.get("bias", 0.0))
    with torch.no_grad():
        head.weight.copy_(weights[f"{HEAD}weight"])
        head.bias.copy_(weights[f"{HEAD}bias"].float() - mean)
    in_float32(model)
    return model.eval(), mean


def _base_config(folder: Path, saved: dict[str, Any]) -> Any:
    """The configuration of the backbone, as the folder holds it, with one label and no dropout."""
    given: dict[str, Any] = saved.get("base_config") or {}
    others = "model_type architectures torch_dtype dtype id2label label2id num_labels".split()
    kind = given.get("model_type")
    fields = {name: value for name, value in given.items() if name not in others}
    if kind is None:
        raise UserError(f"{folder}: base_config in config.json names no model_type")
    try:
        config = AutoConfig.for_model(kind, **fields, num_labels=1, token_classification_bias=True)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: its base_config does not load: {first_line(error)}") from None
    require_heads(config, str(folder))
    return with_dropout(config, 0.0)


def _fill_backbone(folder: Path, backbone: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load the backbone's weights; none may be missing, of another shape or left over."""
    ours = {
        name.removeprefix(BACKBONE): weight.float()
        for name, weight in weights.items()
        if name.startswith(BACKBONE) and not name.endswith(OLD_BUFFERS)
    }
    try:
        loaded = backbone.load_state_dict(ours, strict=False)
    except RuntimeError:  # it lists every weight of another shape
        why = "its weights have other shapes than its base_config"
        raise UserError(f"{folder} does not load: {why}") from None
    wrong = [*loaded.missing_keys, *loaded.unexpected_keys]
    if wrong:
        names = ", ".join(wrong[:3])
        raise UserError(f"{folder} lacks or adds {len(wrong)} backbone weights ({names})")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint: safetensors or `.bin`, in one file or several.

    Raises UserError if there are none.
    """
    names: list[str] = [name for name in SINGLE_FILES if (folder / name).exists()][:1]
    for index in INDEXES:
        if not names and (parts := read_json(folder / index)) is not None:
            names = sorted(set(parts["weight_map"].values()))
    if not names:
        raise UserError(f"{folder} holds no weights: neither {' nor '.join(SINGLE_FILES)}")
    weights: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        try:
            if name.endswith(".safetensors"):
                weights |= load_file(path)
            else:
                weights |= torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"{path} does not load: {first_line(error)}") from None
    return weights
