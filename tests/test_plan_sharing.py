"""The plan where several cards share the weights, and beside what stages hold."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reports.needs.inputs import draw_weights
from reports.needs.memory import saved_activations, setting_of
from reports.needs.plan import lines_of, parse, part_bytes
from reports.needs.shapes import PUBLISHED
from stages.config.command_line import make_config
from tests.lib.plan_settings import setting

ROOT = Path(__file__).parents[1]
# On a CPU the matrix library keeps packed copies of what it multiplies: 10 to 20 MiB were measured
# at the shapes of Pythia-14m and -70m.
CPU_SCRATCH = 12 * 2**20


def test_cards_that_share_the_weights_hold_their_part_and_what_is_whole_for_a_moment_by_hand():
    hidden, vocabulary, blocks = 4096, 50432, 32
    block = 12 * hidden**2 + 13 * hidden  # four matrices, their biases, two norms
    policy = blocks * block + 2 * vocabulary * hidden + 2 * hidden
    scorer = blocks * block + vocabulary * hidden + 2 * hidden + hidden + 1
    eight = replace(setting("pythia-6.9b", devices=8), sharded=True)
    held = part_bytes(eight)["ppo learn"]
    assert held.weights == pytest.approx(4 * 2 * (policy + scorer) / 8, rel=1e-9)
    assert held.gradients == pytest.approx(4 * (policy + scorer) / 8, rel=1e-9)
    assert held.optimizer == pytest.approx(8 * (policy + scorer) / 8, rel=1e-9)
    # Two blocks, embedding and output layer are whole, with their gradients.
    whole = 4 * (policy - (blocks - 2) * block)
    assert held.copies == pytest.approx(2 * whole, rel=0.01)
    # For sampling the policy is whole in every process, beside its bf16 copies.
    held = part_bytes(eight)["ppo rollout"]
    copies = 2 * (blocks * 12 * hidden**2 + vocabulary * hidden)
    assert held.copies == pytest.approx(4 * policy + copies, rel=1e-9)
    # Stages that only measure are not sharded.
    assert part_bytes(eight)["summaries"].weights == 4 * (policy + scorer)


def test_the_samples_of_a_query_are_counted_in_one_row_by_hand():
    """The plan of SmolLM2's PPO was 2.2 times what an H200 held: a query counted with each sample.

    Two queries of 512 tokens with four samples of 53.
    """
    alone = setting("pythia-1b", microbatch_size=8)
    config = alone.config.changed(ppo=alone.config.ppo.changed(samples_per_query=4))
    four = replace(alone, config=config)
    shared = part_bytes(four)["ppo learn"].activations
    assert shared == saved_activations(four, 2, 512 + 4 * 53)


def test_one_card_shares_with_nobody():
    alone = setting("pythia-1b")
    assert part_bytes(replace(alone, sharded=True)) == part_bytes(alone)


def test_the_cards_of_a_preset_and_the_engine_are_those_it_is_made_for():
    lines = "\n".join(lines_of(parse(["--preset", "pythia-6.9b", "--engine", "ddp"])))
    assert "ENGINE=fsdp2 shares the weights" in lines
    lines = "\n".join(lines_of(parse(["--preset", "pythia-6.9b"])))
    assert "8 x h100-80gb, ENGINE=fsdp2" in lines
    assert "everything fits" in lines


def test_normalize_holds_the_reward_model_alone_and_its_rows():
    alone = setting(forward_batch_size=64)
    held = part_bytes(alone)["normalize"]
    assert (held.weights, held.optimizer) == (4 * 908_761_089, 0)
    config = alone.config.changed(normalize=alone.config.normalize.changed(posts=32))
    assert part_bytes(replace(alone, config=config))["normalize"].activations < held.activations


STEP = """
import sys
from accelerate import Accelerator
import torch
from stages import sft
from stages.training.memory import MemoryBudget
from stages.training.supervised import begin_supervised
from stages.models.loading import load_policy
from stages.models.policy import PolicyModel
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.runs.run import Run
from stages.config.command_line import make_config
from tests.bench import meter as meters
config = make_config("pythia-70m", name="measured", overrides=tuple(sys.argv[2:]))
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
meter = meters.Meter(accelerator.device)
meters.keep_freed_memory = lambda: None  # what is freed leaves: the plan is of what is in use
rows = config.memory.microbatch_size
columns = {"queries": [[1] * 509] * 2 * rows, "summaries": [[1] * 53] * 2 * rows}
split = TokenizedSplit(
    columns={name: make_ragged(tokens) for name, tokens in columns.items()},
    rows=[{"id": str(row)} for row in range(2 * rows)],
)
run = Run(config, "sft")
state = begin_supervised(
    run,
    accelerator,
    MemoryBudget.from_settings(config.memory),
    network=PolicyModel(load_policy(sys.argv[1])),
    settings=config.sft,
    rows=128,
)
sft.take_step(state, split, [0])  # the moments come to be
_, _, peak = meter.measure(lambda: sft.take_step(state, split, list(range(2 * rows))))
print(peak)
"""


@pytest.mark.walk
def test_the_plan_is_within_15_percent_of_a_measured_training_step(tmp_path):
    small = PUBLISHED["pythia-14m"]
    shape = replace(small, vocabulary=4096, hidden=256, layers=4, intermediate=1024)
    draw_weights(shape, 1, tmp_path / "model")
    overrides = (
        f"base.checkpoint={tmp_path / 'model'}",
        "memory.mixed_precision=no",
        "memory.microbatch_size=2",
        "memory.cpu_threads=1",
    )
    words = [sys.executable, "-c", STEP, str(tmp_path / "model"), *overrides]
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    run = make_config("pythia-70m", name="measured", overrides=overrides)
    small_one = replace(setting_of(run, on_gpu=False), shape=shape)
    planned = part_bytes(small_one)["sft step"].total + CPU_SCRATCH
    assert planned == pytest.approx(int(done.stdout.split()[-1]), rel=0.15)
