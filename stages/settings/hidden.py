"""Settings as others may see them: on pages, at wandb, on model cards. Standard library only."""

import dataclasses
import re
from pathlib import Path
from typing import Any

SERVERS = ("judge.base_url",)
NOT_SHOWN = "set (not shown)"


def public_value(name: str, value: Any) -> Any:
    """A setting as others may see it: folders by their last name, servers and addresses not at all.

    `name` is section and field: `judge.base_url`. An address may hold a host and a key.
    """
    if name in SERVERS and value:
        return NOT_SHOWN
    if not isinstance(value, str):
        return value
    if "://" in value:
        return NOT_SHOWN
    return f"folder {Path(value).name}" if is_path(value) else value


def slug(text: str) -> str:
    """A run's name with the characters that names elsewhere may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def is_path(value: str) -> bool:
    """Whether a setting names a place on this machine, as opposed to an id of the hub."""
    return value.startswith(("/", ".", "~")) or "\\" in value


def public_settings(config: Any) -> dict[str, Any]:
    """All settings of a config as others may see them, nested by section."""
    found: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            found[name] = {key: public_value(f"{name}.{key}", one) for key, one in value.items()}
        elif name == "overrides":
            found[name] = [_public_override(one) for one in value]
        else:
            found[name] = value
    return found


def _public_override(text: str) -> str:
    key, equals, value = text.partition("=")
    return f"{key}{equals}{public_value(key, value)}"
