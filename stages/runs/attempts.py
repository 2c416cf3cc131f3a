"""Half-finished stages: what an interrupted attempt left, and which configs can resume it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.config.config import Config
from stages.config.errors import UserError, first_few
from stages.config.identity import settings_of
from stages.config.recorded import recorded_config
from stages.runs.differences import differing_inputs, differing_settings
from stages.runs.files import read_record
from stages.runs.make_command import make_command
from stages.runs.manifest import ATTEMPT, RESUME, last_checkpoint, partial_of, stage_folder


def is_resumable(config: Config, stage: str) -> bool:
    """Return whether this config can resume an interrupted attempt at a stage."""
    partial = partial_of(stage_folder(config, stage))
    return (partial / RESUME).is_dir() and not attempt_differences(config, stage)


def attempt_differences(config: Config, stage: str) -> list[str]:
    """Return how an interrupted attempt at a stage differs from this config.

    `ppo.kl_coef: began with 0.05, now 0.1` is one difference of settings, and `it began with an
    earlier sft` one of inputs.
    """
    partial = partial_of(stage_folder(config, stage))
    attempt = read_record(partial / ATTEMPT)
    if attempt is None:
        return [f"{ATTEMPT} is missing"]
    recorded_settings = attempt.get("settings")
    if recorded_settings is None:  # An earlier version recorded only the whole config.
        recorded_settings = _settings_from_config(config, stage, partial)
    differences = differing_settings(config, stage, recorded_settings, verb="began with")
    differences += [f"it began {text}" for text in differing_inputs(config, stage, attempt)]
    return differences


def _settings_from_config(config: Config, stage: str, partial: Path) -> dict[str, Any]:
    """Return the settings of an attempt as `settings_of` does, read from its config.json."""
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

    Otherwise a typo would move hours of training aside.
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
        f"stage {stage} has a checkpoint after update {update}, with other settings or inputs "
        f"({first_few(differences, '; ')}): {resume}, choose another NAME, or start over with "
        f"REPLACE={stage}"
    )


def resume_point(partial: Path) -> str:
    """Return where an interrupted stage resumes, in words; empty if it starts over."""
    update = last_checkpoint(partial)
    if update is not None:
        return f"resumes after update {update}"
    measured = [*(partial / RESUME).glob("*.jsonl"), *partial.glob("judgements.jsonl")]
    return "resumes after the finished part" if measured else ""
