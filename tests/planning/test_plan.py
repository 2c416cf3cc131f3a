"""What `make plan` counts, against published numbers, real modules, autograd and by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.config.command_line import make_config
from stages.config.config import Base, UserError, settings_hash
from stages.config.presets import PRESETS
from stages.planning.batch_sizes import with_sizes
from stages.planning.memory import GIB, saved_activations
from stages.planning.plan import (
    SHARDED,
    gpus_for,
    lines_of,
    most_bytes,
    parse,
    part_bytes,
    sized,
    usable_bytes,
)
from stages.planning.random_inputs import model_config
from stages.planning.shapes import (
    PUBLISHED,
    Shape,
    adapter_parameters,
    parameters,
    read_shape,
    shape_of,
)
from stages.training.memory import use_gradient_checkpointing
from tests.lib.asserts import refusal_of
from tests.lib.plan_settings import setting

ROOT = Path(__file__).parents[2]


# The numbers on the models' cards on the hub.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("pythia-14m", 14_067_712),
        ("pythia-70m", 70_426_624),
        ("pythia-1b", 1_011_781_632),
        ("pythia-2.8b", 2_775_208_960),
        ("pythia-6.9b", 6_857_302_016),
        ("smollm2-135m", 134_515_008),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_published_sizes_have_their_published_parameters(name, count):
    assert parameters(PUBLISHED[name]) == count


SMALL = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 100}
FAMILIES = {
    "gpt_neox": SMALL,
    "llama": SMALL | {"num_key_value_heads": 2},
    "qwen2": SMALL | {"num_key_value_heads": 2},
    "gemma": SMALL | {"num_key_value_heads": 1, "head_dim": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_read_configuration_has_as_many_parameters_as_the_model_that_transformers_makes(
    family, tmp_path
):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    config = AutoConfig.for_model(family, **FAMILIES[family])
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path / "config.json")
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
        config.num_labels = 1
        scorer = AutoModelForTokenClassification.from_config(config)
    assert sum(weight.numel() for weight in policy.parameters()) == parameters(shape)
    assert sum(weight.numel() for weight in scorer.parameters()) == parameters(shape, scalar=True)


def test_adapters_are_counted_as_peft_makes_them(policy_folder):
    from stages.models.loading import load_policy
    from stages.models.lora import adapt

    config = make_config("tiny", name="mine", overrides=("lora.rank=4",))
    policy = load_policy(policy_folder)
    adapt(policy, config, "sft")
    learned = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert learned == adapter_parameters(read_shape(policy_folder / "config.json"), 4)


def test_an_unknown_shape_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"shape of org/my-model is not known: give a folder"):
        shape_of(Base(checkpoint="org/my-model"))
    for text, reason in (
        ('{"model_type": "rwkv"}', "no formula for model_type rwkv"),
        ('{"model_type": "llama"}', "not the configuration of a model"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=reason):
            shape_of(Base(checkpoint=str(tmp_path)))


def test_names_on_the_hub_lead_to_their_shapes():
    names = ("EleutherAI/pythia-1b-deduped@abc", "EleutherAI/pythia-1b", "runs/models/Pythia-1b/")
    assert all(shape_of(Base(checkpoint=name)) == PUBLISHED["pythia-1b"] for name in names)
    smollm = shape_of(Base(checkpoint="HuggingFaceTB/SmolLM2-135M-Instruct"))
    assert smollm == PUBLISHED["smollm2-135m"]


def autograd_saves(shape: Shape, half: bool, checkpointing: bool) -> int:
    """Bytes that autograd holds when a forward pass ends, without weights and copies of weights."""
    from transformers import AutoModelForCausalLM

    config = model_config(shape)
    model = AutoModelForCausalLM.from_config(config).train()
    use_gradient_checkpointing(model, setting(gradient_checkpointing=checkpointing).config.memory)
    held: dict[int, torch.Tensor] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {tuple(weight.shape) for weight in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in shapes
        if tensor.untyped_storage().data_ptr() not in weights and not copy:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    mask = torch.ones(3, 70, dtype=torch.long)
    mask[0, :5] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        model(input_ids=mask, attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_activations_are_what_autograd_saves(family, half, checkpointing):
    kv = 2 if family == "llama" else 0
    three = Shape(
        family=family, hidden=64, layers=3, heads=4, kv_heads=kv, intermediate=176, vocabulary=120
    )
    run = setting(mixed_precision="bf16" if half else "no", gradient_checkpointing=checkpointing)

    def planned(shape: Shape) -> float:
        return saved_activations(replace(run, shape=shape), 3, 70)

    two = replace(three, layers=2)
    by_layer = autograd_saves(three, half, checkpointing) - autograd_saves(two, half, checkpointing)
    assert planned(three) - planned(two) == pytest.approx(by_layer, rel=0.01)
    assert planned(three) == pytest.approx(autograd_saves(three, half, checkpointing), rel=0.1)


def test_the_sft_step_of_pythia_1b_by_hand():
    held = part_bytes(setting(microbatch_size=8))["sft step"]
    count = 1_011_781_632
    assert (held.weights, held.gradients, held.optimizer) == (4 * count, 4 * count, 8 * count)
    # 16 blocks of 12 H^2 weights and the output layer, in bf16.
    assert held.copies == 2 * (16 * 12 * 2048**2 + 50304 * 2048)
    # A token in a block: H in float32, 17 H in bf16, norms and 8 heads; the mask; the last norm.
    token = 4 * 2048 + 2 * 17 * 2048 + 16 + 4 * 8
    block = 8 * (562 * token + 562**2 * 2)
    assert held.activations == 16 * block + 8 * 562 * 2048 * (4 + 2)
    # A chunk of 2^27 logits: the product in bf16, scaled and its exponential; the first one's stay.
    assert held.logits == 2**27 * (2 + 4 + 4 + 4)
    # The output layer's gradient: a sum over chunks in float32, and one chunk's in bf16.
    assert (held.moment, held.other) == ("head", (4 + 2) * 50304 * 2048)


def test_the_rollout_of_pythia_1b_by_hand():
    held = part_bytes(setting(forward_batch_size=64))["ppo rollout"]
    policy, scorer = 1_011_781_632, 1_011_781_632 - 50304 * 2048 + 2049
    assert held.weights == 4 * 2 * (policy + scorer)
    halved = part_bytes(setting(forward_batch_size=64, frozen_dtype="bf16"))["ppo rollout"]
    assert halved.weights == (4 + 2) * (policy + scorer)
    assert (held.gradients, held.optimizer) == (0, 8 * (policy + scorer))
    # Sampling keeps the policy's bf16 copies alone: the critic's come when it measures.
    assert held.copies == 2 * (16 * 12 * 2048**2 + 50304 * 2048)
    # In learning both networks' stay from pass to pass; with gradient checkpointing none does.
    matrices = 2 * (2 * 16 * 12 * 2048**2 + 50304 * 2048)
    assert part_bytes(setting(microbatch_size=8))["ppo learn"].copies == matrices
    assert not part_bytes(setting(gradient_checkpointing=True))["ppo learn"].copies
    # Keys and values of 512 tokens in bf16, in 16 layers.
    assert (held.moment, held.cache) == ("prompt", 64 * 512 * 16 * 2048 * (2 + 2))


def test_several_cards_hold_every_gradient_twice_and_share_nothing_else():
    alone, eight = (part_bytes(setting(devices=count))["sft step"] for count in (1, 8))
    assert eight.gradients == 2 * alone.gradients
    assert (eight.weights, eight.optimizer) == (alone.weights, alone.optimizer)


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]().data.source])
def test_every_preset_fits_the_cards_it_is_made_for(preset):
    gpu, devices = gpus_for(preset)
    run = replace(setting(preset, devices), sharded=preset in SHARDED)
    assert most_bytes(sized(run, usable_bytes(gpu))) <= usable_bytes(gpu)


def test_auto_is_what_fits_into_what_is_free_on_the_card(runs, monkeypatch, capsys):
    config, free = make_config("pythia-1b"), [79, 79, 40]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0) * GIB, 80 * GIB))
    for stage in ("ppo", "sft", "ppo"):
        sizes = with_sizes(config, stage)
        assert settings_hash(sizes, stage) == settings_hash(config, stage)
    assert capsys.readouterr().err.replace("memory.", "").splitlines() == [
        "ppo: microbatch_size=32 forward_batch_size=256 (61.8 GiB at most, of 71.1)",
        "sft: microbatch_size=64 forward_batch_size=512 (61.8 GiB at most, of 71.1)",
        "ppo: microbatch_size=1 forward_batch_size=1 (41.0 GiB at most, of 36.0: "
        "TOO LARGE, add lora.rank=16)",
    ]
    assert with_sizes(config, "base") == config
    free.append(80)
    paper = make_config("pythia-1b", name="x", overrides=("ppo.compat=paper",))
    assert with_sizes(paper, "ppo").memory.microbatch_size == 16  # it decides what is learned


def test_a_plan_says_everything_in_80_columns():
    lines = lines_of(parse(["--preset", "pythia-6.9b", "--gpus", "1"]))
    text = "\n".join(lines)
    assert all(len(line) <= 80 for line in lines), [line for line in lines if len(line) > 80]
    words = (
        "6,857,302,016",
        "1 x h100-80gb",
        "does not fit",
        "make rehearse",
        *part_bytes(setting("pythia-6.9b")),
    )
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpu", "h100"], "unknown GPU 'h100': did you mean h100-80gb"),
        (["--gpus", "-1"], "GPUS=-1: give the number of cards"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments, line):
    words = ["--preset", "pythia-1b", *arguments]
    assert refusal_of(lambda: lines_of(parse(words))).startswith(line)
