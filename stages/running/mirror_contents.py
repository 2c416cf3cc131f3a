"""What a finished stage shows to others: its results, tables of texts, and the files it made."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.finished import read_manifest, stage_folder
from stages.running.files import read_lines
from stages.settings import config as settings
from stages.settings.config import Config
from stages.settings.judge import MOST_UNJUDGED
from stages.settings.stages import STAGES, TRAINING_STAGES

# Stage -> the folders of the models that it saves.
MODELS: dict[str, tuple[str, ...]] = {
    "sft": ("model",),
    "rm": ("model",),
    "normalize": ("model",),
    "ppo": ("model", "critic"),
    "dpo": ("model",),
}
CARD = "README.md"
PUBLIC = "public"  # folder of a page about real data without the texts of others
RECORDS = ("config.json", "manifest.json")  # settings as they were typed: they may name a server
WEIGHTS = ".safetensors"
MOST_ROWS = 200  # of a table
DEEPEST = 3
GROUPED = ("by_", "calibration", "statistics")  # results of many small groups
LONGEST_TAG = 64  # of wandb


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Files of a stage that belong together."""

    name: str
    kind: str
    """`model`, `dataset` or `report`."""
    files: dict[str, Path]
    """Name in the bundle -> where it lies."""
    version: str
    """What names these very contents."""


def slug(text: str) -> str:
    """A run's name with the characters that names elsewhere may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def key_of(config: Config, stage: str) -> str:
    """A stage of this run by its folder: `ppo`, or `judge/facts` where each judge has its own."""
    return f"{stage}/{config.judge.folder}" if STAGES[stage].per_judge else stage


def bundle_name(config: Config, stage: str) -> str:
    """The name of what a stage of this run made; a shared stage is its upstream's."""
    owner = config.upstream if config.upstream and STAGES[stage].shared else config.name
    return f"{slug(owner)}-seed{config.seed}-{slug(key_of(config, stage))}"


def bundle_of(config: Config, stage: str) -> Bundle | None:
    """The files of a finished stage that others may want; None if it has none."""
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if stage in MODELS:
        paths = [path for one in MODELS[stage] for path in sorted((folder / one).rglob("*"))]
        kind, root = "model", folder
    elif stage == "summaries":
        kind, paths, root = "dataset", sorted(folder.glob("*.jsonl")), folder
    elif stage == "report":
        root = page_folder(folder)
        kind, paths = "report", sorted(root.iterdir())
    else:
        return None
    files = {str(path.relative_to(root)): path for path in paths if path.is_file()}
    return Bundle(
        name=bundle_name(config, stage),
        kind=kind,
        files={name: path for name, path in files.items() if name not in RECORDS},
        version=str(manifest["content"]),
    )


def page_folder(folder: Path) -> Path:
    """Where the page of a stage's folder lies that others may see."""
    return folder / PUBLIC if (folder / PUBLIC).is_dir() else folder


# -- what it is called -----------------------------------------------------------------------------


def tags_of(config: Config, stage: str) -> list[str]:
    """The preset, the stages that learn and are there, the judge's kind; then those of WANDB_TAGS.

    `stage` is under way.
    """
    made = [
        name
        for name in (*TRAINING_STAGES, "released")
        if name == stage or read_manifest(stage_folder(config, name)) is not None
    ]
    own = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]
    tags = [config.preset, *made, f"judge:{config.judge.kind}", *own]
    return list(dict.fromkeys(tag[:LONGEST_TAG] for tag in tags))


# -- what it found ---------------------------------------------------------------------------------


def results_of(config: Config, stage: str) -> dict[str, Any]:
    """What a finished stage found, flat: `results/ppo/objective/kl`; numbers alone, and how long.

    Results hold texts too, such as folders; those stay here.
    """
    manifest = read_manifest(stage_folder(config, stage)) or {}
    start = f"results/{key_of(config, stage)}"
    facts: dict[str, Any] = {
        key: manifest[key] for key in ("seconds", "peak_memory_gib") if key in manifest
    }
    found = _numbers(start, manifest.get("results", {}), 1) | _numbers(start, facts, 1)
    return found | (headline(config, manifest["results"]) if stage == "win_rate" else {})


def _numbers(start: str, values: dict[str, Any], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, int | float):
            found[f"{start}/{key}"] = value
        elif isinstance(value, dict) and depth < DEEPEST and not key.startswith(GROUPED):
            found |= _numbers(f"{start}/{key}", value, depth + 1)
    return found


def headline(config: Config, results: dict[str, Any]) -> dict[str, Any]:
    """Each policy's win rate with its interval, and differences; none that may not be given."""
    given = {
        name: one
        for name, one in results["policies"].items()
        if one["unjudged"] <= MOST_UNJUDGED and one["win_rate"] is not None
    }
    found: dict[str, Any] = {"judge": config.judge.folder}
    for name, one in given.items():
        found |= {f"win_rate/{name}": one["win_rate"]}
        found |= {f"win_rate/{name}_{end}": one[end] for end in ("low", "high")}
        equal = one.get("statistics", {}).get("length_controlled", {}).get("estimate")
        found |= {} if equal is None else {f"win_rate/{name}_at_equal_length": equal}
    for pair, one in results["differences"].items():
        if all(name in given for name in re.split(r" - |-(?=[^-]+$)", pair)):
            found[f"win_rate/{pair}"] = one["estimate"]
    return found


# -- texts -----------------------------------------------------------------------------------------


def table_of(config: Config, stage: str) -> tuple[list[str], list[list[Any]]] | None:
    """Columns and rows of the texts that a finished stage wrote or judged; None if it has none."""
    if stage not in ("summaries", "win_rate"):
        return None
    written = {
        path.stem: read_lines(path)
        for path in sorted(stage_folder(config, "summaries").glob("*.jsonl"))
    }
    if not written:
        return None
    points: dict[tuple[str, str], Any] = {}
    if stage == "win_rate":
        rows = read_lines(stage_folder(config, "win_rate") / "post_scores.jsonl")
        points = {(row["policy"], row["id"]): row["score"] for row in rows}
    return _columns(written, bool(points)), _rows(written, points)


def _columns(written: dict[str, list[dict[str, Any]]], judged: bool) -> list[str]:
    columns = ["id", "query", "reference", "reference score"]
    for policy in written:
        columns += [policy, f"{policy} score", f"{policy} tokens"]
        columns += [f"{policy} win"] if judged else []
    return columns


def _rows(
    written: dict[str, list[dict[str, Any]]], points: dict[tuple[str, str], Any]
) -> list[list[Any]]:
    by_id = {policy: {row["id"]: row for row in rows} for policy, rows in written.items()}
    first = next(iter(written.values()))[:MOST_ROWS]
    table = []
    for post in first:
        cells = [post["id"], post["query"], post["reference"], post.get("reference_score")]
        for policy, rows in by_id.items():
            row = rows.get(post["id"], {})
            cells += [row.get(key) for key in ("summary", "score", "tokens")]
            cells += [points.get((policy, post["id"]))] if points else []
        table.append(cells)
    return table


def sample_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of what a policy wrote while it learned."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[row.get(key) for key in columns] for row in rows]


def seed_folder(config: Config) -> Path:
    """The folder of a run's seed."""
    return settings.RUNS / config.name / f"seed{config.seed}"
