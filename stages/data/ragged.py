"""Tokenized posts and comparisons as stages read them: ragged splits on disk, padded batches.

Tokens are stored without padding, which is added only when a batch is built. So no result depends
on the padding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.config.errors import UserError
from stages.runs.files import read_lines, write_lines


@dataclass(frozen=True)
class Ragged:
    """Token sequences of different lengths, laid end to end."""

    tokens: Tensor
    """[sum of lengths] int32."""
    offsets: Tensor
    """[sequences + 1] int64; sequence i is tokens[offsets[i]:offsets[i + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        start = self.offsets[index]
        end = self.offsets[index + 1]
        return self.tokens[start:end].long()

    def lengths(self) -> Tensor:
        """Tokens of each sequence, [sequences] int64."""
        return self.offsets.diff()


@dataclass(frozen=True, kw_only=True)
class TokenizedSplit:
    """One split: columns of token sequences, one sequence per row, and other fields of each row."""

    columns: dict[str, Ragged]
    """`queries`, and `summaries` of posts, or `chosen` and `rejected` of comparisons."""
    rows: list[dict[str, Any]]
    """The fields of each row that are not tokens, such as its id."""

    def __len__(self) -> int:
        return len(self.rows)


def make_ragged(sequences: Iterable[list[int]]) -> Ragged:
    """Concatenate token lists."""
    arrays = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    lengths = [len(array) for array in arrays]
    return Ragged(
        tokens=torch.from_numpy(np.concatenate(arrays)),
        offsets=torch.from_numpy(np.cumsum([0, *lengths])),
    )


def save_split(split: TokenizedSplit, folder: Path, name: str) -> None:
    """Write a split as `<name>.safetensors` and `<name>.jsonl`."""
    tensors = {}
    for key, column in split.columns.items():
        tensors[f"{key}.tokens"] = column.tokens
        tensors[f"{key}.offsets"] = column.offsets
    save_file(tensors, folder / f"{name}.safetensors")
    write_lines(folder / f"{name}.jsonl", split.rows)


def rows_of(split: TokenizedSplit, rows: Sequence[int]) -> TokenizedSplit:
    """The split with only the rows of these numbers, in this order."""
    columns = {
        name: make_ragged([column[row].tolist() for row in rows])
        for name, column in split.columns.items()
    }
    return TokenizedSplit(columns=columns, rows=[split.rows[row] for row in rows])


def load_split(folder: Path, name: str) -> TokenizedSplit:
    """Read a split that `save_split` wrote. Raises UserError if the data have no such split."""
    if not (folder / f"{name}.safetensors").exists():
        raise UserError(f"the data have no split {name}, which this stage needs: add it to DATA=")
    tensors = load_file(folder / f"{name}.safetensors")
    keys = {key.split(".")[0] for key in tensors}
    columns = {
        key: Ragged(tokens=tensors[f"{key}.tokens"], offsets=tensors[f"{key}.offsets"])
        for key in keys
    }
    return TokenizedSplit(columns=columns, rows=read_lines(folder / f"{name}.jsonl"))


def pad_left(sequences: list[Tensor], pad_id: int) -> Tensor:
    """Stack sequences so that they end together: [B, longest]."""
    return pad_sequence(sequences, batch_first=True, padding_value=pad_id, padding_side="left")


def pad_right(sequences: list[Tensor], pad_id: int) -> Tensor:
    """Stack sequences so that they begin together: [B, longest]."""
    return pad_sequence(sequences, batch_first=True, padding_value=pad_id)
