"""The error that a user can fix, and how errors are shown."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn, TextIO

RESTORE = "restore it, or rerun what wrote it (REPLACE=)"
# transformers advises this option if weights do not fit the config.
SHAPE_MISMATCH = "ignore_mismatched_sizes"
# Control characters except newline and tab, marks of text direction, and unpaired surrogates.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a text with control characters replaced, for a terminal or a page.

    They become U+FFFD, except that a carriage return ends a line.
    """
    return HIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


class UserError(Exception):
    """Something that the user can fix; its text is one line that says what is wrong and how."""

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


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> UserError:
    """Return the error for an unknown name of the kind `what`, with the names closest to it.

    If none is close, the error says `where` all names are shown; if that is empty, it lists them.
    """
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not near and name:
        near = [candidate for candidate in names if name in candidate][:3]
    if near:
        return UserError(f"unknown {what} {name!r}: did you mean {' or '.join(near)}?")
    return UserError(f"unknown {what} {name!r}: {where or 'choose one of ' + ', '.join(names)}")


def discard_output(stream: TextIO) -> None:
    """Discard what is printed to a stream from now on, without an error."""
    with suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())
