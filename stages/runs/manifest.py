"""Where the folder of a stage is, and whether a finished stage is what a config asks for.

Content decides: hashes of the settings, of the inputs and of the outputs that a manifest records.
Code decides nothing: a stage that ran with other code is named in a warning (`changed_code`).
"""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from stages.config import config as settings
from stages.config.command_line import recorded_config
from stages.config.config import (
    HUB,
    TOY,
    TRAIN_TOKENIZER,
    Config,
    UserError,
    hash_of,
    is_same,
    settings_of,
)
from stages.config.stages import STAGES, is_part, row_of
from stages.runs.files import file_hash, hash_files, known_hash, read_record
from stages.runs.inputs import DATA, FOLDERS, REWARD_FUNCTION, own_inputs
from stages.runs.machine import changed_files, differing_keys, is_comparable

RESUME = "resume"
"""The subfolder from which an interrupted stage resumes."""
ATTEMPT = "attempt.json"
"""The settings, inputs and code with which a stage under way began."""
GOLD = "gold reward model"
"""The name, as an input, of the reward model that `judge.model` names."""
MANIFEST_PARTS = ("settings", "inputs", "outputs", "sizes", "results", "code")
MOST_SHOWN = 4
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
    """Whether the stage reruns only if REPLACE asks for it, because finished work would go."""

    def __str__(self) -> str:
        return self.text


MISSING = Problem("is missing")


# -- folders ---------------------------------------------------------------------------------------


def stage_folder(config: Config, stage: str) -> Path:
    """The folder of a stage of this run; in its upstream, if that supplies the stage."""
    name = config.upstream if config.is_upstreams(stage) else config.name
    folder = settings.RUNS / name / f"seed{config.seed}" / stage
    if STAGES[stage].per_judge:
        return folder / config.judge.folder
    return folder


def gold_folder(config: Config) -> Path:
    """The folder of the reward model that `judge.model` names, whether it exists or not.

    It is the `normalize` stage of a run (`name` means the same seed, `name/seed1` that seed). If no
    such run exists, it is the folder of that name.
    """
    run = settings.RUNS / config.judge.gold
    seed = run if run.name.startswith("seed") else run / f"seed{config.seed}"
    folder = Path(config.judge.gold)
    if read_manifest(seed / "normalize") is None and folder.is_dir():
        return folder
    return seed / "normalize"


def partial_of(folder: Path) -> Path:
    """The folder in which a stage works until it has finished."""
    return folder.with_name(f"{folder.name}.partial")


def lock_of(folder: Path) -> Path:
    """The file that a stage locks while it is under way."""
    return folder.with_name(f".{folder.name}.lock")


def last_checkpoint(partial: Path) -> int | None:
    """The number of updates after which the last checkpoint was saved; None without one."""
    checkpoints = sorted((partial / RESUME).glob("checkpoint-[0-9]*[0-9]"))
    if not checkpoints:
        return None
    return int(checkpoints[-1].name.split("-")[1])


# -- finished stages -------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage; None without one.

    Raises UserError for a file that is no manifest.
    """
    path = folder / "manifest.json"
    manifest: dict[str, Any] | None = read_record(path)
    if manifest is None:
        return None
    has_parts = all(isinstance(manifest.get(part), dict) for part in MANIFEST_PARTS)
    if not has_parts or "content" not in manifest:
        raise UserError(f"{path} is not a manifest of this project: move {folder} away")
    return manifest


def why_not(config: Config, stage: str) -> Problem | None:
    """Why a finished stage is not what this config asks for; None if it is.

    It is judged by its settings, by its inputs as they are now, and by the sizes of its files.
    `damage` compares their hashes, too.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return MISSING

    # The settings of an upstream's stage are those that it recorded.
    if not config.is_upstreams(stage):
        differences = differing_settings(config, stage, manifest["settings"], past="ran with")
        if differences:
            text = f"has finished with other settings ({shortened(differences)})"
            return Problem(text, needs_replace=True)

    differences = differing_inputs(config, stage, manifest)
    if differences:
        return Problem(f"ran {differences[0]}")

    for name, size in manifest["sizes"].items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            return _changed_output(stage, name)
    return None


