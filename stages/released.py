"""A released policy (`make eval POLICY=...`): a checkpoint that others trained, judged as it is.

The base stage has loaded it with its own tokenizer and tokenised the posts. This stage puts it
where policies are looked for, and its reward model, if one is given, beside it in our layout:
released ones hold the mean of the references in their configuration (Huang et al. 2024, detail 15).
"""

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from stages.learning.checkpoints import read_weights, refuse_adapter
from stages.learning.models import (
    head_name,
    head_of,
    in_float32,
    load_reward_model,
    load_tokenizer,
    plain_config,
    refuse_odd,
    refuse_weights,
    require_heads,
    same_tokens,
    save_model,
    shift_scores,
    with_dropout,
)
from stages.running.files import link_or_copy, read_record
from stages.running.hub import fetch_model
from stages.running.inputs import model_source
from stages.runs import open_stage
from stages.settings.checks import UserError, first_line
from stages.settings.config import Config

# In released reward models. Checkpoints of older versions of transformers hold the buffers; they
# are computed, not learned.
BACKBONE = "lm_backbone."
OLD_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def take_released(config: Config) -> None:
    """Run the stage. Raises UserError for a reward model that does not load or does not fit."""
    with open_stage(config, "released") as run:
        if not config.released.policy:
            raise UserError("stage released needs a released policy: add POLICY=")
        base = run.require("base") / "model"
        shutil.rmtree(run.partial / "model", ignore_errors=True)  # of an interrupted attempt
        (run.partial / "model").mkdir()
        for path in base.iterdir():  # without a second copy where the disk allows it
            link_or_copy(path, run.partial / "model" / path.name)
        results: dict[str, Any] = {"reward_model": None}
        if config.released.reward_model:
            source = model_source("released.reward_model", config.released.reward_model)
            folder, tokenizer = fetch_model(source).folder, load_tokenizer(base)
            own = (folder / "tokenizer.json").exists()
            if own and not same_tokens(load_tokenizer(folder), tokenizer):
                raise UserError(
                    "REWARD_MODEL has another tokenizer than POLICY, whose tokens it would read: "
                    "judge with it instead (judge.kind=reward_model judge.model=<its folder>)"
                )
            reward_model, mean = load_released_reward_model(folder)
            save_model(reward_model, tokenizer, run.partial / "reward_model")
            results["reward_model"] = {"converted": mean is not None, "mean_in_config": mean}
        run.finish(results)


def load_released_reward_model(folder: Path) -> tuple[PreTrainedModel, float | None]:
    """A reward model in our layout, in float32, and the mean that was folded into its bias.

    The mean is None where the folder is in our layout already. Others are a `ScalarModel` (Huang et
    al. 2024), an `AutoModelForSequenceClassification` with one label (TRL) and a backbone with a
    layer of one row (OpenRLHF, which may keep mean and deviation of its scores in the
    configuration). A head without a bias gets one of 0. Raises UserError for a folder that holds
    none of them.
    """
    saved = read_record(folder / "config.json")
    if saved is None:
        raise UserError(f"{folder} holds no reward model: config.json is missing")
    labels = len(saved.get("id2label", ()))
    if "TokenClassification" in str(saved.get("architectures")) and labels == 1:
        return load_reward_model(folder).eval(), None
    refuse_adapter(folder)
    weights, _ = read_weights(folder)
    model = AutoModelForTokenClassification.from_config(_config(folder, saved)).float()
    rows = [name for name, x in weights.items() if x.shape == (1, head_of(model).in_features)]
    if len(rows) != 1:
        raise UserError(
            f"{folder} holds no reward model: {len(rows)} of its weights are a head of one row "
            "(known are token and sequence classification with one label, and a ScalarModel)"
        )
    head, new_head = rows[0].removesuffix("weight"), f"{head_name(model)}."
    renamed = {f"{new_head}bias": torch.zeros(1)}
    for name, x in weights.items():
        if name.startswith(head):
            renamed[name.replace(head, new_head)] = x.float()
        elif not name.endswith(OLD_BUFFERS):
            renamed[name.replace(BACKBONE, f"{model.base_model_prefix}.")] = x.float()
    try:
        loaded = model.load_state_dict(renamed, strict=False)
    except RuntimeError:  # it lists every weight of another shape
        raise UserError(
            f"{folder} does not load: its weights have other shapes than its configuration says"
        ) from None
    refuse_weights(folder, set(loaded.missing_keys), set(loaded.unexpected_keys))
    refuse_odd(folder, model)
    mean, deviation = _normalization(folder, saved)
    shift_scores(model, -mean)
    with torch.no_grad():
        for weight in head_of(model).parameters():
            weight.div_(deviation)
    in_float32(model)
    return model.eval(), mean


def _normalization(folder: Path, saved: dict[str, Any]) -> tuple[float, float]:
    """Mean and deviation that the configuration takes off scores, and divides them by."""
    usual = {"mean": 0.0, "std": 1.0} if saved.get("normalize_reward") else {"bias": 0.0}
    values = [saved.get(name, without) for name, without in usual.items()]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        names = " and ".join(usual)
        raise UserError(f"{folder}/config.json: {names} must be a number, not {values[0]!r}")
    return float(values[0]), float([*values, 1.0][1])


def _config(folder: Path, saved: dict[str, Any]) -> Any:
    """The configuration of a folder, or of its ScalarModel's backbone, with one label, a bias of
    its head, and no dropout.
    """
    as_ours = {"num_labels": 1, "token_classification_bias": True}
    others = "model_type architectures torch_dtype dtype id2label label2id num_labels".split()
    backbone: dict[str, Any] | None = saved.get("base_config")
    try:
        if backbone is None:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, **as_ours)
        else:
            fields = {name: value for name, value in backbone.items() if name not in others}
            config = AutoConfig.for_model(backbone["model_type"], **fields | as_ours)
    except Exception as error:  # whatever a library says of a file that the user has given
        what = f"its configuration does not load ({first_line(error)})"
        raise UserError(f"{folder}: {what}: fetch it anew") from None
    require_heads(config, str(folder))
    return plain_config(with_dropout(config, 0.0), folder)
