"""The bytes of each part, compared with autograd, with measurements, and by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from stages.config.command_line import make_config
from stages.planning.memory import saved_activations, setting_of
from stages.planning.parts import part_bytes
from stages.planning.random_inputs import draw_weights, model_config
from stages.planning.shapes import PUBLISHED, Shape
from stages.training.memory import use_gradient_checkpointing
from tests.lib.places import ROOT
from tests.lib.plan_settings import setting

# Pythia-1b: parameters of policy, and of reward model and critic.
POLICY_1B = 1_011_781_632
SCORER_1B = POLICY_1B - 50304 * 2048 + 2048 + 1
# Its matrices: 16 blocks of 12 H^2 weights, and the output layer.
BLOCKS_1B = 16 * 12 * 2048**2
OUTPUT_1B = 50304 * 2048

# -- activations -----------------------------------------------------------------------------------


def autograd_saves(shape: Shape, half: bool, checkpointing: bool) -> int:
    """Bytes that autograd holds when a forward pass ends, without weights and copies of weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config(shape)).train()
    use_gradient_checkpointing(model, setting(gradient_checkpointing=checkpointing).config.memory)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    weight_shapes = {tuple(weight.shape) for weight in model.parameters()}
    weight_shapes |= {weight_shape[::-1] for weight_shape in weight_shapes}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        is_cast = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in weight_shapes
        if address not in weights and not is_cast:
            saved[address] = tensor
        return tensor

    mask = torch.ones(3, 70, dtype=torch.long)
    mask[0, :5] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        model(input_ids=mask, attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("family", "kv_heads"), [("gpt_neox", 0), ("llama", 2)])
def test_activations_are_what_autograd_saves(family, kv_heads, precision, checkpointing):
    three_layers = Shape(
        family=family,
        hidden=64,
        layers=3,
        heads=4,
        kv_heads=kv_heads,
        intermediate=176,
        vocabulary=120,
    )
    two_layers = replace(three_layers, layers=2)
    run = setting(
        mixed_precision=precision,
        gradient_checkpointing=checkpointing,
    )
    half = precision == "bf16"
    planned_three = saved_activations(replace(run, shape=three_layers), sequences=3, tokens=70)
    planned_two = saved_activations(replace(run, shape=two_layers), sequences=3, tokens=70)
    measured_three = autograd_saves(three_layers, half, checkpointing)
    measured_two = autograd_saves(two_layers, half, checkpointing)

    assert planned_three == pytest.approx(measured_three, rel=0.1)
    one_layer = measured_three - measured_two
    assert planned_three - planned_two == pytest.approx(one_layer, rel=0.01)


def test_the_samples_of_a_query_share_a_row():
    run = setting("pythia-1b", microbatch_size=8)
    config = run.config.changed(ppo=run.config.ppo.changed(samples_per_query=4))
    four_samples = replace(run, config=config)
    # 8 episodes are two queries of 512 tokens, each with four samples of 53.
    expected = saved_activations(four_samples, sequences=2, tokens=512 + 4 * 53)
    assert part_bytes(four_samples)["ppo learn"].activations == expected


# -- parts of Pythia-1b by hand --------------------------------------------------------------------


def test_an_sft_step_by_hand():
    held = part_bytes(setting(microbatch_size=8))["sft step"]
    assert held.weights == 4 * POLICY_1B
    assert held.gradients == 4 * POLICY_1B
    assert held.optimizer == 8 * POLICY_1B
    assert held.copies == 2 * (BLOCKS_1B + OUTPUT_1B)
    # A token in a block: H in float32, 17 H in bf16, norms and 8 heads. The mask. The last norm.
    token = 4 * 2048 + 2 * 17 * 2048 + 16 + 4 * 8
    block = 8 * (562 * token + 562**2 * 2)
    assert held.activations == 16 * block + 8 * 562 * 2048 * (4 + 2)
    # A chunk of 2^27 logits: the product in bf16, scaled, its exponential; the first one's stay.
    assert held.logits == 2**27 * (2 + 4 + 4 + 4)
    # The output layer's gradient: a sum over chunks in float32, and one chunk's in bf16.
    assert held.moment == "head"
    assert held.other == (4 + 2) * OUTPUT_1B


def test_a_rollout_by_hand():
    held = part_bytes(setting(forward_batch_size=64))["ppo rollout"]
    assert held.weights == 4 * 2 * (POLICY_1B + SCORER_1B)
    assert held.gradients == 0
    assert held.optimizer == 8 * (POLICY_1B + SCORER_1B)
    # Sampling keeps only the policy's bf16 copies: the critic's come when it measures.
    assert held.copies == 2 * (BLOCKS_1B + OUTPUT_1B)
    # Keys and values of 512 tokens in bf16, in 16 layers.
    assert held.moment == "prompt"
    assert held.cache == 64 * 512 * 16 * 2048 * (2 + 2)


def test_frozen_networks_in_bf16_take_half_the_memory():
    held = part_bytes(setting(forward_batch_size=64, frozen_dtype="bf16"))["ppo rollout"]
    assert held.weights == (4 + 2) * (POLICY_1B + SCORER_1B)


