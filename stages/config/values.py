"""Single settings by name, such as `ppo.kl_coef`: their types, defaults, values and texts.

An override is the text `ppo.kl_coef=0.1`.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from stages.config.config import SECTIONS, Config
from stages.config.errors import UserError, unknown

Changes = dict[str, dict[str, Any]]
"""Section -> field -> value."""

# Several overrides in one text are separated where white space precedes `section.key=`, because a
# value may contain spaces.
NEXT_OVERRIDE = re.compile(r"\s+(?=[A-Za-z_]\w*\.\w+=)")
# A line break in a prompt, as two characters, because a command line cannot contain one.
LINE_BREAK = "\\n"
AUTO_SETTINGS = ("memory.microbatch_size", "memory.forward_batch_size")
"""Settings that may be `auto`, which is stored as 0: the memory plan then chooses the value."""
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}


def _plain_type(annotation: Any) -> type:
    """Return the type of a field's values: `str` for a choice of texts."""
    return type(get_args(annotation)[0]) if get_origin(annotation) is Literal else annotation


FIELDS: dict[str, FieldInfo] = {
    f"{name}.{field}": info
    for name, section in SECTIONS.items()
    for field, info in section.model_fields.items()
}
TYPES = {key: _plain_type(info.annotation) for key, info in FIELDS.items()}
DEFAULTS: dict[str, Any] = {key: info.default for key, info in FIELDS.items()}


# -- values ----------------------------------------------------------------------------------------


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting, such as `ppo.kl_coef`."""
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field)


def with_changes(config: Config, changes: Changes) -> Config:
    """Return the config with changes, which are validated together."""
    sections = {name: getattr(config, name).changed(**values) for name, values in changes.items()}
    return config.changed(**sections)


def value_from_text(key: str, text: str) -> Any:
    """Parse the value of a setting, such as `ppo.kl_coef`. Raises UserError if it is not one."""
    if key in AUTO_SETTINGS and text == "auto":
        return 0
    if key == "data.prompt":
        return text.replace(LINE_BREAK, "\n")

    kind = TYPES[key]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{key} must be {IN_WORDS[kind]}, not {text!r}") from None


def text_from_value(value: Any) -> str:
    """Return the text that `value_from_text` parses to this value."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", LINE_BREAK)


# -- overrides -------------------------------------------------------------------------------------


def split_overrides(text: str) -> list[str]:
    """Return the overrides in one text, such as SET='ppo.lam=1 sft.epochs=2'."""
    if not text.strip():
        return []
    return NEXT_OVERRIDE.split(text.strip())


def parse_override(override: str) -> tuple[str, str, Any]:
    """Return section, field and value of an override. Raises UserError for a bad key or value."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set takes section.key=value, not {override!r}")
    if key not in TYPES:
        raise unknown("setting", key, TYPES, "`make settings` lists all of them")
    section, _, field = key.partition(".")
    return section, field, value_from_text(key, text)


def parse_overrides(overrides: Iterable[str]) -> Changes:
    """Parse overrides into section -> field -> value. Raises UserError as `parse_override` does."""
    changes: Changes = {}
    for override in overrides:
        section, field, value = parse_override(override)
        changes.setdefault(section, {})[field] = value
    return changes


def key_of(override: str) -> str:
    """Return the setting that an override sets: `ppo.kl_coef` for `ppo.kl_coef=0.1`."""
    return override.partition("=")[0]


def section_of(key: str) -> str:
    """Return the section of a setting or of an override: `ppo` for `ppo.kl_coef`."""
    return key.partition(".")[0]
