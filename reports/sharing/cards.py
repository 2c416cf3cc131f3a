"""The README.md of a saved model: what it is, how it was made, what came out, what it is not.

A card is a function of a stage's settings and results. No stage reads it and no hash covers it:
other words in it make nothing stale. Its head is the one that the Hugging Face hub reads.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from eval.rates.reward_pairs import accuracy_interval
from stages.finished import read_manifest, stage_folder
from stages.running.files import write_text
from stages.settings.config import HUB, RANDOM, TOY, Config, is_path, public_value, settings_of
from stages.settings.presets import SMOLLM2
from stages.settings.prompt import format_post
from stages.settings.sections import BEFORE_EOS, EOS
from stages.settings.stages import CARD, POLICY_STAGES, STAGES

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
POLICY_CODE = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = {folder}
tokenizer = AutoTokenizer.from_pretrained(folder)
policy = AutoModelForCausalLM.from_pretrained(folder)
query = {query}
tokens = tokenizer(query, add_special_tokens=False, return_tensors="pt").input_ids
written = policy.generate(
    tokens, max_new_tokens={length}, do_sample=False, pad_token_id=tokenizer.pad_token_id
)
print(tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True).strip())"""
SCORER_CODE = """from transformers import AutoModelForTokenClassification, AutoTokenizer

folder = {folder}
tokenizer = AutoTokenizer.from_pretrained(folder)
scorer = AutoModelForTokenClassification.from_pretrained(folder)
text = {query} + {summary}{end}
tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
print(scorer(tokens).logits[0, -1, 0].item())  # read {where}"""
# rm.read_at -> how the text goes on, up to where it is read, and that place in words.
READ = {EOS: (" + tokenizer.eos_token", "at EOS"), BEFORE_EOS: ("", "at the last token before EOS")}


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
    title = TITLES["critic" if folder == "critic" else stage]
    is_policy = stage in POLICIES and folder == "model"
    parts = [
        _head(config, stage, is_policy),
        f"# {config.name}, seed {config.seed}: {title}",
        f"{_about(config, title)} {_beside(folder)}",
        f"```python\n{_code(config, is_policy, place)}\n```",
        f"## How it was made\n\n{_made_from(config, stage, made)}",
        f"## Data\n\n{_data(config)}",
        f"## Results\n\n{_results(made['results'], judged)}",
        f"## Limits\n\n{_limits(config, stage, is_policy)}",
        f"## Licence\n\n{_licences(config)}",
    ]
    return "\n\n".join(parts) + "\n"


def _code(config: Config, is_policy: bool, place: str) -> str:
    """What opens the model and shows it at work on one post."""
    end, where = READ[config.rm.read_at]
    values = {
        "folder": _quoted(place) + ("  # the folder of this file" if place == HERE else ""),
        "query": _quoted(format_post(POST, config.data.prompt)),
        "length": str(config.data.max_summary_tokens),
        "summary": _quoted(SUMMARY),
        "end": end,
        "where": where,
    }
    # In one pass: a prompt may hold braces.
    return re.sub(
        r"{(\w+)}", lambda match: values[match[1]], POLICY_CODE if is_policy else SCORER_CODE
    )


# -- the head --------------------------------------------------------------------------------------


def _head(config: Config, stage: str, is_policy: bool) -> str:
    base = base_id(config)
    names = datasets(config)
    lines = ["---", "library_name: transformers", f"license: {licence(config)}"]
    lines += [f"base_model: {_quoted(base)}"] if base else []
    lines += ["datasets:", *(f"- {_quoted(name)}" for name in names)] if names else []
    lines += ["pipeline_tag: text-generation"] if is_policy else []
    tags = ["rlhf", "summarization", "tldr", *([] if is_policy else ["reward-model"])]
    tags += [stage] if stage in POLICIES else []
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # which YAML reads too


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
    return base_licence(config) if known_data else UNKNOWN


def base_licence(config: Config) -> str:
    """The licence of the checkpoint that the run began with."""
    checkpoint = config.base.checkpoint
    return next(
        (licence_id for k, licence_id in MODEL_LICENCES.items() if checkpoint.startswith(k)),
        UNKNOWN,
    )


