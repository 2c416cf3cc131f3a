"""Shapes and parameters, compared with published numbers and with the modules of transformers."""

import pytest
import torch

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.sections import Base
from stages.models.loading import load_policy
from stages.models.lora import adapt
from stages.planning.shapes import (
    PUBLISHED,
    adapter_parameters,
    parameters,
    read_shape,
    shape_of,
)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 100,
}
FAMILIES = {
    "gpt_neox": SMALL,
    "llama": SMALL | {"num_key_value_heads": 2},
    "qwen2": SMALL | {"num_key_value_heads": 2},
    "gemma": SMALL | {"num_key_value_heads": 1, "head_dim": 16},
}


# The numbers are from the model cards on the hub.
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
def test_published_models_have_their_published_parameters(name, count):
    assert parameters(PUBLISHED[name]) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_has_the_parameters_of_the_model_that_transformers_builds(family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    config = AutoConfig.for_model(family, **FAMILIES[family])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
        config.num_labels = 1
        scorer = AutoModelForTokenClassification.from_config(config)

    shape = read_shape(tmp_path / "config.json")

    assert parameters(shape) == sum(weight.numel() for weight in policy.parameters())
    assert parameters(shape, is_scalar=True) == sum(
        weight.numel() for weight in scorer.parameters()
    )


def test_adapters_have_the_parameters_of_pefts(policy_folder):
    config = make_config("tiny", name="mine", overrides=("lora.rank=4",))
    policy = load_policy(policy_folder)
    adapt(policy, config, "sft")
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    assert adapter_parameters(read_shape(policy_folder / "config.json"), rank=4) == trained


@pytest.mark.parametrize(
    "checkpoint",
    ["EleutherAI/pythia-1b-deduped@abc", "EleutherAI/pythia-1b", "runs/models/Pythia-1b/"],
)
def test_a_name_on_the_hub_leads_to_its_shape(checkpoint):
    assert shape_of(Base(checkpoint=checkpoint)) == PUBLISHED["pythia-1b"]


def test_an_instruct_model_has_the_shape_of_its_base_model():
    checkpoint = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert shape_of(Base(checkpoint=checkpoint)) == PUBLISHED["smollm2-135m"]


def test_a_model_of_unknown_shape_is_refused():
    with pytest.raises(UserError, match=r"shape of org/my-model is unknown: give a folder"):
        shape_of(Base(checkpoint="org/my-model"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "rwkv"}', "unknown model_type rwkv"),
        ('{"model_type": "llama"}', "not a model's configuration"),
    ],
)
def test_a_configuration_without_a_formula_or_a_number_is_refused(tmp_path, text, reason):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=reason):
        shape_of(Base(checkpoint=str(tmp_path)))