def damage(config: Config, stage: str, records_only: bool = False) -> Problem | None:
    """The first output of a finished stage whose hash has changed, as a problem; None without one.

    `why_not` looks at sizes only, because hashing the models of a large run takes a while. With
    `records_only` the JSON and JSONL files that lie directly in the stage's folder are checked.
    """
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for name, recorded_hash in manifest["outputs"].items():
        is_record = "/" not in name and name.endswith((".json", ".jsonl"))
        if records_only and not is_record:
            continue
        if not (folder / name).exists() or file_hash(folder / name) != recorded_hash:
            return _changed_output(stage, name)
    return None


def _changed_output(stage: str, name: str) -> Problem:
    """Pages are written again without being asked; other finished work is kept."""
    return Problem(f"has changed on disk ({name})", needs_replace=not STAGES[stage].reads_records)


def why_not_shown(config: Config, stage: str) -> Problem | None:
    """Why a page cannot show a stage: it is not as asked, or one of its records has changed."""
    return why_not(config, stage) or damage(config, stage, records_only=True)


def check_stage(config: Config, stage: str) -> None:
    """Raise UserError, with the fix, unless a stage is as this config asks, to the last byte."""
    problem = why_not(config, stage) or damage(config, stage)
    if problem:
        raise refusal(config, stage, problem)


def refusal(config: Config, stage: str, problem: Problem) -> UserError:
    """The one-line error about a stage that is not as asked, with its fix."""
    return UserError(f"stage {stage} {problem}: {mend(config, stage, problem)}")


def mend(config: Config, stage: str, problem: Problem) -> str:
    """What to do about a stage that is not as asked, in one line."""
    command = make_command(config, stage)
    if problem.needs_replace:
        replacing = f"`{command} REPLACE={stage}`"
        return f"choose another NAME, or run {replacing}, which moves the finished stage aside"
    return f"run `{command}`"


# -- half-finished stages --------------------------------------------------------------------------


def is_resumable(config: Config, stage: str) -> bool:
    """Whether this config resumes what an interrupted attempt at a stage has left."""
    partial = partial_of(stage_folder(config, stage))
    return (partial / RESUME).is_dir() and not attempt_differences(config, stage)


def attempt_differences(config: Config, stage: str) -> list[str]:
    """How an interrupted attempt at a stage differs in settings and inputs from this config.

    `ppo.kl_coef: began with 0.05, now 0.1` is one difference; empty if there is none.
    """
    partial = partial_of(stage_folder(config, stage))
    attempt = read_record(partial / ATTEMPT)
    if attempt is None:
        return [f"{ATTEMPT} is missing"]
    recorded_settings = attempt.get("settings")
    if recorded_settings is None:  # An earlier version recorded only the whole config.
        recorded_settings = _settings_from_record(config, stage, partial)
    differences = differing_settings(config, stage, recorded_settings, past="began with")
    differences += [f"it began {text}" for text in differing_inputs(config, stage, attempt)]
    return differences


def _settings_from_record(config: Config, stage: str, partial: Path) -> dict[str, Any]:
    """The settings of an attempt as `settings_of` returns them, read from its config.json."""
    record = read_record(partial / "config.json") or {}
    recorded: dict[str, Any] = {}
    for name, value in settings_of(config, stage).items():
        if isinstance(value, dict):
            section = record.get(name, {})
            recorded[name] = {key: section[key] for key in value if key in section}
        elif name in record:
            recorded[name] = record[name]
    return recorded


def check_resumable(config: Config, stage: str) -> None:
    """Raise UserError if a stage has a checkpoint that this config cannot resume.

    Otherwise hours of training would be moved aside because of a typo.
    """
    partial = partial_of(stage_folder(config, stage))
    update = last_checkpoint(partial)
    if update is None:
        return
    differences = attempt_differences(config, stage)
    if not differences:
        return

    resume = "restore them to resume it"
    with suppress(UserError):  # Its preset may be one of another branch.
        recorded = recorded_config(partial)
        if recorded is not None and settings_of(recorded, stage) != settings_of(config, stage):
            resume = f"resume it with `{make_command(recorded, stage)}`"
    raise UserError(
        f"stage {stage} has a checkpoint after update {update}, from other settings or inputs "
        f"({shortened(differences)}): {resume}, choose another NAME, or start over with "
        f"REPLACE={stage}"
    )


# -- settings --------------------------------------------------------------------------------------


