"""A post of any letters is cut in time linear in its length, and where one by one would end."""

import base64
import random

import pytest

from stages.data.tokens import fit_query, plain_encoder
from stages.settings.sections import PROMPT
from tests.lib.paper_numbers import query_tokens

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


def fields_of(name: str, length: int) -> dict[str, str]:
    post = (LETTERS[name] * (length // len(LETTERS[name]) + 1))[:length]
    return {"subreddit": "tifu", "title": "my bike", "post": post}


@pytest.mark.parametrize("name", LETTERS)
def test_letters_without_a_space_are_encoded_some_fifty_times_however_many_they_are(
    tokenizer, name
):
    """One by one, 20,000 would be encoded 20,000 times."""
    encoded = {}
    for length in (5_000, 10_000, 20_000, 40_000):
        lengths: list[int] = []

        def encode(text: str, lengths: list[int] = lengths) -> list[int]:
            lengths.append(len(text))
            return plain_encoder(tokenizer)([text])[0]

        fit_query(encode, PROMPT, fields_of(name, length), "post", 300)
        assert len(lengths) < 64
        encoded[length] = sum(lengths)
    assert encoded[40_000] < 8 * encoded[5_000] + 64 * 100


@pytest.mark.parametrize("name", LETTERS)
@pytest.mark.parametrize("limit", [60, 111, 150])
def test_halving_ends_where_one_letter_at_a_time_ends(tokenizer, name, limit):
    def encode(text: str) -> list[int]:
        return plain_encoder(tokenizer)([text])[0]

    fields = fields_of(name, 400)
    found = fit_query(encode, PROMPT, fields, "post", limit)[1]
    assert found == query_tokens(encode, fields, limit)
