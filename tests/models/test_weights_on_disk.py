"""What lies on a disk and is not as it should be: tokenizers, weights, caches."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stages import base
from stages.data.bad_rows import BadRows
from stages.data.ragged import load_split
from stages.data.tokens import plain_encoder, tokenize_posts
from stages.driving.start import run_module
from stages.models.loading import (
    load_policy,
    load_reward_model,
    load_tokenizer,
    same_tokens,
    save_model,
)
from stages.running.files import read_record
from stages.running.machine import code_of
from stages.settings.command_line import make_config
from stages.settings.config import UserError
from stages.settings.sections import format_post
from stages.training.checkpoints import read_weights
from tests.data.test_posts import LIMITS, POST
from tests.lib.asserts import refusal_of

SIZES = {"train_posts": 8, "validation_posts": 4, "train_comparisons": 8}
SMALL = [f"world.{name}={size}" for name, size in (SIZES | {"validation_comparisons": 4}).items()]
MATRIX = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
POSTS = [("f:1", POST), ("f:2", POST | {"post": "I walk. " * 6, "summary": "I walk."})]


def cuts(backend):
    backend.enable_truncation(8)


def pads(backend):
    backend.enable_padding(pad_id=1, pad_token="x")


@pytest.mark.parametrize("kept", [cuts, pads])
def test_a_tokenizer_that_was_saved_cutting_or_padding_does_neither_here(tokenizer, tmp_path, kept):
    expected = tokenize_posts(POSTS, tokenizer, LIMITS, "posts")
    tokenizer.save_pretrained(tmp_path)
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    kept(other.backend_tokenizer)
    other.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    lengths = [len(one.ids) for one in loaded.backend_tokenizer.encode_batch(["a", "a b c " * 9])]
    assert max(lengths) == 8 or lengths[0] == lengths[1]  # what a careless reader would get
    found = tokenize_posts(POSTS, loaded, LIMITS, "posts")
    for name, column in expected.columns.items():
        rows = range(len(POSTS))
        assert [found.columns[name][row].tolist() for row in rows] == [
            column[row].tolist() for row in rows
        ]
    assert found.rows[1]["query"] == format_post(POSTS[1][1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_when_loaded(policy, reward_model, tmp_path, value):
    for model, load in ((policy, load_policy), (reward_model, load_reward_model)):
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        load(folder)
        weights = load_file(folder / "model.safetensors")
        name = sorted(weights)[-1]
        weights[name].view(-1)[0] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match="has weights that are not finite"):
            load(folder)


@pytest.fixture
def model(policy_folder, tmp_path):
    """A copy of the policy's folder, to be changed."""
    return shutil.copytree(policy_folder, tmp_path / "model")


def with_json(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_each_weight_is_that_of_the_shard_which_the_index_names(model, kind):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save, stem = (save_file, "model") if kind == "safetensors" else (torch.save, "pytorch_model")
    first, second, index = f"1.{kind}", f"2.{kind}", model / f"{stem}.{kind}.index.json"
    save({MATRIX: weights[MATRIX]}, model / first)
    save(weights | {MATRIX: -weights[MATRIX]}, model / second)  # a stale copy, which comes last
    places = dict.fromkeys(weights, second) | {MATRIX: first}
    with_json(index, weight_map=places, metadata={})
    for loaded in (load_policy(model).state_dict(), read_weights(model)[0]):
        names = loaded.keys() & weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in names)
        assert len(names) >= len(weights) - 1  # the output layer has two names
    careless = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert torch.equal(careless[MATRIX], -weights[MATRIX])
    with_json(index, weight_map=places | {"x": first})
    assert f"{first} lacks x, which the index gives to it" in refusal_of(load_policy, model)
    with_json(index, weight_map=[])
    assert f"{index} names no shards" in refusal_of(load_policy, model)


def to_float8(weight):
    return weight.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("made", [Tensor.char, to_float8, torch.zeros_like])
def test_a_matrix_of_zeros_or_without_its_scales_is_refused(model, made):
    weights = load_file(model / "model.safetensors")
    changed = weights | {MATRIX: made(weights[MATRIX])}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    assert f"({MATRIX})" in refusal_of(load_policy, model)


