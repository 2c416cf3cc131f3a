"""Two and four processes give the weights that one gives, in every stage, under each engine."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from stages import base, dpo, normalize, ppo, rm, sft
from stages.pipeline.launch import ENGINES
from stages.runs.files import read_lines
from tests.lib.make_stages import make_stages
from tests.lib.processes import launch

pytestmark = pytest.mark.walk

PAIR = """
    --preset tiny --name pair --set base.hidden_size=32 base.num_layers=2
    world.train_posts=96 world.validation_posts=9
    world.train_comparisons=64 world.validation_comparisons=20
    ppo.total_episodes=32 ppo.batch_size=16 ppo.critic_updates=0 ppo.checkpoints=1
    memory.microbatch_size=6 memory.cpu_threads=1
""".split()
"""All weights learn. Of 9 held-out posts one of two processes gets 5 and the other 4."""
ADAPTED = """
    --preset tiny --name adapted --set base.hidden_size=32 base.num_layers=2
    world.train_posts=96 world.validation_posts=1
    world.train_comparisons=64 world.validation_comparisons=20
    ppo.total_episodes=32 ppo.batch_size=16 ppo.critic_updates=1 ppo.checkpoints=0
    memory.microbatch_size=6 memory.cpu_threads=1
    lora.rank=4 memory.gradient_checkpointing=true
""".split()
"""Adapters learn, and only the critic in the first of two updates. One process gets no post."""
RUNS = {"pair": PAIR, "adapted": ADAPTED}
each_run = pytest.mark.parametrize("run", RUNS)
each_engine = pytest.mark.parametrize("engine", ENGINES)

TRAIN = """
from accelerate import PartialState
from stages import dpo, normalize, ppo, rm, sft
from stages.pipeline.start import end_process
from tests.lib.make_stages import run_module
for arguments in {}:
    for stage in (sft, rm, normalize, ppo, dpo):
        run_module(stage, arguments)
        PartialState().wait_for_everyone()  # as if each stage had a launch of its own
end_process()
"""
TRAIN_PPO = """
from stages import ppo
from stages.pipeline.start import end_process
from tests.lib.make_stages import run_module
run_module(ppo, [*{!r}, "memory.save_minutes=0"])
end_process()
"""
# The second process dies when the first update has been saved and the second one is over.
DIE_IN_SECOND_UPDATE = """
import os
from stages.runs.run import Run
log = Run.log
def log_or_die(run, step, **metrics):
    if step == 2 and not run.is_main:
        print("error: the test ends this process", flush=True)
        os._exit(9)
    log(run, step, **metrics)
