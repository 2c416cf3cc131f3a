"""Turn errors that the user can fix into one line.

Every command's `main` is decorated with `in_one_line`. Only `describe_user_error` tells an error
that a user can fix from a bug, which keeps its traceback.
"""

import argparse
import errno
import math
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO, cast

from stages.config.errors import RESTORE, UserError, discard_output, fail, first_line, visible
from stages.config.out_of_memory import LESS_MEMORY, is_out_of_memory

# How to fix an error of the operating system.
FIXES = {
    errno.ENOSPC: "free some disk space",
    errno.EDQUOT: "free some disk space",
    errno.EACCES: "make it readable and writable",
    errno.EPERM: "make it readable and writable",
    errno.EROFS: "make it writable",
    errno.ENOENT: RESTORE,
    errno.EISDIR: "there is a folder in place of this file: move it away",
    errno.ENOTDIR: "there is a file in place of this folder: move it away",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ENOMEM: "close other programs, or raise the limit on memory (ulimit -v)",
    # Network disks that do not support locks answer with one of these.
    errno.ENOSYS: "put runs/ on a disk that can lock files",
    errno.ENOLCK: "put runs/ on a disk that can lock files",
    errno.ENOTSUP: "put runs/ on a disk that can lock files",
}
NO_SPACE = "No space left on device"
NO_PRIMITIVE = "could not create a primitive"  # oneDNN's error, usually because memory ran out
# Errors by name, because the libraries that raise them are not loaded here.
DAMAGED = {
    "ArrowInvalid",
    "BadZipFile",
    "EOFError",
    "JSONDecodeError",
    "SafetensorError",
    "UnicodeDecodeError",
    "UnpicklingError",
}
DAMAGED_TEXTS = ("PytorchStreamReader", "Invalid magic number", "Error(s) in loading state_dict")
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as libraries in Rust write it
OUR_PACKAGES = {"stages", "eval", "reports", "tests"}


class VisibleStream:
    """A stream that passes everything a command prints through `visible`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        return self.stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unfiltered_stdout() -> TextIO:
    """Return stdout without the filter, for rich: its colors are control characters.

    What rich prints there must have passed through `visible` itself.
    """
    stream: Any = sys.stdout
    while isinstance(stream, VisibleStream):
        stream = stream.stream
    return cast(TextIO, stream)


def describe_user_error(error: BaseException) -> str | None:
    """Return what is wrong and how to fix it, in one line; None for a bug in the code."""
    kind = type(error).__name__
    text = first_line(error)
    if isinstance(error, UserError):
        return text
    if is_out_of_memory(error) or NO_PRIMITIVE in text:
        return f"out of memory: {LESS_MEMORY}"

    number = OS_ERROR.search(str(error))
    if number is not None:
        code = int(number[1])
        return _about_a_file(OSError(code, os.strerror(code)), text)
    # torch has its own error; shutil has a list of all files that it could not copy.
    if NO_SPACE in str(error) and getattr(error, "errno", None) is None:
        return f"{NO_SPACE}: {FIXES[errno.ENOSPC]}"
    if isinstance(error, UnicodeEncodeError):
        return _about_encoding(error)
    if kind in DAMAGED or any(part in text for part in DAMAGED_TEXTS):
        return f"a file is damaged ({kind}: {text}): {RESTORE}"
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] not in OUR_PACKAGES:
        return f"{text}: `make install` installs what this project needs"
    if isinstance(error, OSError):
        return _about_a_file(error, text)
    return None


def _about_encoding(error: UnicodeEncodeError) -> str:
    """Return the line for a character that cannot be encoded.

    An unpaired surrogate is an error of the text, any other a limit of the encoding.
    """
    character = error.object[error.start]
    if "\ud800" <= character <= "\udfff":
        return f"a text has an unpaired surrogate ({error}): remove it, or save the file as UTF-8"
    return (
        f"the encoding {error.encoding} has no character {character!a}: "
        "set PYTHONIOENCODING=utf-8 or LANG=C.UTF-8"
    )


def print_any_character() -> None:
    """Print escapes on a terminal whose encoding is not UTF-8, so that printing never fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _about_a_file(error: OSError, text: str) -> str:
    if error.errno is None:  # a library's own, whose text says everything
        return text
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{' -> '.join(names)}: " if names else ""
    what = error.strerror or os.strerror(error.errno)
    return f"{where}{what}: {FIXES.get(error.errno, 'make sure that it can be read and written')}"


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the process with one line on an error that the user can fix; decorates each `main`."""
    print_any_character()
    try:
        with redirect_stdout(VisibleStream(sys.stdout)):
            yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by SIGINT: run the same command to start again", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        discard_output(sys.stdout)
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        line = describe_user_error(error)
        if line is None:
            raise
        fail(UserError(line))


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with what argparse says."""
        raise UserError(message)


def show(lines: Iterable[str]) -> None:
    """Print a command's result; a reader such as `head` may close the pipe before the last line."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        discard_output(sys.stdout)


def require_packages() -> None:
    """Raise UserError if this interpreter lacks a package that the stages run on."""
    for name in ("torch", "transformers", "accelerate", "datasets"):
        if find_spec(name) is None:
            raise UserError(f"{sys.executable} lacks {name}: run `make install`")


def is_above_0(text: str) -> bool:
    """Whether a text is a finite number above 0."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
