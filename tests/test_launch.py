"""GPUS, NODES and ENGINE: what they start, and what is refused in one line."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.config.checks import is_out_of_memory, launched_processes
from stages.config.command_line import Request, make_config
from stages.config.config import UserError
from stages.pipeline import launch
from stages.pipeline.launch import accelerate_arguments, hand_on, launch_words
from stages.pipeline.main import make_goals, parse
from stages.pipeline.maker import Maker
from stages.pipeline.start import is_about_another_process, run_stage
from stages.runs.manifest import make_command
from stages.training import accelerator
from stages.training.accelerator import make_accelerator, started_engine

ROOT = Path(__file__).parents[1]


def test_one_process_needs_no_launcher_and_several_get_accelerates():
    assert launch_words(1, 1, "ddp") == ()
    assert launch_words(8, 1, "fsdp2") == (
        *(sys.executable, "-m", "stages.pipeline.launch"),
        *("fsdp2", "8", "1"),
    )


def test_several_machines_are_reached_by_slurm_and_only_inside_a_job_that_has_them(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    words = launch_words(8, 2, "ddp")
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"} <= set(words)
    assert words[-3:] == ("ddp", "8", "2")
    with pytest.raises(UserError, match="NODES=3, but this Slurm job has 2: submit a job"):
        launch_words(8, 3, "ddp")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES")
    with pytest.raises(UserError, match="NODES=2, but this is no Slurm job"):
        launch_words(8, 2, "ddp")


def test_each_machine_of_a_job_says_which_one_it_is():
    environ = {"SLURM_NODEID": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "20001"}
    words = accelerate_arguments("ddp", 4, 2, environ)
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    assert pairs["--num_processes"] == "8"
    assert pairs["--num_machines"] == "2"
    assert pairs["--machine_rank"] == "1"
    assert (pairs["--main_process_ip"], pairs["--main_process_port"]) == ("node7", "20001")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, 1, "ddp"), "GPUS=0 NODES=1: give the numbers"),
        ((2, 1, "zero3"), "unknown ENGINE 'zero3': choose one of ddp, fsdp2"),
        ((2, 1, "fsdp"), "unknown ENGINE 'fsdp': did you mean fsdp2"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(given, said):
    with pytest.raises(UserError, match=said) as refusal:
        launch_words(*given)
    assert "\n" not in str(refusal.value)


USR1 = """
import os, signal, subprocess, sys, time
from stages.pipeline.launch import stop_at_usr1
stop_at_usr1()
signal.signal(signal.SIGTERM, lambda *_: print("told to stop", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"])
for process in (child.pid, os.getpid()):
    os.kill(process, signal.SIGUSR1)
print(child.wait())
"""


def test_a_launch_below_srun_stops_at_the_signal_that_srun_hands_on():
    """srun(1): a SIGTERM ends it and kills its tasks, so they could not finish their update."""
    handed: list[int] = []
    for words in (["srun", "--nodes=2"], [sys.executable, "-m"]):
        process: Any = SimpleNamespace(args=words, send_signal=handed.append)
        hand_on(process, signal.SIGTERM)
    assert handed == [signal.SIGUSR1, signal.SIGTERM]
    ended = subprocess.run(
        [sys.executable, "-c", USR1], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sorted(ended.stdout.split("\n")) == ["", "0", "told to stop"]


def test_a_stage_that_fails_says_how_it_was_started(monkeypatch, capfd):
    typed = "make sft eval GPUS=8 ENGINE=fsdp2"
    maker = Maker(goes_on_with=typed)
    assert maker.call(["sh", "-c", "echo $GOES_ON_WITH"]) == 0
    assert capfd.readouterr().out == f"{typed}\n"

    def full(config):
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setenv("GOES_ON_WITH", typed)
    with pytest.raises(SystemExit):
        run_stage("sft", full, [], "a stage")
    line = capfd.readouterr().err.strip()
    assert line.endswith(f"then run `{typed}`")


def test_a_judge_that_has_a_cap_goes_on_with_it_and_training_has_none():
    config = make_config("tiny")
    config = config.changed(judge=config.judge.changed(max_cost=12.5))
    assert make_command(config, "judge") == "make eval PRESET=tiny SEED=44413 MAX_COST=12.5"
    assert make_command(config, "ppo") == "make ppo PRESET=tiny SEED=44413"


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
)
def test_an_untested_engine_is_refused(monkeypatch, environ, kind):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"the environment starts {kind}, which is untested"):
        make_accelerator(make_config("tiny"))


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="GPUS=4, but this machine shows 2"):
        make_accelerator(make_config("tiny"))


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
MEETING = {**LAUNCHED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_launch_whose_processes_do_not_meet_ends_in_one_line(monkeypatch):
    for name, value in MEETING.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(accelerator, "MEETING_WAIT", timedelta(seconds=1))
    with pytest.raises(
        UserError, match=r"2 processes did not meet at 127\.0\.0\.1:1 \(MASTER_ADDR"
    ):
        accelerator.meet(on_cpu=True)
    # On a device that accelerate knows no group for.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="2 processes were started, but each of them sees no other"):
        make_accelerator(make_config("tiny"))


@pytest.mark.parametrize(
    ("left", "lacking"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "pod-0"}, "LOCAL_RANK, MASTER_PORT"),
        ({**MEETING, "WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": ""}, "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0"}, None),
        ({}, None),
    ],
)
def test_what_a_pod_has_left_of_a_launch_is_refused_by_every_stage(monkeypatch, left, lacking):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    if lacking is None:
        assert launched_processes() == 1
        return
    with pytest.raises(UserError, match=f"no launcher has set {lacking}: unset them"):
        launched_processes()
    with pytest.raises(SystemExit):
        run_stage("sft", lambda config: pytest.fail("it ran"), ["--preset", "tiny"], "")


# A value of each that would change what is learned, or fail.
OF_ACCELERATE = {
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
    environ = {**os.environ, **OF_ACCELERATE}
    words = [sys.executable, "-c", GRADIENT]
    ended = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.stdout == "[[0.0, 1.0, 2.0]] highest\n", ended.stderr


def test_our_launch_starts_what_was_asked_whatever_is_left_of_another(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "PET_NNODES", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setattr(launch, "stop_at_usr1", lambda: None)
    monkeypatch.setattr(launch, "run", lambda arguments: 0)
    with pytest.raises(SystemExit):
        launch.main(["ddp", "2", "1", "script.py"])
    assert not {"ACCELERATE_USE_FSDP", "PET_NNODES"} & os.environ.keys()
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_an_interpreter_without_the_packages_is_named_before_anything_starts(runs, monkeypatch):
    monkeypatch.setattr("stages.config.faults.find_spec", lambda name: None)
    expected = f"{sys.executable} has no torch: `make install VENV=.venv` brings it"
    with pytest.raises(UserError, match=re.escape(expected)):
        make_goals(Request(preset="tiny"), parse(["sft"]))
    assert make_goals(Request(preset="tiny"), parse(["sft", "--dry-run"])) == 0  # only looks
    assert not runs.exists()


@pytest.mark.parametrize(
    ("text", "another", "memory"),
    [
        ("NCCL error in: x.cpp:9, remote process exited or there was a network error", True, False),
        ("NCCL error in: x.cpp:9, invalid usage\nDuplicate GPU detected", False, False),
        ("NCCL error in: x.cpp:9, Cuda failure 2 'out of memory'", False, True),
        ("CUDA error: out of memory\nCUDA kernel errors might be reported later", False, True),
    ],
)
def test_what_a_card_says_is_told_apart(monkeypatch, text, another, memory):
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = RuntimeError(text)
    assert is_about_another_process(error) == another
    assert is_out_of_memory(error) == memory
