"""The error for what a user can mend, in one line, and the checks that raise it."""

import difflib
import math
import sys
from collections.abc import Iterable
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
    """Raise UserError if one of these fields of a section is negative."""
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


def is_above_0(text: str) -> bool:
    """Whether a text is a finite number above 0."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> UserError:
    """The error for a name that does not exist: it offers the nearest names, or else all names.

    `what` is the kind of name. `where` says how to see all names; if it is empty, they are listed.
    """
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    near = near or [whole for whole in names if name and name in whole][:3]
    if near:
        return UserError(f"unknown {what} {name!r}: did you mean {' or '.join(near)}?")
    return UserError(f"unknown {what} {name!r}: {where or 'choose one of ' + ', '.join(names)}")
