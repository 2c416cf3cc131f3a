"""How a command ends in one line, for what its user can mend.

Every command's `main` is under `in_one_line`, or hands its work to `run_stage`. `what_to_mend`
alone tells what can be mended from a defect, which keeps its traceback.
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
from typing import Any, NoReturn, TextIO

from stages.config.checks import (
    LESS_MEMORY,
    RESTORE,
    UserError,
    address_fault,
    fail,
    first_line,
    is_out_of_memory,
    print_nowhere,
    visible,
)

MENDS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "make it readable and writable"),
    errno.EROFS: "make it writable",
    errno.ENOENT: RESTORE,
    errno.EISDIR: "a folder stands where a file belongs: move it away",
    errno.ENOTDIR: "a file stands where a folder belongs: move it away",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ENOMEM: "close other programs, or raise the limit on memory (ulimit -v)",
    # What a network disk says to a lock that it does not know.
    **dict.fromkeys(
        (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP), "put runs/ on a disk that can lock files"
    ),
}
NO_SPACE = "No space left on device"
NO_PRIMITIVE = "could not create a primitive"  # what oneDNN says, mostly of memory
# By their names, because the libraries that raise them are not loaded here.
DAMAGED = {
    *("SafetensorError", "UnpicklingError", "BadZipFile", "EOFError", "JSONDecodeError"),
    *("ArrowInvalid", "UnicodeDecodeError"),
}
DAMAGED_TEXTS = ("PytorchStreamReader", "Invalid magic number", "Error(s) in loading state_dict")
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as libraries in Rust write it
PROXIES = [x for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for x in (name, name.lower())]
OURS = {"stages", "eval", "reports", "tests"}


class VisibleStream:
    """A stream to which texts go as `visible` makes them, for all that a command prints."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        return self.stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def what_to_mend(error: BaseException) -> str | None:
    """What is wrong and how to mend it, in one line; None if that is not known: a defect."""
    kind, text = type(error).__name__, first_line(error)
    if isinstance(error, UserError):
        return text
    if is_out_of_memory(error) or NO_PRIMITIVE in text:
        return f"out of memory: {LESS_MEMORY}"
    if line := network_fault(error):
        return line
    if number := OS_ERROR.search(str(error)):
        return _about_a_file(OSError(int(number[1]), os.strerror(int(number[1]))), text)
    # torch has one of its own; shutil has a list of all files that it could not copy.
    if NO_SPACE in str(error) and getattr(error, "errno", None) is None:
        return f"{NO_SPACE}: {MENDS[errno.ENOSPC]}"
    if isinstance(error, UnicodeEncodeError):
        return _about_encoding(error)
    if kind in DAMAGED or any(part in text for part in DAMAGED_TEXTS):
        return f"a file is damaged ({kind}: {text}): {RESTORE}"
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] not in OURS:
        return f"{text}: `make install` installs what this project needs"
    return _about_a_file(error, text) if isinstance(error, OSError) else None


def _about_encoding(error: UnicodeEncodeError) -> str:
    """Half a character is a fault of the text; any other one is a limit of the encoding."""
    character = error.object[error.start]
    if "\ud800" <= character <= "\udfff":
        return f"a text holds half a character ({error}): replace it, or save the file as UTF-8"
    return (
        f"the encoding {error.encoding} has no character {character!a}: "
        "set PYTHONIOENCODING=utf-8 or LANG=C.UTF-8"
    )


def print_any_character() -> None:
    """Let a terminal of another encoding than UTF-8 show escapes, so that printing never fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _about_a_file(error: OSError, text: str) -> str:
    if error.errno is None:  # a library's own, which says all in its text
        return text
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{' -> '.join(names)}: " if names else ""
    what = error.strerror or os.strerror(error.errno)
    return f"{where}{what}: {MENDS.get(error.errno, 'see to it that it can be read and written')}"


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the process with one line for what the user can mend; a decorator for each `main`."""
    open_closed_streams()
    print_any_character()
    try:
        with redirect_stdout(VisibleStream(sys.stdout)):
            yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by SIGINT: the same command begins again", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        print_nowhere(sys.stdout)
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        line = what_to_mend(error)
        if line is None:
            raise
        fail(UserError(line))


def open_closed_streams() -> None:
    """Put nothing in the place of what the caller has closed (`>&-`): else the next file that is
    opened would have its number, and get what is printed.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def network_fault(error: BaseException) -> str | None:
    """Which variable keeps a client of the network from being made; None if none does."""
    kind, text = type(error).__name__, str(error)
    of_a_file = isinstance(error, FileNotFoundError) and error.filename is None
    if kind not in ("InvalidURL", "SSLError") and "proxy URL" not in text and not of_a_file:
        return None
    for name in PROXIES:
        scheme, _, rest = os.environ.get(name, "").rpartition("://")
        known = scheme in ("", "http", "https", "socks5", "socks5h")
        if scheme + rest and (not known or address_fault(f"http://{rest}")):
            return f"{name} in the environment is no address of a proxy: correct or unset it"
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]} holds no certificates: correct or unset it"
    return None


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with what argparse says."""
        raise UserError(message)


def show(lines: Iterable[str]) -> None:
    """Print lines that are all that a command does; a reader may leave before the last."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        print_nowhere(sys.stdout)


def require_packages() -> None:
    """Raise UserError if this interpreter lacks a package that the stages run on."""
    for name in ("torch", "transformers", "accelerate", "datasets"):
        if find_spec(name) is None:
            raise UserError(f"{sys.executable} has no {name}: `make install VENV=.venv` brings it")


def is_above_0(text: str) -> bool:
    """Whether a text is a finite number above 0."""
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