def test_the_bf16_copies_of_both_trained_networks_stay_from_pass_to_pass():
    held = part_bytes(setting(microbatch_size=8))["ppo learn"]
    assert held.copies == 2 * (2 * BLOCKS_1B + OUTPUT_1B)


def test_with_gradient_checkpointing_no_copies_stay():
    held = part_bytes(setting(gradient_checkpointing=True))["ppo learn"]
    assert held.copies == 0


def test_normalize_holds_only_the_reward_model():
    held = part_bytes(setting(forward_batch_size=64))["normalize"]
    assert held.weights == 4 * SCORER_1B
    assert held.optimizer == 0


def test_normalize_reads_no_more_rows_than_there_are():
    run = setting(forward_batch_size=64)
    config = run.config.changed(normalize=run.config.normalize.changed(posts=32))
    few_posts = replace(run, config=config)
    more = part_bytes(run)["normalize"].activations
    assert part_bytes(few_posts)["normalize"].activations < more


# -- several devices -------------------------------------------------------------------------------


def test_each_of_several_devices_holds_every_gradient_twice():
    on_one = part_bytes(setting(devices=1))["sft step"]
    on_eight = part_bytes(setting(devices=8))["sft step"]
    assert on_eight.gradients == 2 * on_one.gradients
    assert on_eight.weights == on_one.weights
    assert on_eight.optimizer == on_one.optimizer


def test_one_device_shares_with_no_other():
    alone = setting("pythia-1b")
    assert part_bytes(replace(alone, sharded=True)) == part_bytes(alone)


def test_a_shard_of_pythia_6_9b_by_hand():
    hidden = 4096
    vocabulary = 50432
    blocks = 32
    block = 12 * hidden**2 + 13 * hidden  # four matrices, their biases, two norms
    policy = blocks * block + 2 * vocabulary * hidden + 2 * hidden
    scorer = blocks * block + vocabulary * hidden + 2 * hidden + hidden + 1
    parts = part_bytes(replace(setting("pythia-6.9b", devices=8), sharded=True))

    learn = parts["ppo learn"]
    assert learn.weights == pytest.approx(4 * 2 * (policy + scorer) / 8, rel=1e-9)
    assert learn.gradients == pytest.approx(4 * (policy + scorer) / 8, rel=1e-9)
    assert learn.optimizer == pytest.approx(8 * (policy + scorer) / 8, rel=1e-9)
    # Two blocks, embedding and output layer are not sharded, with their gradients.
    unsharded = 4 * (policy - (blocks - 2) * block)
    assert learn.copies == pytest.approx(2 * unsharded, rel=0.01)

    # For sampling the policy is whole in every process, next to its bf16 copies.
    copies = 2 * (blocks * 12 * hidden**2 + vocabulary * hidden)
    assert parts["ppo rollout"].copies == pytest.approx(4 * policy + copies, rel=1e-9)
    # Stages that train nothing are not sharded.
    assert parts["summaries"].weights == 4 * (policy + scorer)


# -- measured --------------------------------------------------------------------------------------

# On a CPU the matrix library keeps packed copies of what it multiplies: 10 to 20 MiB were measured
# at the shapes of Pythia-14m and -70m.
CPU_SCRATCH = 12 * 2**20
STEP = """
import sys
from accelerate import Accelerator
import torch
from tests.bench import meter as meters
from stages import sft
from stages.training.memory import MemoryBudget
from stages.training.supervised import begin_supervised
from stages.models.loading import load_policy
from stages.models.policy import PolicyModel
from stages.data.ragged import TokenizedSplit, make_ragged
from stages.runs.run import Run
from stages.config.command_line import make_config
config = make_config("pythia-70m", name="measured", overrides=tuple(sys.argv[2:]))
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
meter = meters.Meter(accelerator.device)
meters.keep_freed_memory = lambda: None  # The plan counts what is in use.
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
sft.take_step(state, split, [0])  # allocates the moments
_, _, peak = meter.measure(lambda: sft.take_step(state, split, list(range(2 * rows))))
print(peak)
"""


@pytest.mark.walk
def test_the_plan_is_within_15_percent_of_a_measured_training_step(tmp_path):
    shape = replace(
        PUBLISHED["pythia-14m"], vocabulary=4096, hidden=256, layers=4, intermediate=1024
    )
    draw_weights(shape, seed=1, folder=tmp_path / "model")
    overrides = (
        f"base.checkpoint={tmp_path / 'model'}",
        "memory.mixed_precision=no",
        "memory.microbatch_size=2",
        "memory.cpu_threads=1",
    )

    step = subprocess.run(
        [sys.executable, "-c", STEP, str(tmp_path / "model"), *overrides],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        check=True,
    )

    measured = int(step.stdout.split()[-1])
    config = make_config("pythia-70m", name="measured", overrides=overrides)
    planned = part_bytes(setting_of(config, on_gpu=False))["sft step"].total
    assert planned + CPU_SCRATCH == pytest.approx(measured, rel=0.15)
