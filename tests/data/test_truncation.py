"""Posts are cut where the paper's code cuts them, in time linear in their length."""

import base64
import random

import pytest

from stages.config.sections import PROMPT
from stages.data.prompt import fit_query, plain_encoder
from stages.models.tokenizers import load_tokenizer
from stages.runs.files import read_lines
from tests.lib.paper_numbers import query_tokens
from tests.lib.rows import POST

# -- where a post is cut ---------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    """A tokenizer with one token per character."""
    return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("post", "limit", "expected"),
    [
        ("{braces} \n", 13, "T|{braces} \n|"),
        ("one\ntwo\nthree", 15, "T|one\ntwo|"),
        ("one\ntwo\nthree", 9, "T|one|"),
        ("one\ntwo\n", 10, "T|one\ntwo|"),
        ("\nabcdef", 4, "T||"),
        ("one\ntwo", 5, "T|on|"),  # no line fits: the first line is cut
        ("abcdef", 8, "T|abcde|"),
        ("abcdef", 3, "T||"),
    ],
)
def test_a_post_is_cut_at_its_last_newline_that_fits(post, limit, expected):
    fields = {"title": "T", "post": post}
    text, tokens = fit_query(letters, "{title}|{post}|", fields, "post", limit)
    assert text == expected
    assert tokens == letters(expected)
    assert fields == {"title": "T", "post": post}


def test_a_title_is_never_cut():
    fields = {"title": "long title", "post": "abc"}
    with pytest.raises(ValueError, match="empty post"):
        fit_query(letters, "{title}|{post}|", fields, "post", limit=11)


# -- the paper's code ------------------------------------------------------------------------------

PAD_ID = 50277  # of [PAD], which is added to Pythia's tokenizer
POSTS = [
    POST | {"post": "I left the pot.\nIt burned.\n"},
    POST | {"post": "One.\n\nTwo {braces}.\nThree: naïve – ok."},
    POST | {"post": "My cat sleeps on my bike and will not move"},
    POST | {"title": "A title that is much too long to be kept"},
]


def fitted_tokens(encode, row, limit) -> list[int] | None:
    """The tokens of a row's query; None if it cannot be cut to fit."""
    try:
        _, tokens = fit_query(lambda text: encode([text])[0], PROMPT, row, "post", limit)
    except ValueError:
        return None
    return tokens


@pytest.mark.parametrize("limit", [50, 60, 70, 150])
@pytest.mark.parametrize("row", POSTS)
def test_queries_match_a_transcription_of_the_papers_code(tokenizer, row, limit):
    encode = plain_encoder(tokenizer)
    expected = query_tokens(lambda text: encode([text])[0], row, limit)
    assert fitted_tokens(encode, row, limit) == expected


def test_queries_match_the_papers_code(shared):
    """On real posts: golden tokens that the paper's code gave."""
    tokenizer = load_tokenizer(shared / "tokenizer")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, PAD_ID)
    encode = plain_encoder(tokenizer)
    posts = {row["id"]: row for row in read_lines(shared / "tldr/sft_validation.jsonl")}
    for golden in read_lines(shared / "golden/queries.jsonl"):
        row = posts[golden["id"]]
        limit = golden["max_query_length"]
        tokens = fitted_tokens(encode, row, limit)
        assert tokens == query_tokens(lambda text: encode([text])[0], row, limit), row["id"]
        if tokens is None:
            assert "error" in golden, row["id"]
            continue
        padding = [PAD_ID] * (limit - len(tokens))
        assert padding + tokens == golden["query_token"], row["id"]
        assert tokenizer.decode(tokens) == golden["query"]


# -- text without spaces ---------------------------------------------------------------------------

RANDOM = random.Random(1)
LETTERS = {
    "base64": base64.b64encode(RANDOM.randbytes(9000)).decode(),
    "Chinese": "".join(chr(RANDOM.randint(0x4E00, 0x9FA5)) for _ in range(600)),
    "Thai": "".join(chr(RANDOM.randint(0xE01, 0xE3A)) for _ in range(600)),
    "one letter": "a",
    "line breaks": "\n",
    "short lines": "my\nbike\n",
    "words of a merge": "mybosssoldmybike",
}


def fields_with(letters: str, length: int) -> dict[str, str]:
    """A post of these letters, repeated up to a length."""
    repeats = length // len(letters) + 1
    post = (letters * repeats)[:length]
    return {"subreddit": "tifu", "title": "my bike", "post": post}


def lengths_of_encoded_texts(tokenizer, letters: str, length: int) -> list[int]:
    """The number of characters of each text that is encoded to cut a post."""
    lengths = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return plain_encoder(tokenizer)([text])[0]

    fit_query(encode, PROMPT, fields_with(letters, length), "post", 300)
    return lengths


@pytest.mark.parametrize("name", LETTERS)
@pytest.mark.parametrize("length", [5_000, 10_000, 20_000, 40_000])
def test_a_long_post_is_encoded_some_fifty_times(tokenizer, name, length):
    """Removing one character at a time, a post of 20,000 would be encoded 20,000 times."""
    lengths = lengths_of_encoded_texts(tokenizer, LETTERS[name], length)
    assert len(lengths) < 64


@pytest.mark.parametrize("name", LETTERS)
def test_the_work_to_cut_a_post_is_linear_in_its_length(tokenizer, name):
    short = lengths_of_encoded_texts(tokenizer, LETTERS[name], 5_000)
    long = lengths_of_encoded_texts(tokenizer, LETTERS[name], 40_000)
    # 8 times as long, and a prompt of some 100 characters around each text.
    assert sum(long) < 8 * sum(short) + 64 * 100


@pytest.mark.parametrize("name", LETTERS)
@pytest.mark.parametrize("limit", [60, 111, 150])
def test_bisection_cuts_where_one_character_at_a_time_cuts(tokenizer, name, limit):
    def encode(text: str) -> list[int]:
        return plain_encoder(tokenizer)([text])[0]

    fields = fields_with(LETTERS[name], 400)
    _, tokens = fit_query(encode, PROMPT, fields, "post", limit)
    assert tokens == query_tokens(encode, fields, limit)
