"""A released policy (`make eval POLICY=...`): a checkpoint that others trained, judged as it is.

The base stage has loaded it with its own tokenizer and tokenised the posts. This stage puts it
where policies are looked for, and its reward model, if one is given, beside it in our layout:
released ones hold the mean of the references in their configuration (Huang et al. 2024, detail 15).
"""

import math
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from stages.driving.start import run_stage
from stages.learning.checkpoints import read_weights, refuse_adapter
from stages.learning.models import (
    head_name,
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
from stages.running.hub import fetch_model, model_source
from stages.runs import open_stage
from stages.settings.checks import UserError, first_line
from stages.settings.config import Config

# In released reward models. Checkpoints of older versions of transformers hold the buffers; they
# are computed, not learned.
BACKBONE, HEAD = "lm_backbone.", "scalar_head."
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
    refuse_adapter(folder)
    weights, _ = read_weights(folder)
    mean = saved.get("bias", 0.0)
    if type(mean) not in (int, float) or not math.isfinite(mean):
        raise UserError(f"{folder}/config.json: bias must be the mean of the scores, not {mean!r}")
    model = AutoModelForTokenClassification.from_config(_base_config(folder, saved)).float()
    head = head_name(model)
    renamed = {
        name.replace(BACKBONE, f"{model.base_model_prefix}.").replace(HEAD, f"{head}."): x.float()
        for name, x in weights.items()
        if not name.endswith(OLD_BUFFERS)
    }
    try:
        loaded = model.load_state_dict(renamed, strict=False)
    except RuntimeError:  # it lists every weight of another shape
        why = "its weights have other shapes than its base_config"
        raise UserError(f"{folder} does not load: {why}") from None
    refuse_weights(folder, set(loaded.missing_keys), set(loaded.unexpected_keys))
    refuse_odd(folder, model)
    shift_scores(model, -mean)
    in_float32(model)
    return model.eval(), float(mean)


def _base_config(folder: Path, saved: dict[str, Any]) -> Any:
    """The configuration of the backbone, as the folder holds it, with one label and no dropout."""
    backbone: dict[str, Any] = saved.get("base_config") or {}
    others = "model_type architectures torch_dtype dtype id2label label2id num_labels".split()
    kind = backbone.get("model_type")
    fields = {name: value for name, value in backbone.items() if name not in others}
    if kind is None:
        raise UserError(f"{folder}: base_config in config.json names no model_type")
    try:
        config = AutoConfig.for_model(kind, **fields, num_labels=1, token_classification_bias=True)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}: its base_config does not load: {first_line(error)}") from None
    require_heads(config, str(folder))
    return plain_config(with_dropout(config, 0.0), folder)


def main(argv: list[str] | None = None) -> None:
    """Command line of the stage."""
    run_stage("released", take_released, argv, "a released policy, judged without training")


if __name__ == "__main__":
    main()
