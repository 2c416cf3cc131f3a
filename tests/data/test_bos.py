"""A checkpoint that was pretrained with a beginning-of-text token gets it, in every query."""

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from stages.base import split_limits
from stages.config.errors import UserError
from stages.config.sections import Data
from stages.data.formats import to_openai_schema
from stages.data.prompt import first_tokens, plain_encoder
from stages.data.tokens import tokenize_comparisons, tokenize_posts
from stages.models.tokenizers import load_tokenizer
from tests.lib.rows import PAIR, POST, edited

LONG_TEXT = "My boss. " * 40
LONG_POST = POST | {"post": LONG_TEXT}
LONG_PAIR = edited(PAIR, "info.post", LONG_TEXT)


@pytest.fixture
def bos_folder(tokenizer_folder, tmp_path):
    """The folder of a tokenizer that begins a text with <s>, as Llama's and Gemma's do."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def bos_tokenizer(bos_folder):
    return load_tokenizer(bos_folder)


# -- the setting -----------------------------------------------------------------------------------


def test_auto_adds_bos_if_the_tokenizer_adds_it(bos_tokenizer):
    bos = bos_tokenizer.bos_token_id
    assert first_tokens(bos_tokenizer, "auto") == (bos,)
    assert first_tokens(bos_tokenizer, "always") == (bos,)
    assert first_tokens(bos_tokenizer, "never") == ()


def test_auto_adds_no_bos_if_the_tokenizer_only_has_one(tokenizer):
    tokenizer.bos_token = tokenizer.eos_token  # as Pythia's
    assert first_tokens(tokenizer, "auto") == ()
    assert first_tokens(tokenizer, "always") == (tokenizer.eos_token_id,)


def test_always_is_refused_if_the_tokenizer_has_no_bos(tokenizer):
    tokenizer.bos_token = None
    assert first_tokens(tokenizer, "auto") == ()
    with pytest.raises(UserError, match=r"base\.bos=always: the tokenizer has no BOS token"):
        first_tokens(tokenizer, "always")


def test_a_saved_tokenizer_still_adds_bos(bos_tokenizer, tmp_path):
    plain_encoder(bos_tokenizer)(["a"])
    bos_tokenizer.save_pretrained(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert first_tokens(again, "auto") == (bos_tokenizer.bos_token_id,)


# -- the tokens ------------------------------------------------------------------------------------


@pytest.fixture(params=[500, 60], ids=["fits", "cut"])
def limits(request, bos_tokenizer):
    """The limits of each split, with and without truncation of the long rows."""
    data = Data(source="x", max_query_tokens=request.param, max_summary_tokens=20)
    return split_limits(data, 999, (bos_tokenizer.bos_token_id,))


def test_bos_begins_a_posts_query_and_counts_toward_its_length(bos_tokenizer, limits):
    rows = [("x:1", LONG_POST | {"summary": "he did"})]
    split = tokenize_posts(rows, bos_tokenizer, limits["sft_train"], "sft_train")

    bos, *text = split.columns["queries"][0].tolist()
    assert bos == bos_tokenizer.bos_token_id
    assert bos not in text
    assert 1 + len(text) <= limits["sft_train"].query
    assert plain_encoder(bos_tokenizer)([bos_tokenizer.decode(text)])[0] == text
    assert split.rows[0]["query"] == bos_tokenizer.decode(text)  # the judge reads no BOS


def test_bos_begins_a_comparisons_query_and_no_summary(bos_tokenizer, limits):
    name = "comparisons_train"
    split = tokenize_comparisons([("x:1", LONG_PAIR)], bos_tokenizer, limits[name], name)

    bos, *text = split.columns["queries"][0].tolist()
    assert bos == bos_tokenizer.bos_token_id
    assert bos not in text
    assert 1 + len(text) <= limits[name].query
    for column in ("chosen", "rejected"):
        assert bos not in split.columns[column][0]


def test_a_limit_that_bos_alone_fills_is_refused(bos_tokenizer):
    row = to_openai_schema("x:1", {"prompt": "Why?", "completion": "So."}, "sft_train")
    data = Data(source="x", max_query_tokens=1, max_summary_tokens=20)
    limits = split_limits(data, 999, first_tokens(bos_tokenizer, "auto"))["sft_train"]
    with pytest.raises(UserError, match="x:1: BOS leaves no room for a prompt in 1 token: raise"):
        tokenize_posts([("x:1", row)], bos_tokenizer, limits, "sft_train")


def test_a_whole_prompt_that_is_cut_keeps_its_bos(bos_tokenizer):
    users_row = {"prompt": "First words. " * 9 + "Why?", "completion": "So."}
    row = to_openai_schema("x:1", users_row, "sft_train")
    data = Data(source="x", max_query_tokens=8, max_summary_tokens=20)
    limits = split_limits(data, 999, first_tokens(bos_tokenizer, "auto"))["sft_train"]

    split = tokenize_posts([("x:1", row)], bos_tokenizer, limits, "sft_train")

    query = split.columns["queries"][0]
    assert len(query) == 8
    assert query[0] == bos_tokenizer.bos_token_id
    assert bos_tokenizer.decode(query).endswith("Why?")
