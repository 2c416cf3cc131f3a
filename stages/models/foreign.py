"""Reward models that others have saved, in our layout. Weights are read as data; no code is run.

Released ones hold the mean of the references in their configuration (Huang et al. 2024, detail 15).
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from stages.models import loading
from stages.running.files import read_record
from stages.running.hub import fetch_model
from stages.running.inputs import model_source
from stages.settings.checks import UserError, first_line
from stages.settings.config import Config
from stages.training import checkpoints

# Of the paper's checkpoints; older ones hold buffers, which are computed, not learned.
BACKBONE = "lm_backbone."
OLD_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def taken_model(config: Config, policy: Path, instead: str) -> tuple[PreTrainedModel, float | None]:
    """What `released.reward_model` names, as `load_released_reward_model` gives it.

    Raises UserError, with what to do `instead`, unless it reads the tokens of the policy's folder.
    """
    source = model_source("released.reward_model", config.released.reward_model)
    folder, tokenizer = fetch_model(source).folder, loading.load_tokenizer(policy)
    own = loading.load_tokenizer(folder) if (folder / "tokenizer.json").exists() else tokenizer
    model, mean = load_released_reward_model(folder)
    fits = loading.same_tokens(own, tokenizer)
    if not fits or model.config.get_text_config().vocab_size < tokenizer.pad_token_id:
        other = f"has another tokenizer than {config.base.checkpoint}, whose tokens it would read"
        raise UserError(f"{source.label} {other}: {instead}")
    return model, mean


def load_released_reward_model(folder: Path) -> tuple[PreTrainedModel, float | None]:
    """A reward model in our layout, in float32, and the mean that was folded into its bias.

    The mean is None where the folder is in our layout already. Others are a `ScalarModel` (Huang et
    al. 2024), an `AutoModelForSequenceClassification` with one label (TRL) and a backbone with a
    layer of one row (OpenRLHF, which may keep mean and deviation of its scores in the config). A
    head without a bias gets one of 0. Raises UserError for a folder that holds none of them.
    """
    saved = read_record(folder / "config.json")
    if saved is None:
        raise UserError(f"{folder} holds no reward model: config.json is missing")
    labels = len(saved.get("id2label", ()))
    if "TokenClassification" in str(saved.get("architectures")) and labels == 1:
        return loading.load_reward_model(folder).eval(), None
    checkpoints.refuse_adapter(folder)
    weights, _ = checkpoints.read_weights(folder)
    model = AutoModelForTokenClassification.from_config(_config(folder, saved)).float()
    width = loading.head_of(model).in_features
    rows = [name for name, x in weights.items() if x.shape == (1, width)]
    if len(rows) != 1:
        known = "known are token and sequence classification with one label, and a ScalarModel"
        what = f"{len(rows)} of its weights are a head of one row ({known})"
        raise UserError(f"{folder} holds no reward model: {what}")
    head, new_head = rows[0].removesuffix("weight"), f"{loading.head_name(model)}."
    renamed = {f"{new_head}bias": torch.zeros(1)}
    for name, x in weights.items():
        if name.startswith(head):
            renamed[name.replace(head, new_head)] = x.float()
        elif not name.endswith(OLD_BUFFERS):
            renamed[name.replace(BACKBONE, f"{model.base_model_prefix}.")] = x.float()
    try:
        loaded = model.load_state_dict(renamed, strict=False)
    except RuntimeError:  # it lists every weight of another shape
        what = "its weights have other shapes than its configuration says"
        raise UserError(f"{folder} does not load: {what}") from None
    checkpoints.refuse_weights(folder, set(loaded.missing_keys), set(loaded.unexpected_keys))
    checkpoints.refuse_odd(folder, model)
    mean, deviation = _normalization(folder, saved)
    loading.shift_scores(model, -mean)
    with torch.no_grad():
        for weight in loading.head_of(model).parameters():
            weight.div_(deviation)
    loading.in_float32(model)
    return model.eval(), mean


def _normalization(folder: Path, saved: dict[str, Any]) -> tuple[float, float]:
    """Mean and deviation that the configuration takes off scores, and divides them by."""
    usual = {"mean": 0.0, "std": 1.0} if saved.get("normalize_reward") else {"bias": 0.0}
    values = [saved.get(name, without) for name, without in usual.items()]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        what = f"{' and '.join(usual)} must be a number, not {values[0]!r}"
        raise UserError(f"{folder}/config.json: {what}")
    return float(values[0]), float([*values, 1.0][1])


def _config(folder: Path, saved: dict[str, Any]) -> Any:
    """The configuration of a folder, or of its backbone: one label, a bias, and no dropout."""
    as_ours = {"num_labels": 1, "token_classification_bias": True}
    others = "model_type architectures torch_dtype dtype id2label label2id num_labels".split()
    try:
        if backbone := saved.get("base_config"):
            fields = {name: value for name, value in backbone.items() if name not in others}
            config: Any = AutoConfig.for_model(backbone["model_type"], **fields | as_ours)
        else:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, **as_ours)
    except Exception as error:  # whatever a library says of a file that the user has given
        what = f"its configuration does not load ({first_line(error)})"
        raise UserError(f"{folder}: {what}: fetch it anew") from None
    loading.require_heads(config, str(folder))
    return loading.plain_config(loading.with_dropout(config, 0.0), folder)
