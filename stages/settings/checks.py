"""Errors that the user can mend, in one line, and checks that raise them. Standard library only.

Every command's `main` is under `in_one_line`, or hands its work to `run_stage`, which says beside
the error how the stage goes on. What the disk, the memory or another library refuses is told from a
defect by `what_to_mend`, and nowhere else; a defect keeps its traceback.
"""

import argparse
import difflib
import errno
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib.util import find_spec
from typing import Any, NoReturn, TextIO
from urllib.parse import urlsplit

RESTORE = "restore it, or make anew (REPLACE=) what has written it"
MENDS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "make it readable and writable"),
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), "move it away"),
    errno.EROFS: "make it writable",
    errno.ENOENT: RESTORE,
    errno.EISDIR: "a folder stands where a file belongs: move it away",
    errno.ENOTDIR: "a file stands where a folder belongs: move it away",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ELOOP: "a link leads back to itself: remove it",
    errno.ENOMEM: "close other programs, or raise the limit on memory (ulimit -v)",
    errno.EIO: "look at the disk or the terminal",
    # What a network disk says to a lock that it does not know.
    **dict.fromkeys(
        (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP), "put runs/ on a disk that can lock files"
    ),
}
OTHERWISE = "see to it that it can be read and written"
NO_SPACE = "No space left on device"
NO_MEMORY = (
    *("can't allocate memory", "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_NOT_INITIALIZED", "Cuda failure 2"),
)
NO_PRIMITIVE = "could not create a primitive"  # what oneDNN says, mostly of memory
LESS_MEMORY = (
    "free some, or try memory.gradient_checkpointing=true, lora.rank=16, "
    "memory.frozen_dtype=bf16, or GPUS= with ENGINE=fsdp2"
)
# By their names, because the libraries that raise them are not loaded here. What they say of a file
# is in their text.
DAMAGED = {
    *("SafetensorError", "UnpicklingError", "BadZipFile", "EOFError", "JSONDecodeError"),
    *("ArrowInvalid", "UnicodeDecodeError"),
}
DAMAGED_TEXTS = ("PytorchStreamReader", "Invalid magic number", "Error(s) in loading state_dict")
OTHER_SHAPES = "ignore_mismatched_sizes"
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as libraries in Rust write it
OURS = {"stages", "eval", "reports", "tests"}
READ_BY_LIBRARIES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "PET_")
MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PROXIES = [x for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for x in (name, name.lower())]
# Control characters but for newline and tab, what turns the direction of a text, half characters.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """A text as a terminal, a page or a table may show it: what could steer them is U+FFFD.

    A carriage return ends a line.
    """
    return HIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


class VisibleStream:
    """A stream to which texts go as `visible` makes them, for all that a command prints."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text; returns its length."""
        return self.stream.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class UserError(Exception):
    """Something that the user can mend; its text is one line that says what and how."""

    def __str__(self) -> str:
        return " ".join(visible(Exception.__str__(self)).splitlines())


def fail(error: Exception) -> NoReturn:
    """End the process with the one line of a UserError."""
    say_error(f"error: {error}")
    raise SystemExit(2)


def say_error(text: str) -> None:
    """Print a sentence on stderr: in lines of 80 columns on a terminal, else in one line, which a
    log is searched for. Commands in backticks and paths stay whole.
    """
    if sys.stderr.isatty() and "\n" not in text:
        whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
        lines = textwrap.wrap(whole, 80, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(lines).replace("\0", " ")
    print(text, file=sys.stderr, flush=True)


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
        return f"a text holds half a character ({text}): replace it, or save the file as UTF-8"
    if kind in DAMAGED or _has(text, DAMAGED_TEXTS):
        return f"a file is damaged ({kind}: {text}): {RESTORE}"
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] not in OURS:
        return f"{text}: `make install` installs what this project needs"
    return _about_a_file(error, text) if isinstance(error, OSError) else None


def card_memory() -> str:
    """Who holds the memory of this process's GPU, for a message; empty on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    (free, total), own = torch.cuda.mem_get_info(), torch.cuda.memory_reserved()
    sizes = (f"{size / 2**30:.1f}" for size in (own, total - free - own, total))
    return "of the card this process holds {} GiB, others {} of {}".format(*sizes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, of the device or of the processor."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or _has(str(error), NO_MEMORY)


def _has(text: str, parts: Iterable[str]) -> bool:
    return any(part in text for part in parts)


def _about_a_file(error: OSError, text: str) -> str:
    if error.errno is None:  # a library's own, which says all in its text
        return text
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{' -> '.join(names)}: " if names else ""
    mend = MENDS.get(error.errno, OTHERWISE)
    return f"{where}{error.strerror or os.strerror(error.errno)}: {mend}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty, or else the error's name."""
    text, kind = visible(str(error)), type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if OTHER_SHAPES in text:
        return "its weights have other shapes than its config.json says"
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines and " " in lines[0] else ": ".join([kind, *lines[:1]])


@contextmanager
def in_one_line() -> Iterator[None]:
    """End the process with one line for what the user can mend; a decorator for each `main`.

    A Ctrl-C is one line too. A reader that has gone, as in `| head -1`, is none.
    """
    open_closed_streams()
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


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes are one line, without its usage: many come through `make`."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with what argparse says."""
        raise UserError(message)


