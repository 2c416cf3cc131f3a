"""Run one stage in this process: report its errors in one line, and clean up after it."""

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from stages.config.config import Config
from stages.config.environment import is_one_of_several, launched_processes
from stages.config.error_messages import describe_user_error
from stages.config.errors import UserError, say_error
from stages.config.out_of_memory import gpu_memory_usage, is_out_of_memory
from stages.config.stages import stage_row
from stages.runs.machine import keep_freed_memory

T = TypeVar("T")

# Texts of errors which mean that another process of the launch is gone.
OTHER_DIED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL's other errors concern this process.
    "ncclRemoteError",
    "remote process exited",
)


def call_stage(
    stage: str, function: Callable[[Config], T], config: Config, resume_command: str
) -> T:
    """Call the function of a stage with its config; return what it returns.

    Raises UserError, with the command that resumes, for every error that a user can fix.
    """
    launched_processes()  # raises UserError for leftover variables of a launch
    try:
        with process_restored(needs_torch=stage_row(stage, config.kind).computes):
            return function(config)
    except UserError:
        raise
    except Exception as error:
        line = describe_user_error(error)
        if line is None and is_about_another_process(error):
            line = "another process of this launch has died: fix its error"
        if line is None:
            raise
        memory = gpu_memory_usage() if is_out_of_memory(error) else ""
        if memory:
            line += f" ({memory})"
        raise UserError(f"stage {stage}: {line}, then run `{resume_command}`") from error


# -- the next stage of the same process ------------------------------------------------------------


@contextmanager
def process_restored(needs_torch: bool) -> Iterator[None]:
    """Leave this process like a new one, so that the next stage computes the same numbers.

    All stages share one process, because importing torch and transformers takes 5 seconds.

    `needs_torch`: the stage will import torch, so torch's state can be read before the stage.
    """
    if is_one_of_several():  # each of them runs one stage and ends
        yield
        return

    # The peak memory of this process is counted from now on.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if needs_torch:
        importlib.import_module("torch")
    torch = sys.modules.get("torch")
    try:
        with nullcontext() if torch is None else torch_restored(torch):
            yield
    finally:
        release()


@contextmanager
def torch_restored(torch: Any) -> Iterator[None]:
    """Restore torch's number of threads and its random state after the block."""
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


def release() -> None:
    """Release models, accelerate's state, compiled graphs and cached memory."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        keep_freed_memory()  # it also returns freed memory to the system


# -- one of several processes ----------------------------------------------------------------------


@contextmanager
def errors_end_process() -> Iterator[None]:
    """In a launch of several processes, print an error's message and end this process at once."""
    try:
        yield
    except BaseException as error:
        if not is_one_of_several():
            raise
        status = 1
        if isinstance(error, SystemExit):
            status = int(error.code or 0)
        elif isinstance(error, UserError):
            say_error(f"error: {error}")
            status = 2
        else:
            traceback.print_exc()
        end_process(status)


def end_process(status: int = 0) -> None:
    """End this process at once if it is one of several in a launch; otherwise return.

    An ordinary exit may wait in torch's threads for the others, while they wait for this process,
    and those threads may abort it (status 134): a finished stage would count as failed.
    """
    if is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def is_about_another_process(error: Exception) -> bool:
    """Return whether an error means that another process of the launch is gone."""
    is_dead = isinstance(error, RuntimeError) and any(text in str(error) for text in OTHER_DIED)
    return is_one_of_several() and is_dead
