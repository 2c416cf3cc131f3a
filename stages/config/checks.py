"""The error that a user can fix, and the checks that raise it."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NoReturn, TextIO
from urllib.parse import urlsplit

RESTORE = "restore it, or rerun what wrote it (REPLACE=)"
LESS_MEMORY = (
    "free some, or try memory.gradient_checkpointing=true, lora.rank=16, "
    "memory.frozen_dtype=bf16, or GPUS= with ENGINE=fsdp2"
)
# What errors say that mean too little memory, of the processor, cuBLAS, CUDA and NCCL.
NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "Cuda failure 2",
)
OTHER_SHAPES = "ignore_mismatched_sizes"
# What accelerate and peft read from the environment, and torch's launcher.
READ_BY_LIBRARIES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "PET_")
# Where the processes of a launch meet.
MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Control characters but for newline and tab, what turns the direction of a text, half characters.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


# -- errors and how they are shown -----------------------------------------------------------------


def visible(text: str) -> str:
    """A text as a terminal or a page may show it.

    What could steer them becomes U+FFFD, and a carriage return ends a line.
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
    """Print a sentence on stderr: in lines of 80 columns on a terminal, else in one line.

    A log is searched by line. On a terminal, commands in backticks and paths are not broken.
    """
    if sys.stderr.isatty() and "\n" not in text:
        unbroken = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
        lines = textwrap.wrap(unbroken, 80, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(lines).replace("\0", " ")
    print(text, file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty, or else the error's name."""
    text = visible(str(error))
    kind = type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if OTHER_SHAPES in text:
        return "its weights have other shapes than its config.json says"
    if not lines:
        return kind
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    if " " not in lines[0]:  # a KeyError, for example, says only the key
        return f"{kind}: {lines[0]}"
    return lines[0]


def unknown(what: str, name: str, known: Iterable[str], where: str = "") -> UserError:
    """The error for a name of the kind `what` that does not exist, with the nearest names.

    If none is near, it says `where` all names are shown; if that is empty, it lists them.
    """
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if not near and name:
        near = [candidate for candidate in names if name in candidate][:3]
    if near:
        return UserError(f"unknown {what} {name!r}: did you mean {' or '.join(near)}?")
    return UserError(f"unknown {what} {name!r}: {where or 'choose one of ' + ', '.join(names)}")


def print_nowhere(stream: TextIO) -> None:
    """What is printed to a stream from now on is lost, and no error."""
    with suppress(OSError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), stream.fileno())


# -- memory ----------------------------------------------------------------------------------------


def card_memory() -> str:
    """Who holds the memory of this process's GPU, for a message; empty on a CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    free, total = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    others = total - free - ours
    gib = 2**30
    return (
        f"GPU memory: this process {ours / gib:.1f} GiB, others {others / gib:.1f} GiB,"
        f" total {total / gib:.1f} GiB"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, of the device or of the processor."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(part in str(error) for part in NO_MEMORY)


# -- environment -----------------------------------------------------------------------------------


def is_on(name: str) -> bool:
    """Whether a variable of the environment says yes, as accelerate reads it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def forget_variables(keep: Sequence[str]) -> None:
    """Remove what accelerate and torch's launcher read from the environment, but for some names.

    ACCELERATE_GRADIENT_ACCUMULATION_STEPS=16 would divide every loss; PET_NNODES=2 would wait.
    """
    for name in list(os.environ):
        if name.startswith(READ_BY_LIBRARIES) and name not in keep:
            del os.environ[name]


def launched_processes() -> int:
    """The number of processes of this launch; 1 where there is no launch.

    Raises UserError where the environment speaks of several, as in some pods, and no launcher has
    set where they meet.
    """
    is_alone = (
        os.environ.get("RANK", "0") == "0"
        and os.environ.get("WORLD_SIZE", "1") == "1"
        and "LOCAL_RANK" not in os.environ
    )
    if is_alone:
        return 1

    present = {name: os.environ[name] for name in MEETING if name in os.environ}
    missing = [
        name
        for name in MEETING
        if name not in present or not (present[name].isdigit() or name == "MASTER_ADDR")
    ]
    if missing:
        raise UserError(
            f"the environment has {', '.join(present)}, as for one of several processes, but no"
            f" launcher has set {', '.join(missing)}: unset them, and start several by GPUS="
        )
    return int(present["WORLD_SIZE"])


def address_fault(address: str) -> bool:
    """Whether a text cannot be the address of a server."""
    try:
        parts = urlsplit(address)
        has_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or of brackets
        return True
    is_printable = all("!" <= letter <= "~" for letter in address)
    return not (has_server and is_printable)


# -- settings that must fit data, processes and models ---------------------------------------------


def check_filled(section: str, batch_size: int, rows: int) -> None:
    """Raise UserError if a stage's batch holds more rows than there are."""
    if batch_size > rows:
        raise UserError(
            f"{section}.batch_size is {batch_size} but there are only {rows} rows: lower it"
        )


def check_dealt(
    section: str, batch_size: int, processes: int, num_minibatches: int = 1, samples: int = 1
) -> None:
    """Raise UserError if processes cannot get equal minibatches, a query's `samples` together."""
    if batch_size % (processes * num_minibatches * samples) == 0:
        return
    factors = f"{processes} (processes)"
    if num_minibatches > 1:
        factors += f" times {section}.num_minibatches={num_minibatches}"
    if samples > 1:
        factors += f" times {section}.samples_per_query={samples}"
    raise UserError(f"{section}.batch_size is {batch_size}: it must be divisible by {factors}")


def check_room(positions: int, query: int, response: int, setting: str) -> None:
    """Raise UserError if a model has fewer positions than query and response have tokens."""
    if query + response > positions:
        raise UserError(
            f"{setting} is {response}, after queries of up to {query} tokens, but the model has "
            f"{positions} positions: lower it, or data.max_query_tokens"
        )
