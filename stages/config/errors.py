"""The error that a user can fix, and how errors are shown."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NoReturn, TextIO

RESTORE = "restore it, or rerun what wrote it (REPLACE=)"
MOST_LISTED = 3  # items that a line names
# transformers advises this option if weights do not fit the config.
SHAPE_MISMATCH = "ignore_mismatched_sizes"
# Control characters except newline and tab, marks that reverse the direction of text, and unpaired
# surrogates.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text with control characters replaced, for a terminal or a page.

    They become U+FFFD, except that a carriage return ends a line.
    """
    return HIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


class UserError(Exception):
    """An error that the user can fix. Its text is one line: what is wrong, where, how to fix it."""

    def __str__(self) -> str:
        return " ".join(visible(Exception.__str__(self)).splitlines())


def fail(error: Exception) -> NoReturn:
    """End the process with the one line of a UserError."""
    say_error(f"error: {error}")
    raise SystemExit(2)


def say_error(text: str) -> None:
    """Print a sentence on stderr: wrapped at 80 columns on a terminal, otherwise in one line.

    Logs are searched line by line. On a terminal, commands in backticks and paths are not broken.
    """
    if sys.stderr.isatty() and "\n" not in text:
        unbroken = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
        lines = textwrap.wrap(unbroken, 80, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(lines).replace("\0", " ")
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not empty, or else the error's name."""
    kind = type(error).__name__
    text = visible(str(error))
    if SHAPE_MISMATCH in text:
        return "the shapes of its weights differ from those in its config.json"

    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return kind
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    if " " not in lines[0]:  # a KeyError, for example, says only the key
        return f"{kind}: {lines[0]}"
    return lines[0]


def first_few(items: Sequence[str], separator: str = ", ") -> str:
    """Return the first three items in one line, and how many follow: `a, b, c, and 2 more`."""
    text = separator.join(items[:MOST_LISTED])
    if len(items) > MOST_LISTED:
        text += f"{separator}and {len(items) - MOST_LISTED} more"
    return text


def unknown(kind: str, name: str, names: Iterable[str], hint: str = "") -> UserError:
    """Return the error for a name of some kind that does not exist, with the nearest names.

    If none is near, it ends with the hint, such as where all names are shown; without a hint it
    lists them.
    """
    names = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not near and name:
        near = [candidate for candidate in names if name in candidate][:3]
    if near:
        return UserError(f"unknown {kind} {name!r}: did you mean {' or '.join(near)}?")
    if not hint:
        hint = f"choose one of {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}: {hint}")


def discard_output(stream: TextIO) -> None:
    """Discard what is printed to a stream from now on, without an error."""
    with suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
