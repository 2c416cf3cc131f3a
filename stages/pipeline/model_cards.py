"""The model card of a saved model: what it is, code that runs it, its settings and results.

A card follows from a stage's settings and results. No stage reads it and no hash covers it, so a
change to the template makes nothing stale.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from stages.config.config import Config
from stages.config.identity import settings_of
from stages.config.paths import is_path
from stages.config.public import public_value
from stages.config.sections import BEFORE_EOS, HUB, RANDOM, format_post
from stages.config.stages import CARD, POLICY_STAGES, STAGES
from stages.runs.files import write_text
from stages.runs.manifest import read_manifest, stage_folder

TEMPLATE = Path(__file__).with_name("model_card.md")
FUNCTION_RECORD = "reward.json"  # in the folder of a model where a function is the reward

# The example in the code of a card. It has words of the built-in world, so that its models know
# them.
POST = {
    "subreddit": "tifu",
    "title": "My bike",
    "post": "My boss sold my bike. It was on monday. I told tom. We were at work.",
}
SUMMARY = " My boss sold my bike, on monday."


def write_cards(config: Config, stage: str, accuracy: Mapping[str, float]) -> None:
    """Write README.md into the folder of every model that a finished stage has saved.

    `accuracy`: the accuracy on the stage's held-out pairs, which is shown with its results.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return
    manifest = manifest | {"results": manifest["results"] | accuracy}
    for name in STAGES[stage].models:
        model = folder / name
        if model.is_dir() and not (model / FUNCTION_RECORD).exists():
            write_text(model / CARD, card(config, stage, name, manifest))


def card(config: Config, stage: str, folder: str, manifest: Mapping[str, Any]) -> str:
    """The card of the model in a stage's folder `model` or `critic`.

    From the stage's manifest it uses `inputs` and `results`.
    """
    is_policy = stage in POLICY_STAGES and folder == "model"
    metadata = ModelCardData(
        library_name="transformers",
        base_model=base_model_id(config) or None,
        datasets=dataset_ids(config) or None,
        pipeline_tag="text-generation" if is_policy else None,
        tags=["rlhf", "summarization", "tldr", stage if is_policy else "reward-model"],
    )

    inputs = []
    for name in STAGES:
        if name in manifest["inputs"]:
            inputs.append(f"{name} `{manifest['inputs'][name][:12]}`")
    results = {}
    for key, value in manifest["results"].items():
        if isinstance(value, int | float):
            results[key] = f"{value:.4g}"

    longest = config.data.max_summary_tokens
    if stage == "dpo":
        longest = config.eval.dpo_summary_tokens
    text = ModelCard.from_template(
        metadata,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        run=f"{config.name}, seed {config.seed}",
        what=f"critic of {stage}" if folder == "critic" else f"model of stage {stage}",
        is_policy=is_policy,
        start=public_value("base.checkpoint", config.base.checkpoint),
        source=public_value("data.source", config.data.source),
        query=format_post(POST, config.data.prompt),
        summary=SUMMARY,
        bos="tokenizer.bos_token + " if config.base.bos == "always" else "",
        adds_special_tokens=config.base.bos == "auto",
        is_chat=config.data.chat_template,
        is_read_before_eos=config.rm.read_at == BEFORE_EOS,
        longest=longest,
        inputs=", ".join(inputs),
        settings=shown_settings(config, stage),
        results=results,
    )
    return f"{text}\n"


def base_model_id(config: Config) -> str:
    """The hub id of the checkpoint that the run started from; empty if it is not on the hub."""
    checkpoint = config.base.checkpoint.partition("@")[0]
    is_id = checkpoint.count("/") == 1 and not is_path(checkpoint) and checkpoint != RANDOM
    return checkpoint if is_id else ""


def dataset_ids(config: Config) -> list[str]:
    """The hub ids of the data sets, without revision and configuration, each once."""
    if config.data.source != HUB:
        return []
    ids = []
    for name in (config.data.sft_dataset, config.data.comparisons_dataset):
        name = name.partition("@")[0].partition(":")[0]
        if name and not is_path(name) and name not in ids:
            ids.append(name)
    return ids


def shown_settings(config: Config, stage: str) -> dict[str, Any]:
    """The settings that a stage depends on, as others may see them."""
    shown: dict[str, Any] = {"seed": config.seed, "preset": Path(config.preset).name}
    for section, values in settings_of(config, stage).items():
        if not isinstance(values, dict):  # the seed
            continue
        for field, value in values.items():
            name = f"{section}.{field}"
            shown[name] = public_value(name, value)
    return shown
