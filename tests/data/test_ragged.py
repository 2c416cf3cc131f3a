"""Tokenized splits are stored without padding and padded on either side."""

import torch

from stages.data.ragged import load_split, pad_left, pad_right, save_split
from stages.data.tokens import tokenize_posts
from tests.lib.rows import LIMITS, POST


def test_a_saved_split_loads_unchanged(tokenizer, tmp_path):
    odd = POST | {"id": "a2", "title": "line\u2028break \u00e9", "post": "", "summary": "s"}
    split = tokenize_posts([("x:1", POST), ("x:2", odd)], tokenizer, LIMITS, "posts")

    save_split(split, tmp_path, "sft_train")
    loaded = load_split(tmp_path, "sft_train")

    assert loaded.rows == split.rows
    assert set(loaded.columns) == {"queries", "summaries"}
    for name, column in split.columns.items():
        for row in range(2):
            assert torch.equal(loaded.columns[name][row], column[row])


def test_left_padding_aligns_the_ends():
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert pad_left(rows, 9).tolist() == [[1, 2], [9, 3]]


def test_right_padding_aligns_the_starts():
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert pad_right(rows, 9).tolist() == [[1, 2], [3, 9]]
