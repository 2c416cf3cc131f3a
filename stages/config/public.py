"""What others may see of the settings: on pages, in wandb, on model cards."""

from pathlib import Path
from typing import Any

from stages.config.config import SECTIONS, Config
from stages.config.paths import RUNS, is_path

SERVERS = ("judge.base_url",)  # settings that no page shows
FILES = ("data.source", "outputs.file")  # no ids of the hub
NOT_SHOWN = "set (not shown)"


def public_value(name: str, value: Any) -> Any:
    """A setting, such as `data.source`, as others may see it.

    Folders are shown by their last component, except below `runs/`. Addresses are not shown,
    because they may contain a key.
    """
    if name in SERVERS and value:
        return NOT_SHOWN
    if not isinstance(value, str):
        return value
    if "://" in value:
        return NOT_SHOWN
    is_place = is_path(value) or (name in FILES and "/" in value)
    is_below_runs = value.startswith(f"{RUNS.name}/")
    return f"folder {Path(value).name}" if is_place and not is_below_runs else value


def public_settings(config: Config) -> dict[str, Any]:
    """All settings of a config as others may see them, nested by section."""
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
