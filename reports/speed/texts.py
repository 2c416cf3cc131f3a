"""The texts of a bench: real posts where a folder is given, else tokens of the real lengths."""

import random
from collections.abc import Sequence
from pathlib import Path

from reports.needs.shapes import Shape
from stages.base import copy_tokens, make_tokenizer, read_rows, split_limits
from stages.posts.ragged import TokenizedSplit, make_ragged, save_split
from stages.running.files import write_json
from stages.settings.config import HUB, TOY, Config

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


def write_texts(config: Config, shape: Shape, folder: Path) -> str:
    """Write two splits and the ids of EOS and [PAD] as the stages read them; say what they hold.

    Raises UserError for bad rows and for a tokenizer that cannot be had.
    """
    folder.mkdir(parents=True)
    data = config.data
    if data.source not in (HUB, TOY):
        rows = read_rows(config)
        tokenizer = make_tokenizer(config, rows.located["sft_train"])
        copy_tokens(tokenizer, rows, split_limits(data, shape.positions), folder / "data")
        ids = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        write_json(folder / "ids.json", ids)
        return "real posts"
    (folder / "data").mkdir()
    rng = random.Random(SEED)
    longest, compared = data.max_query_comparison_tokens, data.max_comparison_tokens
    posts, pairs = [], []
    for _ in range(ROWS):
        query, summary = _drawn(rng, QUERY, data.max_query_tokens), data.max_summary_tokens
        room = data.max_query_summary_tokens - query
        posts.append((query, max(1, min(_drawn(rng, SUMMARY, summary), room))))
    for _ in range(ROWS):
        query = _drawn(rng, QUERY, data.max_query_tokens)
        room = min(compared, longest - query)
        pairs.append((query, *(min(room, _drawn(rng, COMPARED, compared)) for _ in range(2))))
    room = data.max_query_summary_tokens - data.max_query_tokens
    posts += [(data.max_query_tokens, max(1, room))] * LIMIT_ROWS
    pairs += [(longest - compared, compared, compared)] * LIMIT_ROWS
    for name, sizes, columns in (
        ("sft_train", posts, ("queries", "summaries")),
        ("comparisons_train", pairs, ("queries", "chosen", "rejected")),
    ):
        tokens = {
            column: make_ragged(_tokens(rng, shape.vocabulary, lengths))
            for column, lengths in zip(columns, zip(*sizes, strict=True), strict=True)
        }
        rows_of_split = [{"id": str(row)} for row in range(len(sizes))]
        save_split(TokenizedSplit(columns=tokens, rows=rows_of_split), folder / "data", name)
    write_json(folder / "ids.json", {"eos": 0, "pad": shape.vocabulary})
    return "synthetic token ids with the lengths of real posts"


def _drawn(rng: random.Random, quantiles: Sequence[float], limit: int) -> int:
    """A length from a distribution given by its quantiles."""
    share = rng.random()
    at = max(index for index, start in enumerate(SHARES[:-1]) if start <= share)
    part = (share - SHARES[at]) / (SHARES[at + 1] - SHARES[at])
    return max(1, round(limit * (quantiles[at] + part * (quantiles[at + 1] - quantiles[at]))))


def _tokens(rng: random.Random, vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random tokens, the last of each sequence EOS."""
    known = range(1, vocabulary)
    return [[*rng.choices(known, k=length - 1), 0] for length in lengths]


def typical_rows(lengths: Sequence[int], size: int, parts: int) -> list[int]:
    """Rows of some microbatches as training meets them: the split's rows by length, cut in pieces
    of `size`, and pieces spread evenly over them.
    """
    order = sorted(range(min(ROWS, len(lengths))), key=lambda row: lengths[row])
    pieces = [order[at : at + size] for at in range(0, len(order), size)]
    chosen = [pieces[(2 * part + 1) * len(pieces) // (2 * parts)] for part in range(parts)]
    return [row for piece in chosen for row in piece]


def longest_rows(lengths: Sequence[int], count: int) -> list[int]:
    """The rows with the most tokens."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])[:count]
