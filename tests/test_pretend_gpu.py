"""Every stage runs on a pretended GPU, which refuses to mix its tensors with those of the CPU.

No GPU is needed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.runs.files import read_json
from tests.lib import pretend_gpu

pytestmark = [
    pytest.mark.walk,
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler (g++)"),
]

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "base.hidden_size=32",
    "base.num_layers=2",
    "world.train_posts=96",
    "world.validation_posts=9",
    "world.train_comparisons=64",
    "world.validation_comparisons=20",
    "eval.best_of=2",
    "ppo.total_episodes=32",
    "ppo.batch_size=16",
    "ppo.critic_updates=1",
    "ppo.samples_per_query=2",
    "rloo.total_episodes=32",
    "rloo.batch_size=16",
    "grpo.total_episodes=32",
    "grpo.batch_size=16",
    "memory.microbatch_size=8",
]
ADAPTERS = ["lora.rank=4", "memory.gradient_checkpointing=true", "memory.frozen_dtype=bf16"]
BF16 = "memory.mixed_precision=bf16"
GRADIENT_AND_MISTAKES = """
import sys, torch
sys.setswitchinterval(5)  # other threads wait: one of backward's would outlive the interpreter
on_gpu = torch.ones(2, device="cuda", requires_grad=True)
(on_gpu * 2).sum().backward()
print(on_gpu.grad.device, on_gpu.grad.tolist(), torch.tensor([1], device="cuda").device)
for mistake in (lambda: on_gpu + torch.ones(2), lambda: on_gpu.detach().numpy()):
    try:
        print("accepted:", mistake())
    except (RuntimeError, TypeError) as error:
        print(error)
"""


@pytest.fixture(scope="module")
def with_gpu(tmp_path_factory):
    """The environment of a process that has the pretended GPU."""
    folder = tmp_path_factory.mktemp("gpu")
    pretend_gpu.prepare(folder)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def make(
    folder: Path, targets: list[str], environment: dict[str, str], settings: Sequence[str] = ()
) -> Path:
    """Run targets in a folder; return the run's folder. `log` has what was printed to stderr."""
    variables = ["PRESET=tiny", "NAME=small", f"SET={' '.join([*SETTINGS, *settings])}"]
    command = [sys.executable, "-m", "stages", *targets, *variables]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    (folder / "log").write_text(process.stderr)
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    return folder / "runs/small/seed44413"


def test_the_pretended_gpu_refuses_what_a_real_one_refuses(with_gpu):
    process = subprocess.run(
        [sys.executable, "-c", GRADIENT_AND_MISTAKES],
        env=with_gpu,
        capture_output=True,
        text=True,
        check=True,
    )
    gradient, sum_error, numpy_error = process.stdout.splitlines()
    assert gradient == "cuda:0 [2.0, 2.0] cuda:0"
    assert sum_error == "pretended GPU: aten::add has tensors of two devices: cuda (2,), cpu (2,)"
    assert numpy_error == "pretended GPU: a tensor on the GPU has no numpy"


def test_the_gpu_learns_the_weights_that_the_cpu_learns(with_gpu, tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    on_gpu = make(tmp_path / "gpu", ["rm"], with_gpu)
    on_cpu = make(tmp_path / "cpu", ["rm"], os.environ | {"PYTHONPATH": str(ROOT)})
    assert read_json(on_gpu / "sft/manifest.json")["device"] == f"1 x {pretend_gpu.NAME}"
    for stage in ("sft", "rm"):
        weights_on_gpu = load_file(on_gpu / stage / "model/model.safetensors")
        weights_on_cpu = load_file(on_cpu / stage / "model/model.safetensors")
        assert weights_on_gpu.keys() == weights_on_cpu.keys()
        for name, weights in weights_on_gpu.items():
            torch.testing.assert_close(weights, weights_on_cpu[name], atol=1e-3, rtol=0)


def test_every_stage_and_the_judge_run_in_bf16_where_four_rows_fit(with_gpu, tmp_path):
    """The settings ask for passes of 8 rows with gradients and of 128 without; a query has up to
    four samples.
    """
    little_memory = with_gpu | {"PRETENDED_ROWS": "4"}
    targets = ["sft", "rm", "ppo", "rloo", "grpo", "dpo", "eval"]

    run = make(tmp_path, targets, little_memory, [BF16])

    assert list(run.glob("report/facts/*.html"))
    memory = "GPU memory: this process 0.0 GiB, others 30.0 GiB, total 80.0 GiB"
    line = f"out of memory: memory.forward_batch_size=4 instead of 8 from here on; {memory}"
    assert line in (tmp_path / "log").read_text()
    halvings = read_json(run / "ppo/manifest.json")["halvings"]
    assert [halving["to"] for halving in halvings] == [64, 32, 16, 8, 4]


def test_adapters_and_settings_that_save_memory_run_on_the_gpu(with_gpu, tmp_path):
    run = make(tmp_path, ["rm", "ppo"], with_gpu, [BF16, *ADAPTERS])
    assert (run / "ppo/manifest.json").exists()


def test_the_tests_that_need_a_gpu_pass_on_the_pretended_one(with_gpu, tmp_path):
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'pytest'}"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(ROOT / "tests/test_gpu.py")],
        cwd=ROOT,
        env={name: value for name, value in with_gpu.items() if name != "CUDA_VISIBLE_DEVICES"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 passed" in process.stdout, process.stdout[-3000:]


def test_make_bench_measures_on_a_gpu_in_bf16(with_gpu, tmp_path):
    (tmp_path / "constraints.txt").write_text("")
    small = "SET=data.max_summary_tokens=4 ppo.num_ppo_epochs=1"

    process = subprocess.run(
        [sys.executable, "-m", "tests.bench", "SHAPES=tiny-xs:4:2", "RUNS=1", small],
        cwd=tmp_path,
        env=with_gpu | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 0, process.stderr[-3000:]
    assert f"Measured on: 1 x {pretend_gpu.NAME}" in " ".join(process.stdout.split())
    assert (tmp_path / "runs/bench/bench.html").exists()
