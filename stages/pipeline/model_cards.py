"""The README.md of a saved model: what it is, code that runs it, settings and results.

A card is a function of a stage's settings and results. No stage reads it and no hash covers it:
other words in it make nothing stale. Its head is the one that the Hugging Face hub reads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from stages.config.config import HUB, RANDOM, Config, is_path, public_value, settings_of
from stages.config.sections import BEFORE_EOS, format_post
from stages.config.stages import CARD, POLICY_STAGES, STAGES
from stages.runs.files import write_text
from stages.runs.manifest import read_manifest, stage_folder

RECORD = "reward.json"  # stands where a function is the reward
TEMPLATE = Path(__file__).with_name("model_card.md")
# Any post will do; of the built-in world's words, so that its models know them.
POST = {
    "subreddit": "tifu",
    "title": "My bike",
    "post": "My boss sold my bike. It was on monday. I told tom. We were at work.",
}
SUMMARY = " My boss sold my bike, on monday."


def write_cards(config: Config, stage: str, accuracy: Mapping[str, float]) -> None:
    """Write the README.md into the folder of every model that a finished stage has saved.

    `accuracy`: what the stage's held-out pairs say of it, to be shown with its results.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder) or {}
    shown = {**manifest, "results": manifest.get("results", {}) | accuracy}
    for name in STAGES[stage].models if manifest else ():
        if (folder / name).is_dir() and not (folder / name / RECORD).exists():  # a function
            write_text(folder / name / CARD, card(config, stage, name, shown))


def card(config: Config, stage: str, folder: str, manifest: Mapping[str, Any]) -> str:
    """The card of the model in a stage's folder `model` or `critic`.

    `manifest` is the stage's manifest, of which inputs and results are read.
    """
    is_policy = stage in POLICY_STAGES and folder == "model"
    longest = config.eval.dpo_summary_tokens if stage == "dpo" else config.data.max_summary_tokens
    head = ModelCardData(
        library_name="transformers",
        base_model=base_id(config) or None,
        datasets=datasets(config) or None,
        pipeline_tag="text-generation" if is_policy else None,
        tags=["rlhf", "summarization", "tldr", stage if is_policy else "reward-model"],
    )
    results = manifest["results"]
    inputs = [
        f"{name} `{manifest['inputs'][name][:12]}`" for name in STAGES if name in manifest["inputs"]
    ]
    written = ModelCard.from_template(
        head,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        run=f"{config.name}, seed {config.seed}",
        what=f"critic of {stage}" if folder == "critic" else f"model of stage {stage}",
        is_policy=is_policy,
        start=public_value("base.checkpoint", config.base.checkpoint),
        source=public_value("data.source", config.data.source),
        query=format_post(POST, config.data.prompt),
        summary=SUMMARY,
        bos="tokenizer.bos_token + " if config.base.bos == "always" else "",
        adds=config.base.bos == "auto",
        chat=config.data.chat_template,
        before_eos=config.rm.read_at == BEFORE_EOS,
        longest=longest,
        settings=_settings(config, stage),
        inputs=", ".join(inputs),
        results={key: f"{x:.4g}" for key, x in results.items() if isinstance(x, int | float)},
    )
    return f"{written}\n"


def base_id(config: Config) -> str:
    """The hub id of the checkpoint that the run began with; empty if it was none of the hub."""
    checkpoint = config.base.checkpoint.partition("@")[0]
    is_id = checkpoint.count("/") == 1 and not is_path(checkpoint) and checkpoint != RANDOM
    return checkpoint if is_id else ""


def datasets(config: Config) -> list[str]:
    """The hub ids of the data sets, each once."""
    if config.data.source != HUB:
        return []
    named = (config.data.sft_dataset, config.data.comparisons_dataset)
    ids = [name.partition("@")[0].partition(":")[0] for name in named]
    return list(dict.fromkeys(name for name in ids if name and not is_path(name)))


def _settings(config: Config, stage: str) -> dict[str, Any]:
    """The settings that a stage depends on, as others may see them."""
    shown: dict[str, Any] = {"seed": config.seed, "preset": Path(config.preset).name}
    for section, values in settings_of(config, stage).items():
        if isinstance(values, dict):
            named = {f"{section}.{key}": value for key, value in values.items()}
            shown |= {name: public_value(name, value) for name, value in named.items()}
    return shown
