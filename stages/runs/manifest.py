"""Where a stage of a run lies, and whether a finished one is still as asked.

Content decides: hashes of the settings, of the inputs and of the outputs that a manifest records.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stages.config import config as settings
from stages.config.config import (
    HUB,
    TOY,
    TRAIN_TOKENIZER,
    Config,
    UserError,
    hash_of,
    is_same,
    settings_hash,
    settings_of,
)
from stages.config.stages import STAGES, is_part, row_of
from stages.runs.files import file_hash, hash_files, known_hash, read_record
from stages.runs.inputs import DATA, FOLDERS, own_inputs
from stages.runs.machine import changed_files

MOST_SHOWN = 4  # differences that one line names
PARTS_OF_MANIFEST = ("settings", "inputs", "outputs", "sizes", "results", "code")
GOLD = "gold reward model"  # as an input of the stages that ask it
ATTEMPT = "attempt.json"  # what a stage under way is made with
MAKE_VARIABLES = {
    "released.policy": "POLICY",
    "released.reward_model": "REWARD_MODEL",
    "outputs.file": "INPUT",
}


class Problem(NamedTuple):
    """Why a stage is not what a config asks for."""

    text: str
    """To be read after the stage's name."""
    needs_replace: bool = False
    """Whether finished work stands in the way, which is replaced only if REPLACE says so."""

    def __str__(self) -> str:
        return self.text


MISSING = Problem("is missing")


def stage_folder(config: Config, stage: str) -> Path:
    """The folder of a stage of this run; what the upstream supplies lies there."""
    name = config.upstream if config.is_upstreams(stage) else config.name
    folder = settings.RUNS / name / f"seed{config.seed}" / stage
    return folder / config.judge.folder if STAGES[stage].per_judge else folder


def gold_folder(config: Config) -> Path:
    """Where the reward model that `judge.model` names lies, whether it is there or not.

    It is the `normalize` stage of a run (`name`: of this seed, `name/seed1`), or else the folder.
    """
    named = settings.RUNS / config.judge.gold
    seed = named if named.name.startswith("seed") else named / f"seed{config.seed}"
    folder = Path(config.judge.gold)
    is_run = read_manifest(seed / "normalize") is not None or not folder.is_dir()
    return seed / "normalize" if is_run else folder


def partial_of(folder: Path) -> Path:
    """Where a stage works until it has finished."""
    return folder.with_name(f"{folder.name}.partial")


def lock_of(folder: Path) -> Path:
    """The file that a working stage locks."""
    return folder.with_name(f".{folder.name}.lock")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage, or None.

    Raises UserError for a file that is none, and for one in which a person has changed anything.
    """
    path = folder / "manifest.json"
    manifest: dict[str, Any] | None = read_record(path)
    if manifest is None:
        return None
    parts = [manifest.get(part) for part in PARTS_OF_MANIFEST]
    if "content" not in manifest or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} is no manifest of this version: move {folder} away")
    if manifest.get("seal", seal_of(manifest)) != seal_of(manifest):
        mend = f"restore it, or move {folder} away, so that it is made anew"
        raise UserError(f"{path} was changed after its stage wrote it: {mend}")
    return manifest


def seal_of(manifest: Mapping[str, Any]) -> str:
    """A hash of all that a manifest says, itself left out: its `seal`."""
    return hash_of({key: value for key, value in manifest.items() if key != "seal"})


def why_not(config: Config, stage: str) -> Problem | None:
    """Why a stage is not what this config asks for, by its settings, by the outputs of its inputs
    as they are now, and by the sizes of its files (`require` hashes them too); None if it is.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return MISSING
    differing = differing_settings(config, stage, manifest)
    if differing:
        more = f"; and {len(differing) - MOST_SHOWN} more" if len(differing) > MOST_SHOWN else ""
        differences = f"{'; '.join(differing[:MOST_SHOWN])}{more}"
        return Problem(f"was made with other settings ({differences})", needs_replace=True)
    for name, now in current_inputs(config, stage).items():
        recorded = manifest["inputs"].get(name)
        if recorded is None and now is not None:
            return Problem(f"was made without {name}")
        if recorded is not None and now is None:
            return Problem(f"was made from {name}, which is missing")
        if recorded != now:
            which = "another" if name in FOLDERS else "other" if name == DATA else "an earlier"
            return Problem(f"was made from {which} {name}")
    for name, size in manifest["sizes"].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            return _changed(stage, name)
    return None


