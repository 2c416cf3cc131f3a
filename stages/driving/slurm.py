"""`make slurm`: a job script that stops in time, queues itself again and goes on. Standard library
only.

Slurm sends USR1 to the script some minutes before the time limit (on clusters with
`PreemptParameters=send_user_signal`, before a preemption too). The stage under way then finishes
its update and saves, the job queues itself again, and goes on from there. After a TERM it stops in
the same way, and Slurm decides whether it is queued again: a preempted job is, a cancelled one is
not. With PRESETS the script is an array: each preset and seed is a task, which is queued again by
itself.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.driving.grid import SEEDS, Cell, Execution, study_cells, study_command
from stages.finished import wanted_stages
from stages.running.files import write_text
from stages.running.launch import add_launch_arguments, check_numbers
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import Request, add_arguments, config_of, request_of
from stages.settings.config import slug

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
{array}set -u
cd {root} || exit 1
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
# What wandb has not sent by then stays here: Slurm waits {seconds} s in all.
export WANDB_FINISH_TIMEOUT=${{WANDB_FINISH_TIMEOUT:-60}}
export MASTER_ADDR=${{hosts%%$'\\n'*}} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

again=
trap 'again=1; kill -TERM "$work"' USR1
trap 'kill -TERM "$work"' TERM
{tasks}{command} &
work=$!
wait "$work"
status=$?
# A signal ends `wait`, not the work.
while kill -0 "$work" 2>/dev/null; do
    wait "$work"
    status=$?
done
if [ -n "$again" ] && [ "$status" -ne 0 ]; then
    exec scontrol requeue "{again}"
fi
exit "$status"
"""


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the script; print its name and how to submit it."""
    parser = Parser(description="write a Slurm job script")
    parser.add_argument("goals", nargs="*", help=f"what the job makes; {' '.join(GOALS)} if empty")
    add_arguments(parser)
    add_launch_arguments(parser)
    parser.add_argument("--max-cost", default="", help="the most that a judge may cost, USD")
    parser.add_argument("--presets", nargs="+", help="an array: a task for each of these and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args(argv)
    path = write(args)
    print(f"wrote {path}: submit it with `sbatch {path}`")
    if args.presets:
        request = request_of(args)
        cells = study_cells(request, args.presets, args.seeds)
        command = study_command(request, cells, Execution(max_cost=args.max_cost))
        print(f"when its tasks have ended: `{command}` makes what is left, and the pages")


def write(args: argparse.Namespace) -> Path:
    """Write the script that makes what a command line asks for; returns where it lies."""
    request = request_of(args)
    Execution(max_cost=args.max_cost)  # refuses what is no sum of money
    check_numbers(args.gpus, args.nodes, args.engine)
    if args.presets:
        cells = study_cells(request, args.presets, args.seeds)
        job = f"study-{request.name}" if request.name else "study"
        words = [command_words(args, cell.request) for cell in cells]
        named = array_parts(words, [cell.label for cell in cells])
    else:
        config = config_of(request)
        cells = [Cell(request=request, config=config, goals=())]
        job = f"{config.name}-seed{config.seed}"
        named = {"array": "", "tasks": "", "again": "$SLURM_JOB_ID", "number": "%j"}
        named["command"] = shlex.join(command_words(args, request))
    for cell in cells:  # an unknown goal, or one that has no part in such a run, is refused here
        wanted_stages(cell.config, args.goals or GOALS)
    job = slug(job)  # sbatch splits its lines at white space
    path = settings.RUNS / "slurm" / f"{job}.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = SCRIPT.format(
        file=path,
        job=job,
        nodes=args.nodes,
        gpus=args.gpus,
        seconds=SECONDS_TO_STOP,
        log=path.with_name(f"{job}-{named.pop('number')}.log"),
        root=shlex.quote(str(Path.cwd())),
        **named,
    )
    write_text(path, text)
    return path


def command_words(args: argparse.Namespace, request: Request) -> list[str]:
    """The command line that makes one run."""
    words = [sys.executable, "-m", "stages.pipeline", *(args.goals or GOALS), *request.arguments]
    words += ["--gpus", str(args.gpus), "--nodes", str(args.nodes), "--engine", args.engine]
    return [*words, "--max-cost", args.max_cost] if args.max_cost else words


def array_parts(commands: Sequence[Sequence[str]], labels: Sequence[str]) -> dict[str, str]:
    """The parts of a script in which each command is a task of an array."""
    lines = [
        f"{number}) set -- {shlex.join(words)} ;; # {label}"
        for number, (words, label) in enumerate(zip(commands, labels, strict=True))
    ]
    wrong = '*) echo "error: no cell $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;'
    return {
        "array": f"#SBATCH --array=0-{len(lines) - 1}\n",
        "tasks": "\n".join(["case $SLURM_ARRAY_TASK_ID in", *lines, wrong, "esac\n"]),
        "command": '"$@"',
        "again": "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        "number": "%A_%a",
    }


if __name__ == "__main__":
    main()
