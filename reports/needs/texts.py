"""The texts of a rehearsal: real posts where a folder is given, else tokens of the real lengths."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports.needs.shapes import Shape
from stages.base import link_tokens, make_tokenizer, read_rows, split_limits
from stages.posts.ragged import TokenizedSplit, load_split, make_ragged, save_split
from stages.running.files import write_json
from stages.settings.config import HUB, TOY, Config, Data

ROWS = 2048
LIMIT_ROWS = 512
"""Further rows, as long as the limits allow: the worst microbatch is made of them."""
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# At these shares of 4,707 real posts and 4,107 real comparisons, as parts of the limits of 512, 53
# and 169 tokens.
QUERY = (0.105, 0.42, 0.525, 0.68, 0.833, 0.927, 0.99, 1.0)
SUMMARY = (0.3, 0.49, 0.55, 0.62, 0.72, 0.82, 0.91, 0.95)
COMPARED = (0.01, 0.13, 0.16, 0.19, 0.23, 0.265, 0.32, 0.65)
SEED = 1
NO_GROUP = {"split": "valid1", "batch": "synthetic", "strength": None, "policies": "a--b"}


def write_texts(config: Config, shape: Shape, folder: Path) -> str:
    """Write the splits and the ids of EOS and [PAD] as the stages read them; say what they hold.

    Raises UserError for bad rows and for a tokenizer that cannot be had.
    """
    folder.mkdir(parents=True)
    if config.data.source not in (HUB, TOY):
        rows = read_rows(config)
        tokenizer = make_tokenizer(config, rows.located["sft_train"])
        limits = split_limits(config.data, shape.positions)
        link_tokens(tokenizer, rows, limits, folder / "data")
        ids = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        write_json(folder / "ids.json", ids)
        return f"real, from {config.data.source}"
    (folder / "data").mkdir()
    rng, most = random.Random(SEED), shape.vocabulary
    for name in ("sft_train", "sft_validation", "comparisons_train", "comparisons_validation"):
        make = _posts if name.startswith("sft") else _pairs
        save_split(make(rng, config.data, most), folder / "data", name)
    write_json(folder / "ids.json", {"eos": 0, "pad": most})
    return "synthetic token ids with the lengths of real posts"


def _posts(rng: random.Random, data: Data, most: int) -> TokenizedSplit:
    sizes = []
    for row in range(ROWS + LIMIT_ROWS):
        at_limit = row >= ROWS
        query = data.max_query_tokens if at_limit else _drawn(rng, QUERY, data.max_query_tokens)
        summary = _drawn(rng, SUMMARY, data.max_summary_tokens)
        room = data.max_query_summary_tokens - query
        sizes.append((query, max(1, room if at_limit else min(summary, room))))
    columns = zip(*sizes, strict=True)
    named = zip(("queries", "summaries"), columns, strict=True)
    tokens = {name: make_ragged(_tokens(rng, most, column)) for name, column in named}
    rows: list[dict[str, Any]] = [{"id": str(row), "reference": ""} for row in range(len(sizes))]
    return TokenizedSplit(columns=tokens, rows=rows)


def _pairs(rng: random.Random, data: Data, most: int) -> TokenizedSplit:
    sizes = []
    for row in range(ROWS + LIMIT_ROWS):
        at_limit = row >= ROWS
        longest, compared = data.max_query_comparison_tokens, data.max_comparison_tokens
        query = longest - compared if at_limit else _drawn(rng, QUERY, data.max_query_tokens)
        room = min(compared, longest - query)
        lengths = [min(room, _drawn(rng, COMPARED, compared)) for _ in range(2)]
        sizes.append((query, *([compared] * 2 if at_limit else lengths)))
    columns = zip(*sizes, strict=True)
    named = zip(("queries", "chosen", "rejected"), columns, strict=True)
    tokens = {name: make_ragged(_tokens(rng, most, column)) for name, column in named}
    rows = [{"id": str(row), **NO_GROUP} for row in range(len(sizes))]
    return TokenizedSplit(columns=tokens, rows=rows)


def _drawn(rng: random.Random, quantiles: Sequence[float], limit: int) -> int:
    """A length from a distribution given by its quantiles."""
    share = rng.random()
    at = max(index for index, one in enumerate(SHARES[:-1]) if one <= share)
    part = (share - SHARES[at]) / (SHARES[at + 1] - SHARES[at])
    return max(1, round(limit * (quantiles[at] + part * (quantiles[at + 1] - quantiles[at]))))


def _tokens(rng: random.Random, most: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random tokens, the last of each sequence EOS."""
    known = range(1, most)
    return [[*rng.choices(known, k=length - 1), 0] for length in lengths]


def typical_rows(lengths: Sequence[int], size: int, parts: int) -> list[int]:
    """Rows of some microbatches as training meets them: the split's rows by length, cut in pieces
    of `size`, and pieces spread evenly over them.
    """
    order = sorted(range(min(ROWS, len(lengths))), key=lambda row: lengths[row])
    pieces = [order[at : at + size] for at in range(0, len(order), size)]
    chosen = [pieces[(2 * one + 1) * len(pieces) // (2 * parts)] for one in range(parts)]
    return [row for piece in chosen for row in piece]


def longest_rows(lengths: Sequence[int], count: int) -> list[int]:
    """The rows with the most tokens."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])[:count]


def read_texts(folder: Path, name: str) -> TokenizedSplit:
    """A split that `write_texts` wrote."""
    return load_split(folder / "data", name)