@pytest.fixture
def digits(tokenizer_folder, tmp_path):
    """A tokenizer with a token 2023 that its pre-tokenizer, which cuts between digits, prevents."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "digits")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, last = content["model"]["vocab"], len(content["model"]["vocab"])
    vocabulary |= {"20": last, "23": last + 1, "2023": last + 2}
    content["model"]["merges"] += [["2", "0"], ["2", "3"], ["20", "23"]]
    both = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"}),
        ("config.json", {"model_type": "gpt_neox"}),
    ],
)
def test_texts_are_cut_as_the_file_says_where_transformers_drops_its_pre_tokenizer(
    digits, tmp_path, file, values, capsys
):
    path = digits / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    with_json(digits / file, **values)
    careless, loaded = AutoTokenizer.from_pretrained(digits), load_tokenizer(digits)
    assert careless.tokenize(" 2023") == ["Ġ", "2023"]
    assert f"{digits}/tokenizer.json says: the file is taken" in capsys.readouterr().err
    loaded.save_pretrained(tmp_path / "saved")
    for kept in (loaded, load_tokenizer(tmp_path / "saved")):
        assert kept.tokenize(" 2023") == ["Ġ", "2", "0", "2", "3"]
        assert (kept.eos_token_id, kept.pad_token_id) == (0, len(kept) - 1)
    careless.add_special_tokens({"pad_token": "[PAD]"})
    assert not same_tokens(careless, loaded)


def test_a_damaged_cache_is_named_and_made_anew_and_no_run_can_damage_it(runs, capsys):
    arguments = ["--preset", "tiny", "--set", *SMALL]

    def made(name):
        run_module(base, [*arguments, "--name", name])
        files = (runs / name / "seed44413/base/data").iterdir()
        return {path.name: path.read_bytes() for path in files}, capsys.readouterr().err

    whole, said = made("first")
    assert "damaged" not in said
    for path in (runs / "first/seed44413/base/data").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])
    again, said = made("second")
    assert again == whole
    assert "damaged" not in said
    for cache in sorted((runs / "cache").iterdir()):
        path = max(cache.iterdir(), key=lambda path: path.stat().st_size)
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        again, told = made(f"after-{cache.name}")
        assert again == whole
        assert f"{cache} is damaged or of an older version: it is made anew" in told


def test_other_tokenising_code_finds_no_tokens_of_the_old_and_other_code_does(
    runs, tokenizer, tmp_path, monkeypatch
):
    rows = base.SourceRows(located={"sft_train": POSTS}, bad=BadRows("stop"), published={})

    def caches(**edited):
        closure = code_of("stages.data.tokens") | edited
        monkeypatch.setattr(base, "code_of", lambda module: closure)
        base.copy_tokens(tokenizer, rows, {"sft_train": LIMITS}, tmp_path / "data")
        return len(list((runs / "cache").iterdir()))

    assert caches() == caches() == 1
    assert caches(**{"stages/settings/stages.py": "edited"}) == 1
    assert caches(**{"stages/data/tokens.py": "edited"}) == 2
    assert caches(**{"stages/settings/sections.py": "edited"}) == 3


def test_a_tokenizer_with_another_eos_finds_no_tokens_of_the_old(runs, tokenizer, tmp_path):
    rows = base.SourceRows(located={"sft_train": POSTS}, bad=BadRows("stop"), published={})
    tokenizer.save_pretrained(tmp_path)
    other = load_tokenizer(tmp_path)
    other.eos_token = other.convert_ids_to_tokens(1)  # as a chat model beside its base model
    for eos in (tokenizer, other):
        base.copy_tokens(eos, rows, {"sft_train": LIMITS}, tmp_path / "data")
        summary = load_split(tmp_path / "data", "sft_train").columns["summaries"][0]
        assert summary[-1] == eos.eos_token_id
    assert tokenizer.eos_token_id != other.eos_token_id


def test_another_length_of_summaries_is_another_input_though_all_tokens_are_equal(runs):
    contents = set()
    for name, length in (("short", 20), ("long", 30)):
        longest = f"data.max_summary_tokens={length}"
        run_module(base, ["--preset", "tiny", "--name", name, "--set", *SMALL, longest])
        contents.add(read_record(runs / name / "seed44413/base/manifest.json")["content"])
    assert len(contents) == 2


def test_a_text_has_the_same_tokens_each_time_whatever_chance_the_file_asks_for(digits):
    content = json.loads((digits / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (digits / "tokenizer.json").write_text(json.dumps(content))
    encode = plain_encoder(load_tokenizer(digits))
    assert len({str(encode(["My boss sold my bike."])) for _ in range(20)}) == 1


def test_a_tokenizer_of_special_tokens_alone_is_refused(digits):
    content = json.loads((digits / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    blanks = {**content["added_tokens"][0], "id": 60_000, "content": "  ", "special": False}
    content["added_tokens"].append(blanks)  # as GPT-NeoX has for white space
    (digits / "tokenizer.json").write_text(json.dumps(content))
    assert "has no tokens for texts: its vocabulary is empty" in refusal_of(load_tokenizer, digits)


def test_of_two_files_of_weights_a_line_names_the_one_that_is_read(model, capsys):
    torch.save({}, model / "pytorch_model.bin")
    load_policy(model)
    assert "model.safetensors is read, not pytorch_model.bin" in capsys.readouterr().err


def test_what_a_config_asks_a_model_to_give_beside_logits_is_left_out_with_a_line(
    model, tokenizer, tmp_path, capsys
):
    tokens = torch.tensor([[5, 6, 7]])
    expected = load_policy(model)(tokens).logits
    with_json(model / "config.json", output_attentions=True, return_dict=False)
    policy = load_policy(model)
    assert "output_attentions, return_dict of its config.json" in capsys.readouterr().err
    assert torch.equal(policy(tokens).logits, expected)
    save_model(policy, tokenizer, tmp_path / "saved")
    assert load_policy(tmp_path / "saved")(tokens).keys() == {"logits", "past_key_values"}


def test_an_output_layer_is_refused_where_the_config_says_that_it_is_the_embedding(model):
    with_json(model / "config.json", tie_word_embeddings=True)
    assert "has an output layer other than its embedding" in refusal_of(load_policy, model)


def test_an_adapter_is_refused_beside_weights_and_alone(runs, model):
    def start(folder):
        own = ("base.tokenizer=", f"base.checkpoint={folder}")
        base.make_base(make_config("tiny", name="x", overrides=(*SMALL, *own)))

    with_json(model / "adapter_config.json", base_model_name_or_path="org/m")
    assert f"model {model} has adapter_config.json beside its weights" in refusal_of(start, model)
    for path in {*model.iterdir()} - {model / "adapter_config.json"}:
        path.unlink()
    assert f"model {model} is an adapter alone: merge it into org/m " in refusal_of(start, model)
