"""Stages in several processes: GPUS and ENGINE on this machine, or a launcher of your own (LAUNCH).

    GPUS=8 ENGINE=fsdp2              accelerate launch with engines/fsdp2.yaml and 8 processes
    LAUNCH="srun ... accelerate launch ..."     these words, followed by `-m stages --stage ppo ...`

Only stages that train or run a model are launched; the others run in the process of the pipeline.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.config.command_line import Request
from stages.config.environment import forget_variables
from stages.config.error_messages import in_one_line
from stages.config.errors import UserError, say_error, unknown
from stages.runs.signals import RECEIVED, Stopped, finishing_first, handled_signals, stop_asked

ENGINES = ("ddp", "fsdp2")
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_SECONDS = "1800"
"""The time that torch's launcher gives its processes to finish an update and to save."""


class StageFailedError(Exception):
    """A launched stage has failed and has printed its error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a stage ended with status {status}")
        self.status = status


def launcher_words(gpus: int, engine: str, launch: str) -> list[str]:
    """Return the words that start a stage in several processes; none for a single process.

    An empty engine is ddp. Raises UserError for a number below 1, an unknown engine, an engine
    without effect, and if both GPUS and LAUNCH are set.
    """
    if gpus < 1:
        raise UserError(f"GPUS={gpus} is below 1: give the number of GPUs to use on this machine")
    if engine and engine not in ENGINES:
        raise unknown("ENGINE", engine, ENGINES)
    if launch and gpus > 1:
        raise UserError("LAUNCH already sets the number of processes: leave out GPUS=")
    if launch and engine:
        raise UserError("LAUNCH already chooses the engine: leave out ENGINE=")
    if engine == "fsdp2" and gpus == 1:
        raise UserError("ENGINE=fsdp2 shares the weights among several processes: add GPUS=")
    if launch:
        try:
            return shlex.split(launch)
        except ValueError as error:
            raise UserError(f"LAUNCH={launch}: {error}: close the quotation marks") from None
    if gpus == 1:
        return []
    return [sys.executable, "-m", "stages.pipeline.launch", engine or "ddp", str(gpus)]


# -- in the process of the pipeline ----------------------------------------------------------------


def launch_stage(
    launcher: Sequence[str], stage: str, request: Request, resume_command: str
) -> None:
    """Run one stage in the processes that a launcher starts.

    Raises StageFailedError, UserError if the stage was killed, and Stopped as `run_launcher` does.
    """
    stage_words = ["-m", "stages", "--stage", stage, f"--resume-command={resume_command}"]
    status = run_launcher([*launcher, *stage_words, *request.arguments])
    if status == 0:
        return
    if status == 128 + signal.SIGKILL:  # it could not print this itself
        raise UserError(
            f"stage {stage} was killed (SIGKILL), perhaps because memory ran out:"
            f" `{resume_command}` resumes it"
        )
    if status - 128 in handled_signals():
        # A cluster may stop only the launched processes. srun ends with the same status if one of
        # its tasks fails.
        name = signal.Signals(status - 128).name
        say_error(
            f"stage {stage} was ended by {name}: if one of its processes failed, its error is"
            f" above; otherwise `{resume_command}` resumes it"
        )
    raise StageFailedError(status)


def run_launcher(words: Sequence[str]) -> int:
    """Run a launcher to its end and return its exit status.

    SIGTERM and SIGHUP are passed on to it. Raises Stopped if this process has received a signal.
    """
    forget_variables(keep=("ACCELERATE_USE_CPU",))
    with finishing_first():
        try:
            process = subprocess.Popen(words)
        except FileNotFoundError:
            raise UserError(f"there is no program {words[0]}: correct LAUNCH=") from None
        RECEIVED.children.append(process)
        early_signal = stop_asked()  # the signal may have come before the process was in the list
        if early_signal and early_signal != signal.SIGINT:
            process.send_signal(early_signal)
        try:
            code = process.wait()
        finally:
            RECEIVED.children.remove(process)

    if stop_asked():
        raise Stopped(stop_asked())
    return exit_status(code)


def exit_status(code: int) -> int:
    """Return the exit status as a shell gives it; `code` is below 0 for a signal, as in Popen."""
    return code if code >= 0 else 128 - code


# -- the launcher of GPUS, a process of its own ----------------------------------------------------


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Start the processes of one machine: `python -m stages.pipeline.launch ddp 8 -m stages ...`.

    Exits with the status of the process that failed first.
    """
    engine, gpus, *command = sys.argv[1:] if argv is None else argv
    forget_variables(keep=("ACCELERATE_USE_CPU",))
    os.environ.setdefault(SHUTDOWN_TIMEOUT, SHUTDOWN_SECONDS)
    config = Path(__file__).with_name("engines") / f"{engine}.yaml"
    words = ["--config_file", str(config), "--num_processes", gpus, "--num_machines", "1"]
    words += ["--main_process_port", "0"]  # any that is free
    raise SystemExit(accelerate_launch([*words, *command]))


def accelerate_launch(arguments: Sequence[str]) -> int:
    """Call `accelerate launch` with these arguments; return its exit status."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError as error:  # its processes have printed what is wrong
        _, failure = error.get_first_failure()
        return exit_status(failure.exitcode)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    main()