Run.log = log_or_die
"""
MODELS = ("sft/model", "rm/model", "normalize/model", "ppo/model", "ppo/critic", "dpo/model")


def seed_folder(root: Path, run: str) -> Path:
    return root / "runs" / run / "seed44413"


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory) -> Path:
    """The folder in which one process has trained both runs."""
    root = tmp_path_factory.mktemp("one")
    for arguments in RUNS.values():
        make_stages(root, (base, sft, rm, normalize, ppo, dpo), arguments)
    return root


@pytest.fixture(scope="module")
def by_two_processes(by_one_process, tmp_path_factory) -> Callable[[str], Path]:
    """Trains both runs by two processes, once for each engine that a test asks for."""
    folders: dict[str, Path] = {}

    def train(engine: str) -> Path:
        if engine not in folders:
            root = tmp_path_factory.mktemp(engine)
            for run in RUNS:
                shutil.copytree(
                    seed_folder(by_one_process, run) / "base", seed_folder(root, run) / "base"
                )
            launched = launch(root, engine, TRAIN.format(list(RUNS.values())))
            assert launched.returncode == 0, launched.stderr[-3000:]
            folders[engine] = root
        return folders[engine]

    return train


def largest_difference(one: Path, two: Path) -> float:
    """The largest difference between the weights of two models."""
    first = load_file(one / "model.safetensors")
    second = load_file(two / "model.safetensors")
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@each_engine
@each_run
def test_two_processes_learn_the_same_weights_as_one(by_one_process, by_two_processes, engine, run):
    one = seed_folder(by_one_process, run)
    two = seed_folder(by_two_processes(engine), run)
    for model in MODELS:
        difference = largest_difference(one / model, two / model)
        print(engine, run, model, f"{difference:.1e}")
        assert difference < 1e-5, model


@each_engine
def test_four_processes_learn_the_same_weights_as_one(by_one_process, engine, tmp_path):
    one = seed_folder(by_one_process, "pair")
    four = seed_folder(tmp_path, "pair")
    shutil.copytree(one / "base", four / "base")
    launched = launch(tmp_path, engine, TRAIN.format([PAIR]), processes=4)
    assert launched.returncode == 0, launched.stderr[-3000:]
    for model in (*MODELS, "ppo/model-1"):
        difference = largest_difference(one / model, four / model)
        print(engine, model, f"{difference:.1e}")
        assert difference < 1e-5, model


@each_engine
@each_run
def test_training_moved_the_weights_that_are_compared(by_two_processes, engine, run):
    seed = seed_folder(by_two_processes(engine), run)
    for model, start in (
        ("sft/model", "base/model"),
        ("ppo/model", "sft/model"),
        ("dpo/model", "sft/model"),
    ):
        assert largest_difference(seed / model, seed / start) > 1e-4, model


@each_engine
@each_run
def test_two_processes_report_the_same_numbers_as_one(
    by_one_process, by_two_processes, engine, run
):
    # Rounding decides on which side of 0 a small difference is.
    counts = ("accuracy/train", "rewards/accuracies")
    for stage in ("sft", "rm", "ppo", "dpo"):
        metrics = Path(stage) / "metrics.jsonl"
        of_one = read_lines(seed_folder(by_one_process, run) / metrics)
        of_two = read_lines(seed_folder(by_two_processes(engine), run) / metrics)
        for one, two in zip(of_one, of_two, strict=True):
            assert one.keys() == two.keys()
            for key in one:
                if not key.startswith("seconds/") and key not in counts:
                    assert one[key] == pytest.approx(two[key], rel=1e-5, abs=1e-3), key


@pytest.mark.parametrize(
    ("auto_class", "model", "architecture"),
    [
        (AutoModelForCausalLM, "model", "GPTNeoXForCausalLM"),
        (AutoModelForTokenClassification, "critic", "GPTNeoXForTokenClassification"),
    ],
)
def test_what_was_sharded_is_saved_as_plain_models(
    by_two_processes, auto_class, model, architecture
):
    folder = seed_folder(by_two_processes("fsdp2"), "adapted") / "ppo" / model
    loaded, info = auto_class.from_pretrained(folder, output_loading_info=True)
    assert type(loaded).__name__ == architecture
    assert loaded.config.architectures == [architecture]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@each_run
def test_a_sharded_run_whose_process_died_resumes_to_the_same_bits(by_two_processes, tmp_path, run):
    uninterrupted = seed_folder(by_two_processes("fsdp2"), run)
    seed = seed_folder(tmp_path, run)
    for stage in ("base", "sft", "rm", "normalize"):
        shutil.copytree(uninterrupted / stage, seed / stage)
    train_ppo = TRAIN_PPO.format(RUNS[run])

    died = launch(tmp_path, "fsdp2", DIE_IN_SECOND_UPDATE + train_ppo)
    assert died.returncode in (9, 2)  # the other ends with 2, which may be seen first
    assert "error: the test ends this process" in died.stdout
    assert not (seed / "ppo").exists()

    other_engine = launch(tmp_path, "ddp", train_ppo)
    assert other_engine.returncode == 2
    assert "was saved with GPUS=2 ENGINE=fsdp2: resume in the same way" in other_engine.stderr

    resumed = launch(tmp_path, "fsdp2", train_ppo)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "ppo resumes after update 1" in resumed.stderr
    for model in ("ppo/model", "ppo/critic"):
        assert largest_difference(uninterrupted / model, seed / model) == 0.0