def differing_settings(config: Config, stage: str, manifest: Mapping[str, Any]) -> list[str]:
    """Settings of a finished stage that are not as asked, `ppo.kl_coef: made with 0.1, asked 0.2`.

    Empty if the stage belongs to the upstream: there its record decides.
    """
    same = manifest["settings_hash"] == settings_hash(config, stage)
    if same or config.is_upstreams(stage):
        return []
    past, requested = flat(manifest["settings"]), flat(settings_of(config, stage))
    return [
        f"{key}: made with {past.get(key, 'nothing')}, asked {requested.get(key, 'nothing')}"
        for key in past | requested
        if not is_same(key, past.get(key), requested.get(key))
    ]


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings as `ppo.kl_coef`; what is in no section keeps its name."""
    alone = {name: value for name, value in sections.items() if not isinstance(value, dict)}
    groups = {name: values for name, values in sections.items() if isinstance(values, dict)}
    return alone | {f"{name}.{key}": x for name, keys in groups.items() for key, x in keys.items()}


def changed_code(config: Config, stage: str) -> list[str]:
    """The files in which the code that made a stage, or began it, differs from the code now.

    They make nothing stale. Empty if there is no such stage.
    """
    folder = stage_folder(config, stage)
    record = read_manifest(folder) or read_record(partial_of(folder) / ATTEMPT)
    return changed_files(record["code"]) if record else []


def current_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """What a stage would be made from now: each input's identity, None if it is missing."""
    row = row_of(stage, config.kind)
    inputs = {name: identity(config, name, stage) for name in row.inputs}
    joined = {
        name: identity(config, name, stage) for name in row.joined_by if is_part(name, config.kind)
    }
    there = {name: content for name, content in joined.items() if content is not None}
    return inputs | there | outer_inputs(config, stage)


def inputs_now(config: Config, stage: str) -> dict[str, str]:
    """`current_inputs` of a stage of which nothing is missing, as was checked before."""
    return {name: str(content) for name, content in current_inputs(config, stage).items()}


def identity(config: Config, stage: str, reader: str) -> str | None:
    """A hash of what the stage `reader` reads of a finished stage; None if it is missing."""
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if STAGES[reader].reads_records:
        return file_hash(folder / "manifest.json")
    return str(manifest["content"])


def outer_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """What a stage is made from beside other stages: the user's files, a gold reward model."""
    return own_inputs(config, stage) | gold_inputs(config, stage)


def check_unchanged(config: Config, stage: str, before: dict[str, str | None]) -> None:
    """Raise UserError where what a stage is made from beside other stages is not as it was before.

    A manifest would else name files that the stage has not read.
    """
    now = outer_inputs(config, stage)
    changed = [name for name in now | before if now.get(name) != before.get(name)]
    if changed:
        names = ", ".join(changed)
        raise UserError(f"stage {stage}: {names} changed while it was under way: run it again")


def gold_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """A hash of the gold reward model that a stage asks, if it asks one; None if it is missing."""
    if "judge" not in STAGES[stage].sections or not config.judge.gold:
        return {}
    folder = gold_folder(config)
    manifest = read_manifest(folder)
    if manifest is None and not (folder / "config.json").exists():
        return {GOLD: None}
    if manifest is None:
        return {GOLD: hash_of(hash_files(folder, hash_of_file=known_hash))}
    return {GOLD: str(manifest["content"])}


