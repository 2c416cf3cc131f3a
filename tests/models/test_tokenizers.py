"""Tokenizers: a [PAD] token of our own, and texts split as the file says."""

import json
import shutil

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stages.config.sections import format_post
from stages.data.lengths import Limits
from stages.data.prompt import plain_encoder
from stages.data.tokens import tokenize_posts
from stages.models.tokenizers import load_tokenizer, same_tokens
from tests.lib.asserts import refusal_of
from tests.lib.families import copy_tokenizer, edit_json

LIMITS = Limits(query=400, response=100, query_response=450)
POST = {
    "id": "a1",
    "subreddit": "tifu",
    "title": "my bike",
    "post": "First part.\nMy boss sold my bike.",
    "summary": "My boss sold my bike.",
}
SHORT_AND_LONG = [("f:1", POST), ("f:2", {**POST, "post": "I walk. " * 6, "summary": "I walk."})]


# -- the pad token ---------------------------------------------------------------------------------


def test_the_pad_token_is_new_and_the_next_free_id(tokenizer, tokenizer_folder):
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    assert tokenizer.eos_token_id == 0
    assert tokenizer.pad_token == "[PAD]"
    assert tokenizer.pad_token_id == len(content["model"]["vocab"])
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


# With EOS, as chat models do, and with an id among the others, as GPT-NeoX's own (id 1).
@pytest.mark.parametrize("pad", ["<|endoftext|>", "!"])
def test_a_tokenizer_that_pads_with_a_real_token_gets_a_pad_token(tokenizer_folder, tmp_path, pad):
    folder = copy_tokenizer(tokenizer_folder, tmp_path / "tokenizer", pad_token=pad)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token == "[PAD]"
    assert tokenizer.pad_token_id == max(tokenizer.get_vocab().values())
    assert tokenizer.pad_token_id == load_tokenizer(tokenizer_folder).pad_token_id


def test_a_saved_tokenizer_gets_no_second_pad_token(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


# -- what the files say ----------------------------------------------------------------------------


def cut_texts(backend):
    backend.enable_truncation(8)


def pad_texts(backend):
    backend.enable_padding(pad_id=1, pad_token="x")


@pytest.mark.parametrize("change", [cut_texts, pad_texts])
def test_a_tokenizer_that_was_saved_cutting_or_padding_does_neither_here(
    tokenizer, tmp_path, change
):
    expected = tokenize_posts(SHORT_AND_LONG, tokenizer, LIMITS, "posts")
    tokenizer.save_pretrained(tmp_path)
    changed = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    change(changed.backend_tokenizer)
    changed.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    loaded = load_tokenizer(tmp_path)

    encodings = loaded.backend_tokenizer.encode_batch(["a", "a b c " * 9])
    lengths = [len(encoding.ids) for encoding in encodings]
    assert max(lengths) == 8 or lengths[0] == lengths[1], "the file has to cut or pad"
    split = tokenize_posts(SHORT_AND_LONG, loaded, LIMITS, "posts")
    for name, column in expected.columns.items():
        for row in range(len(SHORT_AND_LONG)):
            assert split.columns[name][row].tolist() == column[row].tolist()
    assert split.rows[1]["query"] == format_post(SHORT_AND_LONG[1][1])


@pytest.fixture
def digits(tokenizer_folder, tmp_path):
    """A tokenizer with a token 2023 that its pre-tokenizer, which cuts between digits, prevents."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "digits")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first_free = len(vocabulary)
    vocabulary |= {"20": first_free, "23": first_free + 1, "2023": first_free + 2}
    content["model"]["merges"] += [["2", "0"], ["2", "3"], ["20", "23"]]
    both = [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(params=["tokenizer class", "model type"])
def dropped_digits(digits, request):
    """The same folder, of which transformers takes the vocabulary and drops the pre-tokenizer."""
    (digits / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    if request.param == "tokenizer class":
        edit_json(digits / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    else:
        edit_json(digits / "config.json", model_type="gpt_neox")
    careless = AutoTokenizer.from_pretrained(digits)
    assert careless.tokenize(" 2023") == ["Ġ", "2023"], "transformers has to drop it"
    return digits


def test_the_file_wins_over_transformers_class(dropped_digits, capsys):
    tokenizer = load_tokenizer(dropped_digits)
    assert tokenizer.tokenize(" 2023") == ["Ġ", "2", "0", "2", "3"]
    assert tokenizer.eos_token_id == 0
    assert tokenizer.pad_token_id == len(tokenizer) - 1
    note = f"does not split texts as {dropped_digits}/tokenizer.json says: the file is used"
    assert note in capsys.readouterr().err


def test_a_tokenizer_taken_from_its_file_stays_so_when_saved(dropped_digits, tmp_path):
    load_tokenizer(dropped_digits).save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.tokenize(" 2023") == ["Ġ", "2", "0", "2", "3"]
    assert again.eos_token_id == 0
    assert again.pad_token_id == len(again) - 1


def test_tokenizers_of_one_file_are_the_same(digits):
    assert same_tokens(load_tokenizer(digits), load_tokenizer(digits))


def test_equal_vocabularies_that_split_texts_differently_are_not_the_same(digits):
    tokenizer = load_tokenizer(digits)
    other = load_tokenizer(digits)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert other.get_vocab() == tokenizer.get_vocab()
    assert not same_tokens(tokenizer, other)


def test_dropout_in_a_tokenizers_file_is_turned_off(digits):
    content = json.loads((digits / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (digits / "tokenizer.json").write_text(json.dumps(content))
    encode = plain_encoder(load_tokenizer(digits))
    assert len({str(encode(["My boss sold my bike."])) for _ in range(20)}) == 1


def test_a_tokenizer_of_special_tokens_alone_is_refused(digits):
    content = json.loads((digits / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    # As GPT-NeoX has for white space.
    blanks = {**content["added_tokens"][0], "id": 60_000, "content": "  ", "special": False}
    content["added_tokens"].append(blanks)
    (digits / "tokenizer.json").write_text(json.dumps(content))
    assert "cannot encode text: its vocabulary is empty" in refusal_of(load_tokenizer, digits)
