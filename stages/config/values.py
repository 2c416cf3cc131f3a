"""Every setting by its name, such as `ppo.kl_coef`: its type, default and text, and overrides."""

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from stages.config.config import SECTIONS, Config
from stages.config.errors import UserError, unknown


def _plain_type(annotation: Any) -> type:
    """The type of a field's values: `str` for a choice of texts."""
    return type(get_args(annotation)[0]) if get_origin(annotation) is Literal else annotation


# Types and defaults of all settings, by names such as `ppo.kl_coef`.
IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
LINE_BREAK = "\\n"  # of a prompt, as two characters: a command line cannot contain a line break
TYPES = {
    f"{section}.{name}": _plain_type(field.annotation)
    for section, kind in SECTIONS.items()
    for name, field in kind.model_fields.items()
}
DEFAULTS: dict[str, Any] = {
    f"{section}.{name}": field.default
    for section, kind in SECTIONS.items()
    for name, field in kind.model_fields.items()
}
SIZES = ("memory.microbatch_size", "memory.forward_batch_size")


def changes_of(texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The values of some overrides, by section and field. Raises UserError as `override_of`."""
    changes: dict[str, dict[str, Any]] = {}
    for section, name, value in map(override_of, texts):
        changes.setdefault(section, {})[name] = value
    return changes


def with_changes(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    """The config with changes, all those of a section at once: they are validated together."""
    sections = {name: getattr(config, name).changed(**values) for name, values in changes.items()}
    return config.changed(**sections)


def override_of(override: str) -> tuple[str, str, Any]:
    """Section, field and value of `section.key=value`. Raises UserError for a bad key or value."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set takes section.key=value, not {override!r}")
    if key not in TYPES:
        raise unknown("setting", key, TYPES, "`make settings` lists all of them")
    section, _, name = key.partition(".")
    return section, name, value_from_text(key, text)


def value_from_text(key: str, text: str) -> Any:
    """Parse the value of a setting, such as `ppo.kl_coef`. Raises UserError if it is not one.

    `auto` stands for a batch size that the memory plan chooses.
    """
    if key in SIZES and text == "auto":
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


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting, such as `ppo.kl_coef`."""
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field)


def text_from_value(value: Any) -> str:
    """A value as `value_from_text` reads it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", LINE_BREAK)
