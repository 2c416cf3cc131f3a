"""Two processes give the weights that one gives, in every training stage."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stages import base, dpo, normalize, ppo, reward, sft
from stages.system.files import read_lines

ROOT = Path(__file__).parents[1]
ARGUMENTS = """
    --preset tiny --name pair --set base.hidden_size=32 base.num_layers=2
    world.train_posts=96 world.validation_posts=10
    world.train_comparisons=64 world.validation_comparisons=20
    ppo.total_episodes=32 ppo.batch_size=16 memory.microbatch_size=6
""".split()
ADAPTED = [*ARGUMENTS, "lora.rank=4"]
ADAPTED[ADAPTED.index("pair")] = "adapted"
SCRIPT = f"""
from accelerate import PartialState
from stages import dpo, normalize, ppo, reward, sft
for arguments in ({ARGUMENTS!r}, {ADAPTED!r}):
    for stage in (sft, reward, normalize, ppo, dpo):
        stage.main(arguments)
        PartialState().wait_for_everyone()  # as if each stage had a launch of its own
"""
WEIGHTS = ("sft/model", "rm/model", "normalize/model", "ppo/model", "ppo/critic", "dpo/model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same studies, of all weights and of adapters, by one process and by two (gloo)."""
    root = tmp_path_factory.mktemp("processes")
    one, two = root / "one", root / "two"
    with pytest.MonkeyPatch.context() as patch:
        for folder in (one, two):
            folder.mkdir()
            patch.chdir(folder)
            base.main(ARGUMENTS)
            base.main(ADAPTED)
        patch.chdir(one)
        for stage in (sft, reward, normalize, ppo, dpo):
            stage.main(ARGUMENTS)
            stage.main(ADAPTED)
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
    return one / "runs", two / "runs"


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("study", ["pair", "adapted"])
def test_two_processes_learn_the_same_weights_as_one(folders, study, weights):
    path = Path(study, "seed44413", weights, "model.safetensors")
    alone, together = (load_file(folder / path) for folder in folders)
    assert alone.keys() == together.keys()
    worst = max((alone[name] - together[name]).abs().max().item() for name in alone)
    assert worst < 1e-5


@pytest.mark.parametrize("study", ["pair", "adapted"])
def test_training_moved_the_weights_that_are_compared(folders, study):
    folder = folders[1] / study / "seed44413"
    start = load_file(folder / "base/model/model.safetensors")
    for stage in ("sft", "ppo", "dpo"):
        end = load_file(folder / stage / "model/model.safetensors")
        assert any((end[name] - start[name]).abs().max() > 1e-4 for name in start)
        start = end if stage == "sft" else start


@pytest.mark.parametrize("study", ["pair", "adapted"])
def test_two_processes_report_the_same_numbers_as_one(folders, study):
    for stage in ("sft", "rm", "ppo", "dpo"):
        path = Path(study, "seed44413", stage, "metrics.jsonl")
        alone, together = (read_lines(folder / path) for folder in folders)
        for one, two in zip(alone, together, strict=True):
            assert one.keys() == two.keys()
            skipped = {key for key in one if key.startswith("seconds/")}
            if (stage, one["step"]) == ("dpo", 1):  # every reward is 0 but for rounding
                skipped.add("rewards/accuracies")
            for key in one.keys() - skipped:
                assert one[key] == pytest.approx(two[key], abs=1e-3), key
