"""A checkpoint that was pretrained with a beginning-of-text token gets it, in every query."""

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from stages.base import split_limits
from stages.data.formats import as_known
from stages.data.tokens import first_tokens, plain_encoder, tokenize_comparisons, tokenize_posts
from stages.models.tokenizers import load_tokenizer
from stages.settings.checks import UserError
from stages.settings.config import Data

POST = {"id": "a", "subreddit": "tifu", "title": "my bike", "post": "My boss. " * 40}
PAIR = {
    "info": {**POST, "id": "a"},
    "summaries": [{"text": " one", "policy": "x"}, {"text": " two", "policy": "y"}],
    "choice": 0,
    "batch": "b",
    "split": "train",
}


@pytest.fixture
def beginning(tokenizer_folder, tmp_path):
    """The folder of a tokenizer that begins a text with <s>, as Llama's and Gemma's do."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_auto_does_what_the_tokenizer_does_by_default(beginning, tokenizer):
    adds = load_tokenizer(beginning)
    assert first_tokens(adds, "auto") == first_tokens(adds, "always") == (adds.bos_token_id,)
    assert first_tokens(adds, "never") == first_tokens(tokenizer, "auto") == ()
    tokenizer.bos_token = tokenizer.eos_token  # Pythia's: it has one, and adds none
    assert first_tokens(tokenizer, "auto") == ()
    assert first_tokens(tokenizer, "always") == (0,)
    tokenizer.bos_token = None
    with pytest.raises(UserError, match=r"base\.bos=always: the tokenizer has no BOS token"):
        first_tokens(tokenizer, "always")


@pytest.mark.parametrize("limit", [500, 60])
def test_bos_begins_each_query_and_counts_for_its_length(beginning, limit):
    tokenizer = load_tokenizer(beginning)
    bos = tokenizer.bos_token_id
    data = Data(source="x", max_query_tokens=limit, max_summary_tokens=20)
    limits = split_limits(data, 999, (bos,))
    located = [("x:1", POST | {"summary": "he did"})]
    posts = tokenize_posts(located, tokenizer, limits["sft_train"], "sft_train")
    name = "comparisons_train"
    pairs = tokenize_comparisons([("x:1", PAIR)], tokenizer, limits[name], name)
    for split in (posts, pairs):
        query = split.columns["queries"][0].tolist()
        assert query[0] == bos
        assert bos not in query[1:]
        assert len(query) <= limit
        text = tokenizer.decode(query[1:])
        assert plain_encoder(tokenizer)([text])[0] == query[1:]
    assert posts.rows[0]["query"] == text  # the judge reads no BOS
    for column in ("chosen", "rejected"):
        assert bos not in pairs.columns[column][0]


def test_a_whole_prompt_that_is_cut_keeps_its_bos(beginning):
    tokenizer = load_tokenizer(beginning)
    asked = {"prompt": "First words. " * 9 + "Why?", "completion": "So."}
    row = as_known("x:1", asked, "sft_train")
    data = Data(source="x", max_query_tokens=8, max_summary_tokens=20)
    limits = split_limits(data, 999, first_tokens(tokenizer, "auto"))["sft_train"]
    query = tokenize_posts([("x:1", row)], tokenizer, limits, "sft_train").columns["queries"][0]
    assert len(query) == 8
    assert query[0] == tokenizer.bos_token_id
    assert tokenizer.decode(query).endswith("Why?")


def test_a_saved_tokenizer_still_says_that_it_begins_with_bos(beginning, tmp_path):
    tokenizer = load_tokenizer(beginning)
    plain_encoder(tokenizer)(["a"])
    tokenizer.save_pretrained(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert first_tokens(again, "auto") == (tokenizer.bos_token_id,)