def differing_settings(
    config: Config, stage: str, recorded: Mapping[str, Any], past: str
) -> list[str]:
    """The settings of a stage that a record has otherwise, `ppo.kl_coef: ran with 0.1, now 0.2`.

    `recorded` is what `settings_of` returned then, and `past` the verb. A setting that the record
    lacks had its default. One that this version does not know is no difference: see
    `unknown_settings`.
    """
    before = flat(recorded)
    now = flat(json.loads(json.dumps(settings_of(config, stage))))
    differences = []
    for name in before | now:
        if name in now:
            is_equal = is_same(name, before.get(name), now[name])
        else:
            is_equal = not _is_setting(config, name) or is_same(name, None, before[name])
        if not is_equal:
            old_value = before.get(name, "nothing")
            new_value = now.get(name, "nothing")
            differences.append(f"{name}: {past} {old_value}, now {new_value}")
    return differences


def unknown_settings(config: Config, stage: str) -> list[str]:
    """The settings that a finished stage recorded and that this version does not know."""
    manifest = read_manifest(stage_folder(config, stage))
    if manifest is None:
        return []
    current = flat(settings_of(config, stage))
    names = flat(manifest["settings"])
    return [name for name in names if name not in current and not _is_setting(config, name)]


def _is_setting(config: Config, name: str) -> bool:
    """Whether this version has a setting, such as `ppo.kl_coef` or `seed`."""
    value: Any = config
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings by names such as `ppo.kl_coef`; what is in no section keeps its name."""
    values = {}
    for name, section in sections.items():
        if isinstance(section, dict):
            for key, value in section.items():
                values[f"{name}.{key}"] = value
        else:
            values[name] = section
    return values


def shortened(differences: list[str]) -> str:
    """The first few differences in one line, and how many follow."""
    text = "; ".join(differences[:MOST_SHOWN])
    if len(differences) > MOST_SHOWN:
        text += f"; and {len(differences) - MOST_SHOWN} more"
    return text


# -- code ------------------------------------------------------------------------------------------


def changed_code(config: Config, stage: str) -> list[str]:
    """The files whose code has changed since a stage finished, or began if it is half finished.

    They make nothing stale. Empty without such a stage, and if an earlier version wrote its record.
    """
    folder = stage_folder(config, stage)
    record = read_manifest(folder) or read_record(partial_of(folder) / ATTEMPT)
    return changed_files(record["code"]) if record else []


def has_same_code(config: Config, stage: str) -> bool:
    """Whether a finished stage is known to have run with the code of now."""
    manifest = read_manifest(stage_folder(config, stage))
    if manifest is None or not is_comparable(manifest["code"]):
        return False
    return not changed_files(manifest["code"])


# -- inputs ----------------------------------------------------------------------------------------


def current_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """The identity of each input that a stage would use now; None for one that is missing."""
    row = row_of(stage, config.kind)
    inputs = {name: identity(config, name, stage) for name in row.inputs}
    for name in row.joined_by:
        content = identity(config, name, stage) if is_part(name, config.kind) else None
        if content is not None:
            inputs[name] = content
    return inputs | outer_inputs(config, stage)


def inputs_now(config: Config, stage: str) -> dict[str, str]:
    """`current_inputs` of a stage of which none is missing, as was checked before."""
    return {name: str(content) for name, content in current_inputs(config, stage).items()}


def differing_inputs(config: Config, stage: str, record: Mapping[str, Any]) -> list[str]:
    """The inputs of a stage that are other ones now, as phrases such as `with an earlier sft`.

    `record` is a manifest, or what an attempt recorded. An input that the stage no longer has is no
    difference.
    """
    recorded = record["inputs"]
    current = current_inputs(config, stage)
    # An earlier version recorded the reward function for `rm` only.
    if REWARD_FUNCTION not in recorded and not is_comparable(record["code"]):
        current.pop(REWARD_FUNCTION, None)

    differences = []
    for name, content in current.items():
        if recorded.get(name) == content:
            continue
        if recorded.get(name) is None:
            differences.append(f"without {name}")
        elif content is None:
            differences.append(f"with {name}, which is missing now")
        elif name == DATA:
            differences.append("with other data")
        elif name == REWARD_FUNCTION or name in FOLDERS:
            differences.append(f"with another version of {name}")
        else:
            differences.append(f"with an earlier {name}")
    if REWARD_FUNCTION in recorded and not config.reward.function:
        differences.append(f"with {REWARD_FUNCTION}, which is not set now")
    return differences


def identity(config: Config, stage: str, reader: str) -> str | None:
    """A hash of what the stage `reader` reads of a finished stage; None if that is missing."""
    folder = stage_folder(config, stage)
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if STAGES[reader].reads_records:
        return file_hash(folder / "manifest.json")
    return str(manifest["content"])


def outer_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """What a stage reads besides other stages: the user's files, a gold reward model."""
    return own_inputs(config, stage) | gold_inputs(config, stage)