def open_closed_streams() -> None:
    """Put nothing in the place of what the caller has closed (`>&-`).

    Else the next file that is opened would have its number, and get what is printed.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))


def show(lines: Iterable[str]) -> None:
    """Print lines that are all that a command does; a reader may leave before the last."""
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        print_nowhere(sys.stdout)


def print_nowhere(stream: TextIO) -> None:
    """What is printed to a stream from now on is lost, and no error."""
    with suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


# -- the environment -------------------------------------------------------------------------------


def is_on(name: str) -> bool:
    """Whether a variable of the environment says yes, as accelerate reads it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def forget_variables(keep: Sequence[str]) -> None:
    """Remove what accelerate and torch's launcher read from the environment, but for some names.

    Stages set all of that themselves. ACCELERATE_GRADIENT_ACCUMULATION_STEPS=16, say, would divide
    every loss, and PET_NNODES=2 would wait for a second machine.
    """
    for name in [name for name in os.environ if name.startswith(READ_BY_LIBRARIES)]:
        if name not in keep:
            del os.environ[name]


def launched_processes() -> int:
    """The processes of this launch; 1 where there is no launch.

    Raises UserError where the environment speaks of several, as in some pods, but no launcher has
    started this one: it would wait for the others in vain.
    """
    alone = {"RANK": (None, "0"), "WORLD_SIZE": (None, "1"), "LOCAL_RANK": (None,)}
    if all(os.environ.get(name) in values for name, values in alone.items()):
        return 1
    there = {name: os.environ[name] for name in MEETING if name in os.environ}
    right = {name for name, text in there.items() if text.isdigit() or name == "MASTER_ADDR"}
    if lacking := [name for name in MEETING if name not in right]:
        raise UserError(
            f"the environment has {', '.join(there)}, as for one of several processes, but no"
            f" launcher has set {', '.join(lacking)}: unset them, and start several by GPUS="
        )
    return int(there["WORLD_SIZE"])


def address_fault(address: str, schemes: Sequence[str] = ("http", "https")) -> bool:
    """Whether a text cannot be the address of a server."""
    try:
        parts = urlsplit(address)
        is_whole = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or of brackets
        return True
    return not is_whole or not all("!" <= letter <= "~" for letter in address)


def network_fault(error: BaseException) -> str | None:
    """Which variable keeps a client of the network from being made; None if none does."""
    kind, text = type(error).__name__, str(error)
    of_a_file = isinstance(error, FileNotFoundError) and error.filename is None
    if kind not in ("InvalidURL", "SSLError") and "proxy URL" not in text and not of_a_file:
        return None
    for name in PROXIES:
        address = os.environ.get(name, "")
        address = address if "://" in address else f"http://{address}"
        if os.environ.get(name) and address_fault(address, ("http", "https", "socks5", "socks5h")):
            return f"{name} in the environment is no address of a proxy: correct or unset it"
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]} holds no certificates: correct or unset it"
    return None


# -- checks ----------------------------------------------------------------------------------------


def require_packages() -> None:
    """Raise UserError if this interpreter lacks a package that the stages run on."""
    for name in ("torch", "transformers", "accelerate", "datasets"):
        if find_spec(name) is None:
            raise UserError(f"{sys.executable} has no {name}: `make install VENV=.venv` brings it")


def require(condition: bool, key: str, what: str) -> None:
    """Raise UserError `<key> must <what>` unless the condition holds."""
    if not condition:
        raise UserError(f"{key} must {what}")


def require_type(value: Any, key: str, kind: type) -> None:
    """Raise UserError unless a value is of a type; a whole number is a float, too."""
    right = type(value) is kind or (kind is float and type(value) is int)
    require(right, key, f"be of type {kind.__name__}, not {repr(value)[:60]}")


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


def check_filled(section: str, batch_size: int, rows: int, of: str = "") -> None:
    """Raise UserError if a stage's batch holds more rows than there are; `of` says of what."""
    if batch_size > rows:
        few = f"there are only {rows} rows{of}: lower it"
        raise UserError(f"{section}.batch_size is {batch_size} but {few}")


def check_dealt(
    section: str, batch_size: int, processes: int, num_minibatches: int = 1, samples: int = 1
) -> None:
    """Raise UserError if a batch cannot be dealt to processes in minibatches of equal size, the
    `samples` of a query together.
    """
    if batch_size % (processes * num_minibatches * samples):
        counts = {"num_minibatches": num_minibatches, "samples_per_query": samples}
        several = {name: count for name, count in counts.items() if count > 1}
        times = "".join(f" times {section}.{name}={count}" for name, count in several.items())
        must = f"it must be divisible by {processes} (processes){times}"
        raise UserError(f"{section}.batch_size is {batch_size}: {must}")


def check_room(positions: int, query: int, response: int, setting: str) -> None:
    """Raise UserError if a model has too few positions for so many tokens of query and response."""
    if query + response > positions:
        raise UserError(
            f"{setting} is {response}, after queries of up to {query} tokens, but the model has "
            f"{positions} positions: lower it, or data.max_query_tokens"
        )


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
