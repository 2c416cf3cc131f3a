"""`make slurm`: the script it writes, and its body run here on two "machines", with a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stages import base, sft
from stages.driving import slurm
from stages.running.files import read_lines

ROOT = Path(__file__).parents[1]
ARGUMENTS = """
    --preset tiny --name job --set base.hidden_size=32 base.num_layers=2 sft.epochs=2
    memory.cpu_threads=1
    world.train_posts=160 world.validation_posts=4 world.train_comparisons=8
    world.validation_comparisons=4 sft.batch_size=8
""".split()
# What the cluster would supply, on one machine that plays two. srun kills its tasks at a SIGTERM,
# and hands other signals on.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
trap 'kill -KILL $first $second 2>/dev/null' TERM
trap 'kill -USR1 $first $second 2>/dev/null' USR1
worst=0
for one in $first $second; do
    while :; do wait $one; status=$?; kill -0 $one 2>/dev/null || break; done
    (( status > worst )) && worst=$status
done
exit $worst
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$HERE/asked"; fi
"""


@pytest.fixture
def job(tmp_path, monkeypatch) -> Path:
    """A job script for two machines of one device, in a folder whose base stage is done."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        tool = tmp_path / "tools" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)
    slurm.main(["sft", *ARGUMENTS[:4], "--nodes", "2", *ARGUMENTS[4:]])
    return tmp_path / "runs/slurm/job-seed44413.sh"


def start(job: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PATH": f"{job.parents[2] / 'tools'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "HERE": str(job.parents[2]),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }
    return subprocess.Popen(
        ["bash", str(job)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_script_asks_slurm_for_a_signal_in_time_and_for_the_same_job_again(job):
    lines = job.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--gpus-per-node=1", "--requeue", "--ntasks-per-node=1"} <= set(asked)
    assert f"--signal=B:USR1@{slurm.SECONDS_TO_STOP}" in asked
    (command,) = [line for line in lines if line.endswith(" &")]
    assert command.startswith(f"{sys.executable} -m stages.pipeline sft --preset tiny")
    assert "--gpus 1 --nodes 2 --engine ddp" in command
    assert subprocess.run(["bash", "-n", str(job)]).returncode == 0


@pytest.mark.parametrize(("given", "seconds"), [({}, "60"), ({"WANDB_FINISH_TIMEOUT": "9"}, "9")])
def test_a_job_waits_less_for_wandb_than_slurm_waits_for_the_job(job, given, seconds):
    assert int(seconds) < slurm.SECONDS_TO_STOP
    (line,) = [line for line in job.read_text().splitlines() if "WANDB_FINISH" in line]
    printed = subprocess.run(
        ["bash", "-c", f"{line}; printenv WANDB_FINISH_TIMEOUT"],
        env={"PATH": os.environ["PATH"]} | given,
        capture_output=True,
        text=True,
    )
    assert printed.stdout.strip() == seconds


def test_a_job_that_cannot_run_is_refused_before_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options in (["--engine", "zero3"], ["--nodes", "0"], ["--preset", "tinny"]):
        with pytest.raises(SystemExit):
            slurm.main(options)
        assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [[], ["--presets", "tiny-xs"]])
def test_a_run_whose_name_has_spaces_has_a_job_without(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    slurm.main(["sft", "--name", "my run %j", *more])
    (path,) = (tmp_path / "runs/slurm").iterdir()
    asked = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert [line for line in asked if len(line.split()) > 2] == []
    assert f"#SBATCH --job-name={path.stem}" in asked
    assert "my run %j'" in path.read_text()  # the run itself keeps its name


@pytest.mark.walk
def test_a_job_that_is_told_to_stop_is_queued_again_and_goes_on_to_the_same_weights(job, tmp_path):
    base.main(ARGUMENTS)
    seed = tmp_path / "runs/job/seed44413"
    first = start(job)
    metrics = seed / "sft.partial/metrics.jsonl"
    limit = time.monotonic() + 900
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.1)
    first.send_signal(signal.SIGUSR1)
    said = first.communicate(timeout=900)[1]
    assert first.returncode == 0, said
    assert "stopped by SIGTERM" in said
    assert (tmp_path / "asked").read_text().split() == ["requeue", str(os.getpid())]
    assert not (seed / "sft").exists()

    again = start(job)
    said = again.communicate(timeout=900)[1]
    assert again.returncode == 0, said
    assert "sft goes on after update" in said
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    assert [row["step"] for row in read_lines(seed / "sft/metrics.jsonl")] == list(range(41))

    (seed / "sft").rename(seed / "together")
    sft.main(ARGUMENTS)
    alone, together = (
        load_file(seed / name / "model/model.safetensors") for name in ("sft", "together")
    )
    assert max((alone[one] - together[one]).abs().max().item() for one in alone) < 1e-5
