"""Two and four processes give the weights that one gives, in every training stage, under each
engine.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from stages import base, dpo, normalize, ppo, rm, sft
from stages.driving.start import run_module
from stages.running.files import read_lines
from stages.running.launch import ENGINES

pytestmark = pytest.mark.walk

ROOT = Path(__file__).parents[2]
# Of 9 held-out posts one process gets 5 and the other 4, of a single one it gets none.
ARGUMENTS = """
    --preset tiny --name pair --set base.hidden_size=32 base.num_layers=2
    world.train_posts=96 world.validation_posts=9
    world.train_comparisons=64 world.validation_comparisons=20
    ppo.total_episodes=32 ppo.batch_size=16 ppo.critic_updates=0 ppo.checkpoints=1
    memory.microbatch_size=6 memory.cpu_threads=1
""".split()
# In the first of its two updates the critic learns alone: of one policy no other is kept.
ADAPTED = [*ARGUMENTS, "lora.rank=4", "memory.gradient_checkpointing=true", "ppo.critic_updates=1"]
ADAPTED[ADAPTED.index("pair")] = "adapted"
ADAPTED[ADAPTED.index("ppo.checkpoints=1")] = "ppo.checkpoints=0"
ADAPTED[ADAPTED.index("world.validation_posts=9")] = "world.validation_posts=1"
TRAIN = """
from accelerate import PartialState
from stages.driving.start import end_process, run_module
from stages import rm
from stages import dpo, normalize, ppo, sft
for arguments in {}:
    for stage in (sft, rm, normalize, ppo, dpo):
        run_module(stage, arguments)
        PartialState().wait_for_everyone()  # as if each stage had a launch of its own
end_process()
"""
SCRIPT, WHOLE_SCRIPT = (TRAIN.format(studies) for studies in ([ARGUMENTS, ADAPTED], [ARGUMENTS]))
BASE = Path("runs/pair/seed44413/base")
GOING_ON = """
from stages import ppo
from stages.driving.start import end_process, run_module
run_module(ppo, [*{!r}, "memory.save_minutes=0"])
end_process()
"""
# The second process dies when the first update is saved and the second one is over.
DYING = (
    """
import os
from stages.runs import Run
log = Run.log
def log_or_die(run, step, **metrics):
    if step == 2 and not run.main:
        print("error: as a test wants it", flush=True)
        os._exit(9)
    log(run, step, **metrics)
Run.log = log_or_die
"""
    + GOING_ON
)
WEIGHTS = ("sft/model", "rm/model", "normalize/model", "ppo/model", "ppo/critic", "dpo/model")


each_engine = pytest.mark.parametrize("engine", ENGINES)


def launch(
    folder: Path, engine: str, code: str, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run code in some processes (gloo), as GPUS=2 starts two."""
    script = folder / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    words = [
        sys.executable,
        "-m",
        "stages.running.launch",
        engine,
        str(processes),
        "1",
        str(script),
    ]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Studies of all weights and of adapters, by one process."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for arguments in (ARGUMENTS, ADAPTED):
            for stage in (base, sft, rm, normalize, ppo, dpo):
                run_module(stage, arguments)
    return root


@pytest.fixture(scope="module")
def together(alone, tmp_path_factory):
    """The same by two processes, under each engine that a test asks for."""
    made: dict[str, Path] = {}

    def make(engine: str) -> Path:
        if engine not in made:
            root = made[engine] = tmp_path_factory.mktemp(engine)
            for study in ("pair", "adapted"):
                data = Path("runs", study, "seed44413", "base")
                shutil.copytree(alone / data, root / data)
            found = launch(root, engine, SCRIPT)
            assert found.returncode == 0, found.stderr[-3000:]
        return made[engine]

    return make


def worst(one: Path, two: Path) -> float:
    """The largest difference of two files of weights."""
    first, second = load_file(one), load_file(two)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@each_engine
