"""Tokenized splits of random texts of different lengths, for the tests' tiny models."""

import random

from stages.data.ragged import TokenizedSplit, make_ragged

ROWS = 16
LONGEST = 9
"""Most tokens of a text."""


def random_texts(seed: int) -> list[list[int]]:
    """Return one text for each row, of 1 to `LONGEST` tokens."""
    rng = random.Random(seed)
    return [[rng.randint(1, 29) for _ in range(rng.randint(1, LONGEST))] for _ in range(ROWS)]


def split_of(*columns: str) -> TokenizedSplit:
    """Return a split of random texts with these columns."""
    ragged = {name: make_ragged(random_texts(seed)) for seed, name in enumerate(columns)}
    return TokenizedSplit(columns=ragged, rows=[{"split": "train"}] * ROWS)


POSTS = split_of("queries", "summaries")
PAIRS = split_of("queries", "chosen", "rejected")
