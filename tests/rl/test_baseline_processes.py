"""PPO's baseline and the range of its values are those of all processes' episodes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stages import base, normalize, ppo, rm, sft
from stages.runs.files import read_lines
from tests.lib.make_stages import make_stages, run_module

pytestmark = pytest.mark.walk

ROOT = Path(__file__).parents[2]
SETTINGS = """
    base.hidden_size=32 base.num_layers=2 world.train_posts=96 world.validation_posts=9
    world.train_comparisons=64 world.validation_comparisons=20
    ppo.total_episodes=32 ppo.batch_size=16 ppo.critic_updates=0 ppo.checkpoints=0
    memory.microbatch_size=6 memory.cpu_threads=1
""".split()
BEFORE_PPO = ["--preset", "tiny", "--name", "before", "--set", *SETTINGS]
VARIANTS = {
    "mean": ["ppo.baseline=mean"],
    "gated": ["ppo.baseline=gated"],
    "bounded": ["ppo.bound_values=true", "ppo.lam_value=1", "ppo.lam_length_alpha=0.4"],
    "shaped": ["ppo.score_shaping=preference", "ppo.bound_values=true"],
}
BASELINES = ("mean", "gated")
PPO_IN_EACH_PROCESS = """
from accelerate import PartialState
from stages import ppo
from stages.pipeline.start import end_process
from tests.lib.make_stages import run_module
for arguments in {!r}:
    run_module(ppo, arguments)
    PartialState().wait_for_everyone()
end_process()
"""


def arguments_for(variant: str) -> list[str]:
    """A run, named like its variant, that takes all before PPO from the run `before`."""
    names = ["--preset", "tiny", "--name", variant, "--upstream", "before"]
    return [*names, "--set", *SETTINGS, *VARIANTS[variant]]


def run_ppo_in_two_processes(folder: Path) -> None:
    """Run each variant of PPO in two processes on the CPU, as GPUS=2 starts them."""
    script = folder / "script.py"
    script.write_text(PPO_IN_EACH_PROCESS.format([arguments_for(name) for name in VARIANTS]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    launch = [sys.executable, "-m", "stages.pipeline.launch", "ddp", "2"]
    done = subprocess.run(
        [*launch, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with PPO's runs: those of one process, and those of two."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    make_stages(one, (base, sft, rm, normalize), BEFORE_PPO)
    shutil.copytree(one / "runs", two / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(one)
        for variant in VARIANTS:
            run_module(ppo, arguments_for(variant))
    run_ppo_in_two_processes(two)
    return one, two


@pytest.mark.parametrize("baseline", BASELINES)
def test_two_processes_learn_from_the_mean_return_of_all_episodes(folders, baseline):
    one, two = (folder / "runs" / baseline / "seed44413" / "ppo" for folder in folders)

    metrics = read_lines(one / "metrics.jsonl")
    # With the gate, the untrained critic does not pass it, so both runs learn from the mean.
    # Without a critic there is nothing to say about its use.
    critic_used = {"mean": None, "gated": 0.0}[baseline]
    assert [row.get("policy/critic_used") for row in metrics] == [critic_used] * 2
    for row, expected in zip(read_lines(two / "metrics.jsonl"), metrics, strict=True):
        assert row.keys() == expected.keys()
        for key in {"val/advantage_variance_mean", "loss/policy_avg"} & expected.keys():
            assert row[key] == pytest.approx(expected[key], abs=1e-4), key

    weights = load_file(one / "model" / "model.safetensors")
    weights_of_two = load_file(two / "model" / "model.safetensors")
    for name, weight in weights.items():
        assert (weights_of_two[name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize("variant", ["bounded", "shaped"])
def test_two_processes_bound_values_and_shape_scores_as_one_does(folders, variant):
    one, two = (folder / "runs" / variant / "seed44413" / "ppo" for folder in folders)

    metrics = read_lines(one / "metrics.jsonl")
    keys = ["val/value_low", "val/value_high", "objective/scores", "loss/value_avg"]
    if variant == "shaped":
        keys += ["objective/shaped_scores", "objective/reference_scores"]
    for row, expected in zip(read_lines(two / "metrics.jsonl"), metrics, strict=True):
        for key in keys:
            assert row[key] == pytest.approx(expected[key], abs=1e-4), key

    weights = load_file(one / "critic" / "model.safetensors")
    weights_of_two = load_file(two / "critic" / "model.safetensors")
    for name, weight in weights.items():
        assert (weights_of_two[name] - weight).abs().max() < 1e-4, name
