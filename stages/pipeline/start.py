"""One stage in this process: its errors in one line, its trackers, and what it leaves behind."""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from stages.config.checks import UserError, say_error
from stages.config.config import Config
from stages.config.environment import launched_processes
from stages.config.faults import describe_user_error
from stages.config.out_of_memory import gpu_memory_usage, is_out_of_memory
from stages.config.stages import row_of
from stages.pipeline.trackers import tracked
from stages.runs.machine import keep_freed_memory
from stages.runs.run import tracking

T = TypeVar("T")

OTHER_DIED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL's other errors are about this process.
    "ncclRemoteError",
    "remote process exited",
)


def run_stage(
    stage: str, function: Callable[[Config], T], config: Config, resume_command: str
) -> T:
    """Call the function of a stage with its config, in this process.

    Raises UserError, with the command that resumes, for every error that a user can fix.
    """
    launched_processes()  # raises UserError for the remains of a launch
    token = tracking.set(tracked)
    try:
        with process_restored(row_of(stage, config.kind).computes):
            return function(config)
    except UserError:
        raise
    except Exception as error:
        line = describe_user_error(error)
        if line is None and is_about_another_process(error):
            line = "another process of this launch has died: look at its error"
        if line is None:
            raise
        if is_out_of_memory(error) and (memory := gpu_memory_usage()):
            line = f"{line} ({memory})"
        raise UserError(f"stage {stage}: {line}, then run `{resume_command}`") from error
    finally:
        tracking.reset(token)


@contextmanager
def process_restored(needs_torch: bool) -> Iterator[None]:
    """Leave this process as a new one would be, so that the next stage computes the same numbers.

    `needs_torch`: the stage will import torch, so its state before the stage can be noted now.
    """
    if has_others():  # each of them runs one stage and ends
        yield
        return

    with suppress(OSError):  # the peak memory of this process starts at what it holds now
        Path("/proc/self/clear_refs").write_text("5")
    if needs_torch:
        import torch  # noqa: F401
    torch_before = sys.modules.get("torch")
    if torch_before is not None:
        threads = torch_before.get_num_threads()
        random_state = torch_before.get_rng_state()
        if torch_before.cuda.is_available():
            torch_before.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        if torch_before is not None:
            torch_before.set_num_threads(threads)
            torch_before.set_rng_state(random_state)
        release()


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
        keep_freed_memory()  # it also gives back what is free now


@contextmanager
def errors_end_process() -> Iterator[None]:
    """In a launch of several processes, end this one at once on an error, with its message."""
    try:
        yield
    except BaseException as error:
        if not has_others():
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
    """End a process of a launch of several at once; return if there is only this one.

    An ordinary exit may wait in torch's threads for the others, while they wait for this process,
    and those threads may abort it (status 134): a finished stage would count as failed.
    """
    if has_others():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def has_others() -> bool:
    """Return whether this process is one of several of a launch."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_about_another_process(error: Exception) -> bool:
    """Return whether an error says that another process of a launch of several is gone."""
    is_dead = isinstance(error, RuntimeError) and any(text in str(error) for text in OTHER_DIED)
    return has_others() and is_dead
