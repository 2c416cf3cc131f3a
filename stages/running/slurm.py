"""`make slurm`: a job script that stops in time, queues itself again and goes on. Standard library
only.

Slurm sends USR1 to the script some minutes before the time limit (on clusters with
`PreemptParameters=send_user_signal`, before a preemption too). The stage under way then finishes
its update and saves, the job queues itself again, and goes on from there. After a TERM it stops in
the same way, and Slurm decides whether it is queued again: a preempted job is, a cancelled one is
not.
"""

import argparse
import shlex
import sys
from pathlib import Path

from stages.running.launch import add_launch_arguments, check_numbers
from stages.settings import config as settings
from stages.settings.command_line import add_arguments, asked_of, config_of
from stages.settings.config import UserError, fail
from stages.system.files import write_text

GOALS = ("sft", "rm", "ppo")
SECONDS_TO_STOP = 300
SCRIPT = """\
#!/usr/bin/env bash
# Written by `make slurm`. Options of sbatch go before those below: sbatch --partition=... {file}
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={log}
set -u
cd {root} || exit 1
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
export MASTER_ADDR=${{hosts%%$'\\n'*}} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

again=
trap 'again=1; kill -TERM "$work"' USR1
trap 'kill -TERM "$work"' TERM
{command} &
work=$!
wait "$work"
status=$?
# A signal ends `wait`, not the work.
while kill -0 "$work" 2>/dev/null; do
    wait "$work"
    status=$?
done
if [ -n "$again" ] && [ "$status" -ne 0 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def main(argv: list[str] | None = None) -> None:
    """Write the script; print its name and how to submit it."""
    parser = argparse.ArgumentParser(description="write a Slurm job script")
    parser.add_argument("goals", nargs="*", help=f"what the job makes; {' '.join(GOALS)} if empty")
    add_arguments(parser)
    add_launch_arguments(parser)
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    try:
        print(f"wrote {(path := write(parser.parse_args(argv)))}: submit it with `sbatch {path}`")
    except UserError as error:
        fail(error)


def write(args: argparse.Namespace) -> Path:
    """Write the script that makes what a command line asks for; returns where it lies."""
    asked = asked_of(args)
    config = config_of(asked)
    check_numbers(args.gpus, args.nodes, args.engine)
    job = f"{config.name}-seed{config.seed}"
    path = settings.RUNS / "slurm" / f"{job}.sh"
    words = [sys.executable, "-m", "stages.pipeline", *(args.goals or GOALS), *asked.arguments]
    words += ["--gpus", str(args.gpus), "--nodes", str(args.nodes), "--engine", args.engine]
    words += ["--max-cost", args.max_cost] if args.max_cost else []
    path.parent.mkdir(parents=True, exist_ok=True)
    text = SCRIPT.format(
        file=path,
        job=job,
        nodes=args.nodes,
        gpus=args.gpus,
        seconds=SECONDS_TO_STOP,
        log=path.with_name(f"{job}-%j.log"),
        root=shlex.quote(str(Path.cwd())),
        command=shlex.join(words),
    )
    write_text(path, text)
    return path


if __name__ == "__main__":
    main()
