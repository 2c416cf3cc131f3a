"""Several stages in one process: each finds what a new process would give it."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from stages.__main__ import stage_function
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.stages import STAGES, is_part, stage_row
from stages.pipeline.start import call_stage, is_about_another_process
from stages.runs.machine import peak_memory_gib
from tests.lib.places import ROOT
from tests.lib.resuming import SETTINGS

TINY = make_config("tiny")
SUMMARIES = make_config("outputs", overrides=("outputs.file=summaries.jsonl",))


def run(function, stage="sft"):
    """Run a function as a stage."""
    return call_stage(stage, function, TINY, resume_command="make sft")


@pytest.mark.parametrize("config", [TINY, SUMMARIES], ids=["trained", "outputs"])
def test_the_table_of_stages_names_the_module_of_each_function(config):
    """Otherwise a manifest would record the code of another file."""
    stages = [stage for stage in STAGES if is_part(stage, config.kind)]
    for stage in stages:
        function = stage_function(config, stage)
        if isinstance(function, partial):
            function = function.func
        assert function.__module__ == stage_row(stage, config.kind).module


def test_a_stage_gets_the_config_and_its_result_is_returned():
    assert run(lambda config: config.name) == "tiny"


def test_threads_and_random_numbers_are_as_before_a_stage():
    threads = torch.get_num_threads()
    state = torch.get_rng_state()

    def stage(config):
        torch.set_num_threads(threads + 1)
        torch.manual_seed(5)

    run(stage)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_next_stage_may_choose_another_precision():
    """accelerate refuses a second precision while its first state exists."""

    def in_bf16(config):
        return Accelerator(cpu=True, mixed_precision="bf16").mixed_precision

    def in_float32(config):
        return Accelerator(cpu=True, mixed_precision="no").mixed_precision

    assert run(in_bf16) == "bf16"
    assert not AcceleratorState._shared_state
    assert not PartialState._shared_state
    assert run(in_float32) == "no"


def test_a_stage_that_fails_leaves_no_state_of_accelerate():
    def stage(config):
        Accelerator(cpu=True, mixed_precision="bf16")
        raise UserError("no")

    with pytest.raises(UserError):
        run(stage)
    assert not AcceleratorState._shared_state


def test_the_peak_memory_of_a_stage_is_not_that_of_an_earlier_one():
    def large(config):
        numpy.ones(2**28 // 8).sum()  # 0.25 GiB
        return peak_memory_gib()

    peak = run(large)
    assert run(lambda config: peak_memory_gib()) < peak - 0.2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "/x/y"), "/x/y: No space left on device: free so"),
        (OSError(30, "Read-only file system", "/x"), "/x: Read-only file system: make it writab"),
        (OSError(38, "Function not implemented"), "implemented: put runs/ on a disk that can lock"),
    ],
    ids=["full disk", "read-only disk", "no locks"],
)
def test_an_error_that_a_user_can_fix_names_the_command_that_resumes(error, line):
    def stage(config):
        raise error

    with pytest.raises(UserError) as refused:
        run(stage)
    assert str(refused.value).startswith("stage sft: ")
    assert line in str(refused.value)
    assert str(refused.value).endswith("then run `make sft`")


def test_a_bug_keeps_its_traceback():
    def stage(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(stage)


@pytest.mark.parametrize(
    ("text", "is_another"),
    [
        ("NCCL error in: x.cpp:9, remote process exited or there was a network error", True),
        ("NCCL error in: x.cpp:9, invalid usage\nDuplicate GPU detected", False),
        ("NCCL error in: x.cpp:9, Cuda failure 2 'out of memory'", False),
    ],
    ids=["remote exit", "invalid usage", "out of memory"],
)
def test_an_error_about_another_process_is_recognized(monkeypatch, text, is_another):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_about_another_process(RuntimeError(text)) == is_another


def weights(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all models of a run, by their paths."""
    paths = sorted(folder.glob("runs/resumed/*/*/model/*.safetensors"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def run_targets(folder: Path, *targets: str) -> None:
    """Run some targets in one new process."""
    variables = ["NAME=resumed", f"SET={' '.join(SETTINGS)}"]
    command = [sys.executable, "-m", "stages", *targets, *variables]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


@pytest.mark.walk
def test_stages_in_one_process_learn_what_those_in_several_learn(tmp_path):
    one_process = tmp_path / "one"
    one_process.mkdir()
    several_processes = tmp_path / "several"
    several_processes.mkdir()

    run_targets(one_process, "sft", "rm", "ppo")
    for target in ("data", "sft", "rm", "ppo"):
        run_targets(several_processes, target)

    assert len(weights(one_process)) == 5
    assert weights(one_process) == weights(several_processes)
