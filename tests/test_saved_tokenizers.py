"""A tokenizer from elsewhere: what it kept of its last use must not touch our texts."""

import pytest
from transformers import PreTrainedTokenizerFast

from stages.learning.models import load_tokenizer
from stages.posts.tokens import plain_encoder, tokenize_posts
from stages.settings.config import UserError
from stages.settings.prompt import format_post
from tests.test_posts import LIMITS, POST

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


def test_what_a_tokenizer_did_a_moment_ago_does_not_matter(tokenizer):
    texts = ["I walk.", "I walk. " * 9]
    expected = plain_encoder(tokenizer)(texts)
    tokenizer(texts, padding=True, truncation=True, max_length=4)
    assert plain_encoder(tokenizer)(texts) == expected


def test_a_tokenizer_without_a_fast_form_is_refused_in_one_line(monkeypatch, tmp_path):
    class Slow:
        eos_token_id = 0

    monkeypatch.setattr(
        "stages.learning.models.AutoTokenizer.from_pretrained", lambda source: Slow()
    )
    with pytest.raises(UserError, match=r"is no fast one: save it with a tokenizer\.json"):
        load_tokenizer(tmp_path)