def check_unchanged(config: Config, stage: str, before: Mapping[str, str | None]) -> None:
    """Raise UserError if an input that is no stage has changed since the stage began.

    Otherwise the manifest would name files that the stage has not read. A reward function may
    change, because the stage imported it when it began.
    """
    changed = differing_keys(before, outer_inputs(config, stage))
    changed = [name for name in changed if name != REWARD_FUNCTION]
    if changed:
        names = ", ".join(changed)
        raise UserError(f"stage {stage}: {names} changed while it was under way: run it again")


def gold_inputs(config: Config, stage: str) -> dict[str, str | None]:
    """A hash of the gold reward model that a stage asks, if it asks one; None if it is missing."""
    if "judge" not in STAGES[stage].sections or not config.judge.gold:
        return {}
    folder = gold_folder(config)
    manifest = read_manifest(folder)
    if manifest is not None:
        return {GOLD: str(manifest["content"])}
    if not (folder / "config.json").exists():
        return {GOLD: None}
    return {GOLD: hash_of(hash_files(folder, hash_of_file=known_hash))}


def check_gold(config: Config) -> None:
    """Raise UserError if the gold reward model that `judge.model` names does not exist, or if it is
    the run's own. A model is recognized by its weights, wherever its folder is.
    """
    if not config.judge.gold:
        return
    folder = gold_folder(config)
    setting = f"judge.model={config.judge.gold}"
    gold = read_manifest(folder)
    if gold is None and not (folder / "config.json").exists():
        raise UserError(
            f"{setting}: there is no reward model in {folder}: name a run whose `make rm` has "
            "finished (name or name/seed1), or a model's folder"
        )

    weights = {known_hash(path) for path in folder.glob("*.safetensors")}
    for stage in ("rm", "normalize"):
        own = read_manifest(stage_folder(config, stage))
        if own is None:
            continue
        is_equal = gold is not None and gold["content"] == own["content"]
        has_equal_weights = not weights.isdisjoint(own["outputs"].values())
        if is_equal or has_equal_weights:
            raise UserError(
                f"{setting} is this run's own reward model: name another run's, or leave "
                "judge.model out"
            )


# -- commands --------------------------------------------------------------------------------------


def make_command(config: Config, stage: str) -> str:
    """The `make` command that runs a stage of this run."""
    goal = STAGES[stage].goal
    is_upstreams = config.is_upstreams(stage)
    name = config.upstream if is_upstreams else config.name
    if is_upstreams and name != config.preset and settings.is_recorded(name):
        # The upstream's record supplies its settings.
        return f"make {goal} SEED={config.seed} NAME={shlex.quote(name)}"

    variables = {"PRESET": config.preset, "SEED": str(config.seed)}
    if name != config.preset:
        variables["NAME"] = name
    if not is_upstreams:
        variables["UPSTREAM"] = config.upstream
        values = dict(override.split("=", 1) for override in config.overrides)
        settings_words = [f"{k}={value}" for k, value in values.items() if k not in MAKE_VARIABLES]
        variables["SET"] = " ".join(settings_words)
        for key, variable in MAKE_VARIABLES.items():
            variables[variable] = values.get(key, "")
    if "judge" in STAGES[stage].sections and config.judge.max_cost:
        variables["MAX_COST"] = f"{config.judge.max_cost:.15g}"
    if config.data.source not in (TOY, HUB):
        variables["DATA"] = config.data.source
    if config.base.tokenizer != TRAIN_TOKENIZER:
        variables["TOKENIZER"] = config.base.tokenizer

    words = [f"{key}={shlex.quote(value)}" for key, value in variables.items() if value]
    return " ".join(["make", goal, *words])