@pytest.mark.parametrize("study", ["pair", "adapted"])
def test_two_processes_learn_the_same_weights_as_one(alone, together, engine, study):
    for weights in WEIGHTS:
        path = Path("runs", study, "seed44413", weights, "model.safetensors")
        difference = worst(alone / path, together(engine) / path)
        print(engine, study, weights, f"{difference:.1e}")
        assert difference < 1e-5, weights


@each_engine
def test_four_processes_learn_the_same_weights_as_one(alone, engine, tmp_path):
    shutil.copytree(alone / BASE, tmp_path / BASE)
    found = launch(tmp_path, engine, WHOLE_SCRIPT, processes=4)
    assert found.returncode == 0, found.stderr[-3000:]
    for weights in (*WEIGHTS, "ppo/model-1"):
        path = BASE.parent / weights / "model.safetensors"
        difference = worst(alone / path, tmp_path / path)
        print(engine, weights, f"{difference:.1e}")
        assert difference < 1e-5, weights


@each_engine
@pytest.mark.parametrize("study", ["pair", "adapted"])
def test_training_moved_the_weights_that_are_compared(together, engine, study):
    folder = together(engine) / "runs" / study / "seed44413"
    start = load_file(folder / "base/model/model.safetensors")
    for stage in ("sft", "ppo", "dpo"):
        end = load_file(folder / stage / "model/model.safetensors")
        assert any((end[name] - start[name]).abs().max() > 1e-4 for name in start)
        start = end if stage == "sft" else start


@each_engine
@pytest.mark.parametrize("study", ["pair", "adapted"])
def test_two_processes_report_the_same_numbers_as_one(alone, together, engine, study):
    for stage in ("sft", "rm", "ppo", "dpo"):
        path = Path("runs", study, "seed44413", stage, "metrics.jsonl")
        for one, two in zip(
            read_lines(alone / path), read_lines(together(engine) / path), strict=True
        ):
            assert one.keys() == two.keys()
            # Rounding decides on which side of 0 a small difference is.
            counts = ("accuracy/train", "rewards/accuracies")
            skipped = {key for key in one if key.startswith("seconds/") or key in counts}
            for key in one.keys() - skipped:
                assert one[key] == pytest.approx(two[key], abs=1e-3), key


def test_what_was_sharded_is_saved_as_plain_models(together):
    folder = together("fsdp2") / "runs/adapted/seed44413/ppo"
    for kind, part, name in (
        (AutoModelForCausalLM, "model", "GPTNeoXForCausalLM"),
        (AutoModelForTokenClassification, "critic", "GPTNeoXForTokenClassification"),
    ):
        model, info = kind.from_pretrained(folder / part, output_loading_info=True)
        assert type(model).__name__ == name
        assert model.config.architectures == [name]
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]


@pytest.mark.parametrize(("study", "arguments"), [("pair", ARGUMENTS), ("adapted", ADAPTED)])
def test_a_sharded_run_whose_process_died_goes_on_to_the_same_bits(
    together, tmp_path, study, arguments
):
    whole = together("fsdp2") / "runs" / study / "seed44413"
    seed = tmp_path / "runs" / study / "seed44413"
    for stage in ("base", "sft", "rm", "normalize"):
        shutil.copytree(whole / stage, seed / stage)
    died = launch(tmp_path, "fsdp2", DYING.format(arguments))
    assert died.returncode in (9, 2)  # the other ends with 2, which may be seen first
    assert "error: as a test wants it" in died.stdout
    assert not (seed / "ppo").exists()
    other = launch(tmp_path, "ddp", GOING_ON.format(arguments))
    assert other.returncode == 2
    assert "was saved with GPUS=2 ENGINE=fsdp2: go on with it" in other.stderr
    found = launch(tmp_path, "fsdp2", GOING_ON.format(arguments))
    assert found.returncode == 0, found.stderr[-3000:]
    assert "ppo goes on after update 1" in found.stderr
    for network in ("model", "critic"):
        path = Path("ppo", network, "model.safetensors")
        assert worst(whole / path, seed / path) == 0.0
