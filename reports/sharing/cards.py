"""The README.md of a saved model: what it is, how it was made, what came out, what it is not.

A card is a function of a stage's settings and results. No stage reads it and no hash covers it:
other words in it make nothing stale. Its head is the one that the Hugging Face hub reads.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from eval.rates.reward_pairs import held_out_accuracy
from stages.finished import read_manifest, stage_folder
from stages.running.files import write_text
from stages.settings.config import HUB, RANDOM, TOY, Config, is_path, public_value, settings_of
from stages.settings.presets import SMOLLM2
from stages.settings.prompt import format_post
from stages.settings.sections import BEFORE_EOS, EOS
from stages.settings.stages import CARD, POLICY_STAGES, STAGES

TEMPLATE = Path(__file__).with_name("card.md")
POLICIES = tuple(stage for stage in POLICY_STAGES if stage != "released")
# What is known of the licences of others, by the beginning of a hub id.
MODEL_LICENCES = {
    "EleutherAI/pythia-": "apache-2.0",
    "HuggingFaceTB/SmolLM2-": "apache-2.0",
    SMOLLM2: "apache-2.0",
}
DATA_LICENCES = {
    "vwxyzjn/summarize_from_feedback": "posts CC BY 4.0, as published by OpenAI (modified MIT)",
    "openai/summarize_from_feedback": "posts CC BY 4.0, summaries and labels modified MIT",
}
UNKNOWN = "unknown"
OWN = "mit"  # of the built-in world, and of models that never saw anything else
TITLES = {stage: f"{stage.upper()} policy" for stage in POLICIES} | {
    "sft": "supervised fine-tuned policy",
    "rm": "reward model",
    "normalize": "normalized reward model",
    "critic": "critic of PPO",
}
MEANINGS = {
    "loss/validation": "loss on held-out references, nats per token",
    "rouge1": "ROUGE-1 on held-out posts",
    "rouge2": "ROUGE-2 on held-out posts",
    "rougeL": "ROUGE-L on held-out posts",
    "loss": "loss on held-out comparisons, nats per pair",
    "accuracy": "held-out comparisons ranked as by the labellers",
    "accuracy_low": "the same, lower end of its 95% interval",
    "accuracy_high": "the same, upper end of its 95% interval",
    "pairs": "held-out comparisons",
    "mean_after": "mean score of the training posts' references",
    "std": "spread of these scores",
    "objective/kl": "KL from the SFT policy, nats per summary, over the last updates",
    "objective/scores": "score of the reward model, over the last updates",
    "policy/eos_rate": "summaries that end by themselves, over the last updates",
    "policy/response_length": "length, tokens, over the last updates",
    "episodes": "episodes",
}
# Any post will do; of the built-in world's words, so that its models know them.
POST = {
    "subreddit": "tifu",
    "title": "My bike",
    "post": "My boss sold my bike. It was on monday. I told tom. We were at work.",
}
SUMMARY = " My boss sold my bike, on monday."
HERE = "."  # a card stands in its model's folder
# rm.read_at -> how the text goes on, up to where it is read, and that place in words.
READ = {
    EOS: {"end": " + tokenizer.eos_token", "where": "at EOS"},
    BEFORE_EOS: {"end": "", "where": "at the last token before EOS"},
}


class LaterResult(NamedTuple):
    """A result that came later than the model: what, and the number as it is written."""

    what: str
    value: str


def write_cards(config: Config, stage: str) -> None:
    """Write the README.md into the folder of every model that a finished stage has saved."""
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder) or {}
    for name in STAGES[stage].models if manifest else ():
        if (folder / name).is_dir():
            write_text(folder / name / CARD, card(config, stage, name, manifest))


def card(
    config: Config,
    stage: str,
    folder: str,
    made: dict[str, Any],
    judged: Sequence[LaterResult] = (),
    place: str = HERE,
) -> str:
    """The card of the model in a stage's folder `model` or `critic`.

    `made` is the stage's manifest, of which settings, inputs and results are read; `place` is where
    its code finds the model, a folder or a hub id.
    """
    base = (read_manifest(stage_folder(config, "base")) or {}).get("results", {})
    inputs = {name: version for name, version in made["inputs"].items() if name in STAGES}
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)  # YAML reads it too
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        config=config,
        stage=stage,
        folder=folder,
        title=TITLES["critic" if folder == "critic" else stage],
        is_policy=stage in POLICIES and folder == "model",
        policies=POLICIES,
        optimised=STAGES[stage].policy_gradient,
        licence=licence(config),
        base=base_id(config),
        base_licence=_known(MODEL_LICENCES, config.base.checkpoint),
        start=public_value("base.checkpoint", config.base.checkpoint),
        names=datasets(config),
        terms=partial(_known, DATA_LICENCES),
        source=public_value("data.source", config.data.source),
        place=place,
        here="  # the folder of this file" if place == HERE else "",
        query=format_post(POST, config.data.prompt),
        summary=SUMMARY,
        read=READ[config.rm.read_at],
        longest=config.eval.dpo_summary_tokens
        if stage == "dpo"
        else config.data.max_summary_tokens,
        settings=_settings(config, stage),
        made_from=", ".join(f"{name} `{version[:12]}`" for name, version in inputs.items()),
        sources=base.get("hub", []),
        counts=[(name, f"{count['rows']:,}") for name, count in base.get("rows", {}).items()],
        results=[*_results(config, stage, made["results"]), *judged],
        judged=judged,
        table=_table,
    )
    return f"{text}\n"


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
    return list(dict.fromkeys(name for name in ids if not is_path(name)))


def licence(config: Config) -> str:
    """What the licence of a model's weights follows from, as the hub spells it; or `unknown`."""
    if config.base.checkpoint == RANDOM and config.data.source == TOY:
        return OWN
    known_data = config.data.source == TOY or all(
        name.startswith(tuple(DATA_LICENCES)) for name in datasets(config) or [UNKNOWN]
    )
    return _known(MODEL_LICENCES, config.base.checkpoint) if known_data else UNKNOWN


def _known(licences: Mapping[str, str], name: str) -> str:
    """The licence of a checkpoint or a data set, by how its name begins."""
    return next((terms for key, terms in licences.items() if name.startswith(key)), UNKNOWN)


def _results(config: Config, stage: str, results: dict[str, Any]) -> list[tuple[str, str]]:
    """What a stage recorded of its model, in words."""
    known = results | held_out_accuracy(stage_folder(config, stage))
    return [
        (f"{meaning} (`{key}`)", f"{known[key]:.4g}")
        for key, meaning in MEANINGS.items()
        if isinstance(known.get(key), int | float)
    ]


def _settings(config: Config, stage: str) -> list[tuple[str, str]]:
    """The settings that a stage depends on, as others may see them."""
    rows = [("seed", str(config.seed)), ("preset", config.preset)]
    for section, values in settings_of(config, stage).items():
        if isinstance(values, dict):
            for key, value in values.items():
                shown = public_value(f"{section}.{key}", value)
                rows.append((f"{section}.{key}", f"`{shown}`" if shown != "" else "(empty)"))
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |" for line in lines)
