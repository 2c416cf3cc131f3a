"""The error that a user can mend, and the checks that raise it."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NoReturn, TextIO
from urllib.parse import urlsplit

RESTORE = "restore it, or make anew (REPLACE=) what has written it"
NO_MEMORY = (
    *("can't allocate memory", "Cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    *("CUDA error: out of memory", "CUBLAS_STATUS_NOT_INITIALIZED", "Cuda failure 2"),
)
LESS_MEMORY = (
    "free some, or try memory.gradient_checkpointing=true, lora.rank=16, "
    "memory.frozen_dtype=bf16, or GPUS= with ENGINE=fsdp2"
)
OTHER_SHAPES = "ignore_mismatched_sizes"
READ_BY_LIBRARIES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "PET_")
MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Control characters but for newline and tab, what turns the direction of a text, half characters.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """A text as a terminal or a page may show it: what could steer them is U+FFFD, a carriage
    return ends a line.
    """
    return HIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


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
    return known or any(part in str(error) for part in NO_MEMORY)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty, or else the error's name."""
    text, kind = visible(str(error)), type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if OTHER_SHAPES in text:
        return "its weights have other shapes than its config.json says"
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines and " " in lines[0] else ": ".join([kind, *lines[:1]])


def print_nowhere(stream: TextIO) -> None:
    """What is printed to a stream from now on is lost, and no error."""
    with suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


def is_on(name: str) -> bool:
    """Whether a variable of the environment says yes, as accelerate reads it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def forget_variables(keep: Sequence[str]) -> None:
    """Remove what accelerate and torch's launcher read from the environment, but for some names.

    ACCELERATE_GRADIENT_ACCUMULATION_STEPS=16 would divide every loss; PET_NNODES=2 would wait.
    """
    for name in [name for name in os.environ if name.startswith(READ_BY_LIBRARIES)]:
        if name not in keep:
            del os.environ[name]


def launched_processes() -> int:
    """The processes of this launch; 1 where there is no launch. Raises UserError where the
    environment speaks of several, as in some pods, and none would come to meet this one.
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


def address_fault(address: str) -> bool:
    """Whether a text cannot be the address of a server."""
    try:
        parts = urlsplit(address)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or of brackets
        return True
    return not is_whole or not all("!" <= letter <= "~" for letter in address)


def check_filled(section: str, batch_size: int, rows: int) -> None:
    """Raise UserError if a stage's batch holds more rows than there are."""
    if batch_size > rows:
        few = f"there are only {rows} rows: lower it"
        raise UserError(f"{section}.batch_size is {batch_size} but {few}")


def check_dealt(
    section: str, batch_size: int, processes: int, num_minibatches: int = 1, samples: int = 1
) -> None:
    """Raise UserError if processes cannot get equal minibatches, a query's `samples` together."""
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


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> UserError:
    """The error for a name of the kind `what` that does not exist: it offers the nearest names, or
    says `where` all are to be seen; if that is empty, they are listed.
    """
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    near = near or [whole for whole in names if name and name in whole][:3]
    if near:
        return UserError(f"unknown {what} {name!r}: did you mean {' or '.join(near)}?")
    return UserError(f"unknown {what} {name!r}: {where or 'choose one of ' + ', '.join(names)}")
