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

from stages.config.checks import UserError, unknown
from stages.config.environment import forget_variables
from stages.config.faults import in_one_line
from stages.runs.signals import RECEIVED, Stopped, finishing_first, stop_asked

ENGINES = ("ddp", "fsdp2")
# Seconds that torch's launcher gives its processes to finish an update and to save after a signal.
SHUTDOWN_TIMEOUT = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1800")


def launcher_words(gpus: int, engine: str, launch: str) -> list[str]:
    """Return the words that start a stage in several processes; none for a single process.

    Raises UserError for a number below 1, an unknown engine, and for both ways at once.
    """
    if gpus < 1:
        raise UserError(f"GPUS={gpus}: give the number of GPUs of this machine")
    if engine not in ENGINES:
        raise unknown("ENGINE", engine, ENGINES)
    if launch and gpus > 1:
        raise UserError("LAUNCH already says how many processes run: leave out GPUS=")
    if launch:
        return split_launch(launch)
    if gpus == 1:
        return []
    return [sys.executable, "-m", "stages.pipeline.launch", engine, str(gpus)]


def split_launch(launch: str) -> list[str]:
    """Return the words of LAUNCH. Raises UserError for an open quotation mark."""
    try:
        return shlex.split(launch)
    except ValueError as error:
        raise UserError(f"LAUNCH={launch}: {error}: close the quotation marks") from None


def run_launched(words: Sequence[str]) -> int:
    """Run a launcher to its end and return its exit status, as a shell gives it.

    SIGTERM and SIGHUP are passed on to it. Raises Stopped if this process has received a signal.
    """
    forget_variables(keep=("ACCELERATE_USE_CPU",))
    with finishing_first():
        try:
            process = subprocess.Popen(words)
        except FileNotFoundError:
            raise UserError(f"there is no program {words[0]}: correct LAUNCH=") from None
        RECEIVED.children.append(process)
        early_signal = stop_asked()  # it may have come before the process was in the list
        if early_signal and early_signal != signal.SIGINT:
            process.send_signal(early_signal)
        try:
            code = process.wait()
        finally:
            RECEIVED.children.remove(process)

    if stop_asked():
        raise Stopped(stop_asked())
    return code if code >= 0 else 128 - code


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Start the processes of one machine: `python -m stages.pipeline.launch ddp 8 -m stages ...`.

    Exits with the status of the process that failed first.
    """
    engine, gpus, *command = sys.argv[1:] if argv is None else argv
    forget_variables(keep=("ACCELERATE_USE_CPU",))
    os.environ.setdefault(*SHUTDOWN_TIMEOUT)
    config = Path(__file__).with_name("engines") / f"{engine}.yaml"
    words = ["--config_file", str(config)]
    words += ["--num_processes", gpus, "--num_machines", "1"]
    words += ["--main_process_port", "0"]  # any that is free
    raise SystemExit(accelerate_launch([*words, *command]))


def accelerate_launch(arguments: Sequence[str]) -> int:
    """Call `accelerate launch` with these arguments; return the status, as a shell gives it."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError as error:  # its processes have said what is wrong
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + int(signal.Signals(stopped.sigval))
    return 0


if __name__ == "__main__":
    main()
