"""Two processes give the weights that one gives, in every training stage."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stages import base, dpo, normalize, ppo, reward, sft
from stages.runs import read_lines

ROOT = Path(__file__).parents[1]
ARGUMENTS = """
    --preset tiny --name pair --set base.hidden_size=32 base.num_layers=2
    world.train_posts=96 world.validation_posts=10
    world.train_comparisons=64 world.validation_comparisons=20
    ppo.total_episodes=32 ppo.batch_size=16 memory.microbatch_size=6
""".split()
SCRIPT = f"""
from accelerate import PartialState
from stages import dpo, normalize, ppo, reward, sft
for stage in (sft, reward, normalize, ppo, dpo):
    stage.main({ARGUMENTS!r})
    PartialState().wait_for_everyone()  # as if each stage had a launch of its own
"""
WEIGHTS = ("sft/model", "rm/model", "normalize/model", "ppo/model", "ppo/critic", "dpo/model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same study by one process and by two (gloo), from the same base."""
    root = tmp_path_factory.mktemp("processes")
    one, two = root / "one", root / "two"
    with pytest.MonkeyPatch.context() as patch:
        for folder in (one, two):
            folder.mkdir()
            patch.chdir(folder)
            base.main(ARGUMENTS)
        patch.chdir(one)
        for stage in (sft, reward, normalize, ppo, dpo):
            stage.main(ARGUMENTS)
    script = root / "script.py"
    script.write_text(SCRIPT)
    launch = "torch.distributed.run --standalone --nproc_per_node 2".split()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", *launch, str(script)]
    found = subprocess.run(command, cwd=two, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return one / "runs/pair/seed44413", two / "runs/pair/seed44413"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_two_processes_learn_the_same_weights_as_one(folders, weights):
    alone, together = (load_file(folder / weights / "model.safetensors") for folder in folders)
    assert alone.keys() == together.keys()
    worst = max((alone[name] - together[name]).abs().max().item() for name in alone)
    assert worst < 1e-5


def test_training_moved_the_weights_that_are_compared(folders):
    start = load_file(folders[1] / "base/model/model.safetensors")
    for stage in ("sft", "ppo", "dpo"):
        end = load_file(folders[1] / stage / "model/model.safetensors")
        assert any((end[name] - start[name]).abs().max() > 1e-4 for name in start)
        start = end if stage == "sft" else start


def test_two_processes_report_the_same_numbers_as_one(folders):
    for stage in ("sft", "rm", "ppo", "dpo"):
        alone, together = (read_lines(folder / stage / "metrics.jsonl") for folder in folders)
        for one, two in zip(alone, together, strict=True):
            assert one.keys() == two.keys()
            skipped = {key for key in one if key.startswith("seconds/")}
            if (stage, one["step"]) == ("dpo", 1):  # every reward is 0 but for rounding
                skipped.add("rewards/accuracies")
            for key in one.keys() - skipped:
                assert one[key] == pytest.approx(two[key], abs=1e-3), key
