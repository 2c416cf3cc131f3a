"""The configs that runs have recorded, including those of older versions and other branches."""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from stages.config import paths
from stages.config.config import SECTIONS, Config
from stages.config.errors import RESTORE, UserError
from stages.config.stages import STAGES

ALWAYS_RECORDED = ("preset", "name", "seed")


def is_recorded(name: str) -> bool:
    """Return whether a stage of a run has recorded the settings that it ran with."""
    records = (paths.RUNS / name).glob("seed*/*/config.json")
    return any(record.parent.name in STAGES for record in records)


def recorded_config(folder: Path, warns: bool = True) -> Config | None:
    """Return the config that a stage recorded in its folder; None if no run wrote one there.

    A setting that the record lacks has its default. Settings that this version does not have are
    ignored, and with `warns` a warning lists them once. Raises UserError, with the file, for a
    wrong value.
    """
    path = folder / "config.json"
    saved = _read_record(path)
    if saved is None:
        return None

    unknown = ignored_settings(folder)
    if unknown and warns:
        _warn_of_unknown(f"{saved['name']} seed {saved['seed']}", tuple(unknown))
    try:
        values = {
            name: section_from(name, value) if name in SECTIONS else value
            for name, value in saved.items()
            if name in Config.model_fields
        }
        if isinstance(values.get("overrides"), list):
            values["overrides"] = tuple(values["overrides"])
        return Config(**values)
    except UserError as error:
        raise UserError(f"{path}: {error}: {RESTORE}") from None


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return what a run has written into a `config.json`; None if there is no such record."""
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(saved, dict) or not all(name in saved for name in ALWAYS_RECORDED):
        return None
    return saved


def section_from(name: str, saved: Any) -> Any:
    """Return a section as a run recorded it. Raises UserError for a value that it cannot have."""
    if not isinstance(saved, dict):
        raise UserError(f"{name} must contain settings")
    fields = SECTIONS[name].model_fields
    return SECTIONS[name](**{field: value for field, value in saved.items() if field in fields})


def ignored_settings(folder: Path) -> list[str]:
    """Return the names in a stage's record that this version does not have.

    A name is `section` or `section.field`.
    """
    names = []
    saved = _read_record(folder / "config.json") or {}
    for name, value in saved.items():
        if name not in Config.model_fields:
            names.append(name)
        elif name in SECTIONS and isinstance(value, dict):
            fields = SECTIONS[name].model_fields
            names += [f"{name}.{field}" for field in value if field not in fields]
    return names


def ignored_line(run: str, names: Sequence[str]) -> str:
    """Return the warning about settings in a run's record that this version does not have."""
    return f"warning: run {run} recorded settings that this version ignores: {', '.join(names)}"


@cache
def _warn_of_unknown(run: str, names: tuple[str, ...]) -> None:
    """Print one line for each run; the cache keeps its other stages from repeating it."""
    print(ignored_line(run, names), file=sys.stderr, flush=True)
