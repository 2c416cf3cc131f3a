"""What others may see of the settings: on pages, in wandb, on model cards."""

from pathlib import Path
from typing import Any

from stages.config.config import SECTIONS, Config
from stages.config.paths import RUNS, is_path

PRIVATE_SETTINGS = ("judge.base_url",)
"""Settings whose values are shown to nobody."""
# Settings whose values with a slash are files, never ids of the hub.
FILE_SETTINGS = ("data.source", "outputs.file")
NOT_SHOWN = "set (not shown)"


def public_value(name: str, value: Any) -> Any:
    """Return a setting, such as `data.source`, as others may see it.

    Folders are shown by their last component, except below `runs/`. Addresses are not shown,
    because they may contain a key.
    """
    if name in PRIVATE_SETTINGS and value:
        return NOT_SHOWN
    if not isinstance(value, str):
        return value
    if "://" in value:
        return NOT_SHOWN

    is_file = is_path(value) or (name in FILE_SETTINGS and "/" in value)
    if is_file and not value.startswith(f"{RUNS.name}/"):
        return f"folder {Path(value).name}"
    return value


def public_settings(config: Config) -> dict[str, Any]:
    """Return all settings of a config as others may see them, nested by section."""
    public = config.model_dump()
    public["preset"] = Path(config.preset).name  # of a file, without its folders
    for section in SECTIONS:
        for field, value in public[section].items():
            public[section][field] = public_value(f"{section}.{field}", value)

    overrides = []
    for text in config.overrides:
        key, _, value = text.partition("=")
        overrides.append(f"{key}={public_value(key, value)}")
    public["overrides"] = overrides
    return public
