"""What a user can mend: the error that is one line, and the checks that raise it."""

import sys
from typing import Any, NoReturn


class UserError(Exception):
    """Something that the user can mend; its text is one line that says what and how."""


def fail(error: Exception) -> NoReturn:
    """End the process with the one line of a UserError."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def require(condition: bool, key: str, what: str) -> None:
    """Raise UserError `<key> must <what>` unless the condition holds."""
    if not condition:
        raise UserError(f"{key} must {what}")


def positive(section: Any, prefix: str, *names: str) -> None:
    """Raise UserError unless these fields of a section are above 0."""
    for name in names:
        value = getattr(section, name)
        require(value > 0, f"{prefix}.{name}", f"be above 0, not {value}")


def at_least_0(section: Any, prefix: str, *names: str) -> None:
    """Raise UserError where one of these fields of a section is negative."""
    for name in names:
        value = getattr(section, name)
        require(value >= 0, f"{prefix}.{name}", f"be at least 0, not {value}")


def in_range(section: Any, prefix: str, name: str, low: float, high: float) -> None:
    """Raise UserError unless a field of a section lies in [low, high]."""
    value = getattr(section, name)
    require(low <= value <= high, f"{prefix}.{name}", f"lie in [{low}, {high}], not {value}")


def one_of(section: Any, prefix: str, name: str, choices: tuple[str, ...]) -> None:
    """Raise UserError unless a field of a section is one of the choices."""
    value = getattr(section, name)
    require(value in choices, f"{prefix}.{name}", f"be one of {', '.join(choices)}, not {value!r}")
