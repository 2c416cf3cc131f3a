"""Weights on disk that are not as they should be are refused in one line."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stages import base
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.models.loading import load_policy, load_reward_model, new_reward_model
from stages.models.weights import read_weights
from tests.lib.asserts import refusal_of
from tests.lib.families import edit_json

MATRIX = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"


@pytest.fixture
def folder(policy_folder, tmp_path):
    """A copy of the policy's folder, to be changed."""
    return shutil.copytree(policy_folder, tmp_path / "model")


def save_weights(folder, weights):
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# -- names -----------------------------------------------------------------------------------------


def test_missing_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    del weights[MATRIX]
    save_weights(folder, weights)
    with pytest.raises(UserError, match=f"lacks 1 weights \\({MATRIX}\\)"):
        load_policy(folder)
    with pytest.raises(UserError, match=f"lacks 1 weights \\({MATRIX}\\)"):
        new_reward_model(folder, torch.Generator())


def test_unexpected_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    save_weights(folder, {**weights, "extra": torch.ones(2)})
    with pytest.raises(UserError, match=r"has unexpected 1 weights \(extra\)"):
        load_policy(folder)
    with pytest.raises(UserError, match=r"has unexpected 1 weights \(extra\)"):
        new_reward_model(folder, torch.Generator())


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["policy", "reward_model"])
def test_weights_that_are_not_finite_are_refused(request, tmp_path, kind, value):
    request.getfixturevalue(kind).save_pretrained(tmp_path)
    load = load_policy if kind == "policy" else load_reward_model
    load(tmp_path)  # as long as they are finite
    weights = load_file(tmp_path / "model.safetensors")
    weights[max(weights)].view(-1)[0] = value
    save_weights(tmp_path, weights)
    assert "has weights that are not finite" in refusal_of(load, tmp_path)


def test_large_weights_whose_sum_overflows_are_finite(folder):
    weights = load_file(folder / "model.safetensors")
    weights[MATRIX] = torch.full_like(weights[MATRIX], 3e38)
    save_weights(folder, weights)
    loaded = load_policy(folder).get_parameter(MATRIX)
    assert torch.equal(loaded, weights[MATRIX])


def test_a_matrix_of_zeros_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    save_weights(folder, {**weights, MATRIX: torch.zeros_like(weights[MATRIX])})
    assert f"has weights that are all zero ({MATRIX})" in refusal_of(load_policy, folder)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "int8"), (torch.float8_e4m3fn, "float8_e4m3fn")]
)
def test_quantized_weights_are_refused(folder, dtype, name):
    weights = load_file(folder / "model.safetensors")
    save_weights(folder, {**weights, MATRIX: weights[MATRIX].to(dtype)})
    assert f"has quantized weights of type {name} ({MATRIX})" in refusal_of(load_policy, folder)


def test_an_output_layer_is_refused_where_the_config_says_that_it_is_the_embedding(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    line = refusal_of(load_policy, folder)
    assert "has an output layer that differs from its embedding" in line


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture(params=["safetensors", "bin"])
def sharded(folder, request):
    """Two shards and their index; the second shard holds a stale copy of MATRIX, negated.

    Returns the weights that the index names, and the index.
    """
    kind = request.param
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if kind == "safetensors" else "pytorch_model"
    save = save_file if kind == "safetensors" else torch.save
    save({MATRIX: weights[MATRIX]}, folder / f"1.{kind}")
    save({**weights, MATRIX: -weights[MATRIX]}, folder / f"2.{kind}")
    weight_map = {**dict.fromkeys(weights, f"2.{kind}"), MATRIX: f"1.{kind}"}
    index = folder / f"{stem}.{kind}.index.json"
    edit_json(index, weight_map=weight_map, metadata={})
    return weights, index


def test_a_stale_copy_in_another_shard_is_not_loaded(folder, sharded):
    weights, _ = sharded
    careless = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(careless[MATRIX], -weights[MATRIX]), "transformers has to take the last one"

    loaded = load_policy(folder).state_dict()

    names = loaded.keys() & weights.keys()
    assert len(names) >= len(weights) - 1  # the output layer has two names
    for name in names:
        assert torch.equal(loaded[name], weights[name]), name


def test_weights_are_read_from_the_shards_that_the_index_names(folder, sharded):
    weights, _ = sharded
    read = read_weights(folder)
    assert read.has_copies
    assert read.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(read.tensors[name], tensor), name


def test_a_shard_without_a_weight_of_the_index_is_refused(folder, sharded):
    weights, index = sharded
    first, second = sorted(path.name for path in folder.glob("[12].*"))
    weight_map = {**dict.fromkeys(weights, second), MATRIX: first, "x": first}
    edit_json(index, weight_map=weight_map)
    line = refusal_of(load_policy, folder)
    assert f"{first} lacks x, which the index assigns to it" in line


def test_an_index_without_shards_is_refused(folder, sharded):
    _, index = sharded
    edit_json(index, weight_map=[])
    assert f"{index} names no shards" in refusal_of(load_policy, folder)


def test_of_two_files_of_weights_a_note_names_the_one_that_is_read(folder, capsys):
    torch.save({}, folder / "pytorch_model.bin")
    load_policy(folder)
    assert "model.safetensors is read, not pytorch_model.bin" in capsys.readouterr().err


def test_an_adapter_next_to_weights_is_refused(folder):
    edit_json(folder / "adapter_config.json", base_model_name_or_path="org/m")
    line = refusal_of(load_policy, folder)
    assert f"model {folder} has adapter_config.json next to its weights" in line


def test_an_adapter_without_a_tokenizer_is_refused_as_an_adapter(runs, tmp_path):
    edit_json(tmp_path / "adapter_config.json", base_model_name_or_path="org/m")
    overrides = ("world.train_posts=8", "base.tokenizer=", f"base.checkpoint={tmp_path}")
    config = make_config("tiny", name="x", overrides=overrides)
    line = refusal_of(base.make_base, config)
    assert f"model {tmp_path} is only an adapter: merge it into org/m " in line