# -- what it says ----------------------------------------------------------------------------------


def _about(config: Config, title: str) -> str:
    start = public_value("base.checkpoint", config.base.checkpoint)
    base = "new weights (GPT-NeoX, never pretrained)" if start == RANDOM else f"`{start}`"
    world = " of a built-in world of generated posts" if config.data.source == TOY else ""
    return (
        f"The {title} of one run of RLHF on TL;DR summarization{world}, which follows Huang et al."
        f' 2024, "The N+ Implementation Details of RLHF with PPO". The run began with {base}.'
    )


def _beside(folder: str) -> str:
    if folder == "critic":
        return "It predicts rewards at every token and scores nothing by itself."
    return "Prompts are plain text; a response ends with EOS."


def _made_from(config: Config, stage: str, made: dict[str, Any]) -> str:
    rows = [("seed", str(config.seed)), ("preset", config.preset)]
    for section, values in settings_of(config, stage).items():
        if isinstance(values, dict):
            named = ((f"{section}.{key}", value) for key, value in values.items())
            rows += [(key, _cell(public_value(key, value))) for key, value in named]
    inputs = {name: version for name, version in made["inputs"].items() if name in STAGES}
    versions = ", ".join(f"{name} `{version[:12]}`" for name, version in inputs.items())
    return f"{_table(('setting', 'value'), rows)}\n\nMade from the stages {versions}."


def _data(config: Config) -> str:
    base = (read_manifest(stage_folder(config, "base")) or {}).get("results", {})
    source = public_value("data.source", config.data.source)
    where = {TOY: "the built-in world", HUB: "the Hugging Face hub"}.get(source, str(source))
    lines = [f"Posts and comparisons from {where}."]
    lines += [
        f"- `{source['repository']}` at commit `{source['commit']}`"
        for source in base.get("hub", [])
    ]
    counts = [(name, f"{count['rows']:,}") for name, count in base.get("rows", {}).items()]
    return "\n".join(lines) + (f"\n\n{_table(('split', 'rows'), counts)}" if counts else "")


def _results(results: dict[str, Any], judged: Sequence[LaterResult]) -> str:
    known = results | (accuracy_interval(results) if "accuracy" in results else {})
    rows = [
        (f"{meaning} (`{key}`)", f"{known[key]:.4g}")
        for key, meaning in MEANINGS.items()
        if isinstance(known.get(key), int | float)
    ]
    rows += [(result.what, result.value) for result in judged]
    later = (
        "" if judged else "\n\nWin rates are known only after the evaluation: see the run's page."
    )
    return (_table(("", "value"), rows) if rows else "None of its own.") + later


def _limits(config: Config, stage: str, is_policy: bool) -> str:
    lines = [
        "- One seed. Seeds of RLHF differ, and some fail.",
        "- Trained on English posts of one form, for summaries of "
        f"{config.data.max_summary_tokens} tokens at most."
        if is_policy
        else f"- A score means something {READ[config.rm.read_at][1]} only, and only beside scores"
        " of the same post.",
    ]
    if config.data.source == TOY:
        lines.append("- It knows generated posts and nothing else: a mechanism to look at.")
    else:
        lines.append("- It may state what no post says, and it repeats what Reddit posts hold.")
    if is_policy and STAGES[stage].policy_gradient:
        lines.append("- A policy that was optimised against a reward model exploits its mistakes.")
    return "\n".join(lines)


def _licences(config: Config) -> str:
    start = public_value("base.checkpoint", config.base.checkpoint)
    base = "none, the weights are new" if start == RANDOM else f"`{start}`: {base_licence(config)}"
    lines = [f"- checkpoint that it began with: {base}"]
    if config.data.source == TOY:
        lines.append("- data: generated by this project, MIT")
    for name in datasets(config):
        known = (terms for key, terms in DATA_LICENCES.items() if name.startswith(key))
        lines.append(f"- data `{name}`: {next(known, UNKNOWN)}")
    if config.data.source not in (TOY, HUB):
        lines.append(f"- data: {UNKNOWN}")
    return "\n".join([*lines, "- code: MIT"])


def _cell(value: Any) -> str:
    return f"`{value}`" if value != "" else "(empty)"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |" for line in lines)
