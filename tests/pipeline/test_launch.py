"""GPUS, ENGINE and LAUNCH start a stage in several processes, or are refused in one line."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from stages.config.command_line import make_config
from stages.config.environment import launched_processes
from stages.config.errors import UserError
from stages.pipeline import launch
from stages.pipeline.launch import launcher_words, run_launcher
from stages.pipeline.start import call_stage
from stages.runs.signals import Stopped, forget_signals, signals_handled
from stages.training import accelerator
from stages.training.accelerator import make_accelerator, started_engine
from tests.lib.places import ROOT
from tests.lib.resuming import SETTINGS

TINY = make_config("tiny")

# -- the words that start a stage ------------------------------------------------------------------


def test_one_process_needs_no_launcher():
    assert launcher_words(gpus=1, engine="", launch="") == []
    assert launcher_words(gpus=1, engine="ddp", launch="") == []


def test_several_gpus_are_started_by_accelerate():
    words = launcher_words(gpus=8, engine="fsdp2", launch="")
    assert words == [sys.executable, "-m", "stages.pipeline.launch", "fsdp2", "8"]
    assert launcher_words(gpus=8, engine="", launch="")[-2:] == ["ddp", "8"]


def test_a_launcher_of_your_own_is_used_as_it_is():
    text = "srun --kill-on-bad-exit=1 accelerate launch --machine_rank '$SLURM_NODEID'"
    assert launcher_words(gpus=1, engine="", launch=text) == [
        "srun",
        "--kill-on-bad-exit=1",
        "accelerate",
        "launch",
        "--machine_rank",
        "$SLURM_NODEID",
    ]


@pytest.mark.parametrize(
    ("gpus", "engine", "launch_text", "error"),
    [
        (0, "ddp", "", "GPUS=0 is below 1: give the number of GPUs"),
        (2, "zero3", "", "unknown ENGINE 'zero3': choose one of ddp, fsdp2"),
        (2, "fsdp", "", "unknown ENGINE 'fsdp': did you mean fsdp2"),
        (2, "ddp", "torchrun", "LAUNCH already sets the number of processes"),
        (1, "", "srun 'x", "close the quotation marks"),
        (1, "ddp", "srun x", "LAUNCH already chooses the engine: leave out ENGINE="),
        (1, "fsdp2", "", "ENGINE=fsdp2 shares the weights among several processes: add GPUS="),
    ],
)
def test_what_cannot_be_started_is_refused(gpus, engine, launch_text, error):
    with pytest.raises(UserError, match=error):
        launcher_words(gpus, engine, launch_text)


# -- launched processes ----------------------------------------------------------------------------


@pytest.fixture
def signals():
    """Signals are handled as in a command, and forgotten afterwards."""
    with signals_handled(""):
        yield
    forget_signals()


def test_the_status_of_a_launcher_is_returned():
    assert run_launcher(["sh", "-c", "exit 9"]) == 9
    assert run_launcher(["sh", "-c", "kill -9 $$"]) == 128 + signal.SIGKILL


def test_a_launcher_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="no program no-such-launcher: correct LAUNCH="):
        run_launcher(["no-such-launcher"])


def test_a_sigterm_is_passed_on_to_the_launcher_which_may_finish(signals, tmp_path):
    """The child signals the command, as a cluster would, and leaves a note of what it gets."""
    note = tmp_path / "note"
    script = f"trap 'echo got TERM > {note}; exit 0' TERM; kill -TERM $PPID; sleep 20 & wait"
    started = time.monotonic()

    with pytest.raises(Stopped) as stopped:
        run_launcher(["sh", "-c", script])

    assert stopped.value.number == signal.SIGTERM
    assert note.read_text() == "got TERM\n"
    assert time.monotonic() - started < 15


def test_variables_of_an_earlier_launch_are_cleared(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "PET_NNODES", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "true")
    only_cpu_is_set = 'test "$ACCELERATE_USE_FSDP$PET_NNODES $ACCELERATE_USE_CPU" = " true"'
    assert run_launcher(["sh", "-c", only_cpu_is_set]) == 0


def test_our_launch_leaves_time_to_save(monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")  # so that it is restored
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    monkeypatch.setattr(launch, "accelerate_launch", calls.append)

    with pytest.raises(SystemExit):
        launch.main(["ddp", "2", "-m", "stages"])

    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "1800"
    (words,) = calls
    assert words[words.index("--num_processes") + 1] == "2"
    assert words[-2:] == ["-m", "stages"]


def train_sft(folder: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    """Train the SFT stage of a run called `two` on the CPU, with these make variables."""
    return subprocess.run(
        [sys.executable, "-m", "stages", "sft", "NAME=two", *variables],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


ACCELERATE_LAUNCH = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--cpu",
    "--num_processes",
    "2",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]


@pytest.mark.walk
@pytest.mark.parametrize(
    "launch_variable",
    ["GPUS=2", f"LAUNCH={' '.join(ACCELERATE_LAUNCH)}"],
    ids=["GPUS", "LAUNCH"],
)
def test_a_launched_stage_is_trained_in_two_processes(tmp_path, launch_variable):
    done = train_sft(tmp_path, f"SET={' '.join(SETTINGS)}", launch_variable)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/two/seed44413/sft/manifest.json").exists()
    assert done.stderr.count("sft: done in") == 1


@pytest.mark.walk
def test_a_launched_stage_that_fails_ends_the_command_with_its_line_and_status(tmp_path):
    too_large = " ".join([*SETTINGS, "sft.batch_size=97"])
    done = train_sft(tmp_path, f"SET={too_large}", "GPUS=1", f"LAUNCH={sys.executable}")
    assert done.returncode == 2
    assert "sft.batch_size is 97" in done.stderr
    assert "Traceback" not in done.stderr


# -- the environment of a launched process ---------------------------------------------------------


def test_the_engine_is_what_accelerate_tells_its_processes(monkeypatch):
    assert started_engine() == "ddp"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert started_engine() == "fsdp2"


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1"),
        (
            {"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            "FSDP with offloaded weights",
        ),
    ],
    ids=["DeepSpeed", "FSDP 1", "offloading"],
)
def test_an_untested_engine_is_refused(monkeypatch, environ, kind):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"the environment asks for {kind}, which is untested"):
        make_accelerator(TINY)


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="GPUS=4, but this machine shows 2"):
        make_accelerator(TINY)


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def second_of_two(monkeypatch):
    """The environment of the second of two launched processes; the first one does not exist."""
    set_variables(monkeypatch, LAUNCHED)


def set_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_processes_that_do_not_meet_end_in_one_line(second_of_two, monkeypatch):
    monkeypatch.setattr(accelerator, "MEETING_WAIT", timedelta(seconds=1))
    line = r"2 processes did not meet at 127\.0\.0\.1:1 \(MASTER_ADDR"
    with pytest.raises(UserError, match=line):
        accelerator.meet(on_cpu=True)


def test_processes_on_a_device_without_a_group_end_in_one_line(second_of_two, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="2 processes were started, but they do not see each other"):
        make_accelerator(TINY)


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}, "LOCAL_RANK, MASTER_PORT"),
        ({**LAUNCHED, "WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": ""}, "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    ],
    ids=["two missing", "no number", "all empty"],
)
def test_an_incomplete_launch_is_refused_before_the_stage_runs(monkeypatch, variables, missing):
    set_variables(monkeypatch, variables)
    with pytest.raises(UserError, match=f"no launcher has set {missing}: unset the former"):
        launched_processes()
    with pytest.raises(UserError):
        call_stage("sft", lambda config: pytest.fail("it ran"), TINY, "make sft")


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0"}, {}],
    ids=["a pod of one process", "no launch"],
)
def test_a_single_process_needs_no_launch(monkeypatch, variables):
    set_variables(monkeypatch, variables)
    assert launched_processes() == 1


# A value of each that would change what is learned, or fail.
HARMFUL_VARIABLES = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "16",
    "ACCELERATE_DYNAMO_BACKEND": "aot_eager",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
}
GRADIENT = """
import torch
from stages.training.accelerator import make_accelerator, prepare
from stages.config.command_line import make_config

accelerator = make_accelerator(make_config("tiny"))
weights = torch.nn.Linear(3, 1)
network, _ = prepare(accelerator, weights, torch.optim.SGD(weights.parameters()))
accelerator.backward(network(torch.arange(3.0)).sum())
print(weights.weight.grad.tolist(), torch.get_float32_matmul_precision())
"""


def test_what_accelerate_and_torch_read_from_the_environment_changes_no_gradient():
    done = subprocess.run(
        [sys.executable, "-c", GRADIENT],
        cwd=ROOT,
        env={**os.environ, **HARMFUL_VARIABLES},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[[0.0, 1.0, 2.0]] highest\n", done.stderr