def check_gold(config: Config) -> None:
    """Raise UserError where the gold reward model that `judge.model` names is not there, or is the
    one that the run made for itself; a folder is known by its weights, wherever it lies.
    """
    if not config.judge.gold:
        return
    folder, name = gold_folder(config), f"judge.model={config.judge.gold}"
    gold = read_manifest(folder)
    if gold is None and not (folder / "config.json").exists():
        raise UserError(
            f"{name}: there is no reward model in {folder}: name a run whose `make rm` has finished"
            " (name or name/seed1), or a model's folder"
        )
    weights = {known_hash(path) for path in folder.glob("*.safetensors")}
    for stage in ("rm", "normalize"):
        own = read_manifest(stage_folder(config, stage)) or {"content": "", "outputs": {}}
        is_equal = gold is not None and gold["content"] == own["content"]
        if is_equal or not weights.isdisjoint(own["outputs"].values()):
            mend = "name another run's, or leave judge.model out"
            raise UserError(f"{name} is this run's own reward model: {mend}")


def damage(config: Config, stage: str, records_alone: bool = False) -> Problem | None:
    """The first output of a finished stage whose hash has changed, as a problem; None if none has.

    `why_not` looks at sizes alone: hashing the models of a large run takes a while. Its records
    (`records_alone`) are the JSON and JSONL files that lie in its own folder.
    """
    folder = stage_folder(config, stage)
    for name, recorded in (read_manifest(folder) or {"outputs": {}})["outputs"].items():
        if records_alone and ("/" in name or not name.endswith((".json", ".jsonl"))):
            continue
        if not (folder / name).exists() or file_hash(folder / name) != recorded:
            return _changed(stage, name)
    return None


def why_not_shown(config: Config, stage: str) -> Problem | None:
    """Why a page cannot show a stage: it is not as asked, or one of its records has changed."""
    return why_not(config, stage) or damage(config, stage, records_alone=True)


def check_stage(config: Config, stage: str) -> None:
    """Raise UserError, with the mend, unless a stage is as this config asks, to the last byte."""
    problem = why_not(config, stage) or damage(config, stage)
    if problem:
        raise refusal(config, stage, problem)


def refusal(config: Config, stage: str, problem: Problem) -> UserError:
    """The error of one line about a stage that is not as asked, with its mend."""
    return UserError(f"stage {stage} {problem}: {mend(config, stage, problem)}")


def _changed(stage: str, name: str) -> Problem:
    """A page is made again unasked; other finished work is kept."""
    return Problem(f"has changed on disk ({name})", needs_replace=not STAGES[stage].reads_records)


def mend(config: Config, stage: str, problem: Problem) -> str:
    """What to do about a stage that is not as asked, in one line."""
    command = make_command(config, stage)
    if problem.needs_replace:
        return f"take another NAME, or run `{command} REPLACE=1`, which moves the old one aside"
    return f"run `{command}`"


def make_command(config: Config, stage: str) -> str:
    """The `make` command that makes a stage of this run."""
    elsewhere = config.is_upstreams(stage)
    name = config.upstream if elsewhere else config.name
    if elsewhere and name != config.preset and settings.is_recorded(name):  # it knows its own SET
        return f"make {STAGES[stage].goal} SEED={config.seed} NAME={shlex.quote(name)}"
    values = {"PRESET": config.preset, "SEED": str(config.seed)}
    values["NAME"] = "" if name == config.preset else name
    if not elsewhere:
        values["UPSTREAM"] = config.upstream
        pairs = [override.split("=", 1) for override in config.overrides]
        values["SET"] = " ".join("=".join(pair) for pair in pairs if pair[0] not in MAKE_VARIABLES)
        values |= {MAKE_VARIABLES[key]: value for key, value in pairs if key in MAKE_VARIABLES}
    if "judge" in STAGES[stage].sections and config.judge.max_cost:
        values["MAX_COST"] = f"{config.judge.max_cost:.15g}"
    data, tokenizer = config.data.source, config.base.tokenizer
    values["DATA"] = "" if data in (TOY, HUB) else data
    values["TOKENIZER"] = "" if tokenizer == TRAIN_TOKENIZER else tokenizer
    words = [f"{key}={shlex.quote(value)}" for key, value in values.items() if value]
    return " ".join(["make", STAGES[stage].goal, *words])
