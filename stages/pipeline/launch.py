"""How a stage is started in several processes: GPUS, NODES and ENGINE.

    python -m stages.pipeline.launch ddp 8 1 -m stages.pipeline.start stages.sft:sft --preset tiny

is `accelerate launch` with the configuration `engines/ddp.yaml`, 8 processes on 1 machine. On
several machines `srun` starts it once on each of them, inside a Slurm job. Standard library only
until accelerate is called. The exit status is that of the process that failed first.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.config.checks import UserError, forget_variables, unknown
from stages.config.faults import in_one_line

ENGINES = ("ddp", "fsdp2")
PORT = 29500
# Seconds that a launch leaves its processes to finish an update and to save after a signal.
PATIENCE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1800"}


def launch_words(gpus: int, nodes: int, engine: str) -> tuple[str, ...]:
    """The words before `-m stages.pipeline.start ...` that start a stage; none: this interpreter.

    `gpus` processes on each of `nodes` machines. Raises UserError as `check_numbers` does, and for
    several machines outside a Slurm job that has them.
    """
    check_numbers(gpus, nodes, engine)
    if gpus == nodes == 1:
        return ()
    each = (sys.executable, "-m", "stages.pipeline.launch", engine, str(gpus), str(nodes))
    return each if nodes == 1 else (*_srun(nodes), *each)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say in how many processes a stage runs."""
    parser.add_argument("--gpus", type=int, default=1, help="processes on each machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines of a Slurm job")
    parser.add_argument("--engine", default=ENGINES[0], help="what several processes share")


def check_numbers(gpus: int, nodes: int, engine: str) -> None:
    """Raise UserError for numbers below 1, and for an engine that nobody has seen work."""
    if gpus < 1 or nodes < 1:
        raise UserError(f"GPUS={gpus} NODES={nodes}: give the numbers of cards and machines")
    if engine not in ENGINES:
        raise unknown("ENGINE", engine, ENGINES)


def _srun(nodes: int) -> tuple[str, ...]:
    """Slurm's command that starts one launch on each machine of this job."""
    there = int(os.environ.get("SLURM_JOB_NUM_NODES", "0"))
    if there < nodes:
        where = f"this Slurm job has {there}" if there else "this is no Slurm job"
        raise UserError(f"NODES={nodes}, but {where}: submit a job script (stages/README.md)")
    once_each = f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1".split()
    return "srun", *once_each, "--kill-on-bad-exit=1"


def accelerate_arguments(
    engine: str, gpus: int, nodes: int, environ: Mapping[str, str]
) -> list[str]:
    """The arguments of `accelerate launch` on this machine, one of those that Slurm numbers."""
    config = Path(__file__).with_name("engines") / f"{engine}.yaml"
    words = ["--config_file", str(config), "--num_processes", str(gpus * nodes)]
    words += ["--num_machines", str(nodes)]
    if nodes == 1:
        return [*words, "--main_process_port", "0"]  # any that is free
    words += ["--machine_rank", environ["SLURM_NODEID"]]
    words += ["--main_process_ip", environ["MASTER_ADDR"]]
    return [*words, "--main_process_port", environ.get("MASTER_PORT", str(PORT))]


def hand_on(process: subprocess.Popen[bytes], number: int) -> None:
    """Hand a signal that asks to stop on to what runs a stage. A SIGTERM makes srun kill its tasks
    at once; a SIGUSR1 it sends to them, where `main` waits.
    """
    words: Any = process.args
    process.send_signal(signal.SIGUSR1 if words[0] == "srun" else number)


def stop_at_usr1() -> None:
    """From now on a SIGUSR1 is a SIGTERM to this process, and nothing to those that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # they inherit this

    def wait() -> None:
        signal.sigwait({signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Start the processes; exits with the status of the first that failed."""
    engine, gpus, nodes, *stage = sys.argv[1:] if argv is None else argv
    try:
        arguments = accelerate_arguments(engine, int(gpus), int(nodes), os.environ)
    except KeyError as error:
        raise UserError(f"{error.args[0]} is not set: export it in the job script") from None
    forget_variables(keep=("ACCELERATE_USE_CPU",))
    os.environ.update({name: os.environ.get(name, value) for name, value in PATIENCE.items()})
    stop_at_usr1()
    raise SystemExit(run([*arguments, *stage]))


def run(arguments: Sequence[str]) -> int:
    """`accelerate launch` with these arguments; the exit status, as a shell gives it."""
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
