"""The configs that runs have recorded, including those of older versions and other branches."""

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from stages.config.checks import RESTORE, UserError
from stages.config.config import SECTIONS, Config

ALWAYS_RECORDED = ("preset", "name", "seed")


def recorded_config(folder: Path) -> Config | None:
    """The config that a stage recorded in its folder; None if there is none that a run wrote.

    A setting that the record lacks has its default. Settings that this version does not have are
    ignored, and a warning lists them once. Raises UserError, with the file, for a wrong value.
    """
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(saved, dict) or not all(name in saved for name in ALWAYS_RECORDED):
        return None

    unknown = unknown_settings(saved)
    if unknown:
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


def section_from(name: str, saved: Any) -> Any:
    """A section as a run recorded it. Raises UserError for a value that it cannot have."""
    if not isinstance(saved, dict):
        raise UserError(f"{name} must contain settings")
    fields = SECTIONS[name].model_fields
    return SECTIONS[name](**{field: value for field, value in saved.items() if field in fields})


def unknown_settings(saved: dict[str, Any]) -> list[str]:
    """What a record has but this version does not: `section`, or `section.field`."""
    names = []
    for name, value in saved.items():
        if name not in Config.model_fields:
            names.append(name)
        elif name in SECTIONS and isinstance(value, dict):
            fields = SECTIONS[name].model_fields
            names += [f"{name}.{field}" for field in value if field not in fields]
    return names


@cache
def _warn_of_unknown(run: str, names: tuple[str, ...]) -> None:
    """Print one line for each run; the cache keeps its other stages from repeating it."""
    line = f"warning: run {run} recorded settings that this version ignores: {', '.join(names)}"
    print(line, file=sys.stderr, flush=True)
