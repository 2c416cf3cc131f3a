"""Tokenised posts and comparisons as stages read them: ragged splits on disk, padded batches.

Tokens are kept ragged and padded only when a batch is made, so no result depends on padding.
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

from stages.running.files import read_lines, write_lines
from stages.settings.checks import UserError


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
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].long()

    def lengths(self) -> Tensor:
        """Tokens of each sequence, [sequences] int64."""
        return self.offsets.diff()


@dataclass(frozen=True, kw_only=True)
class TokenizedSplit:
    """One split: token columns of equal length, and what is known of each row beside tokens."""

    columns: dict[str, Ragged]
    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)


def make_ragged(sequences: Iterable[list[int]]) -> Ragged:
    """Lay token lists end to end."""
    arrays = [np.asarray(sequence, dtype=np.int32) for sequence in sequences]
    offsets = np.cumsum([0, *map(len, arrays)])
    return Ragged(torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(offsets))


def save_split(split: TokenizedSplit, folder: Path, name: str) -> None:
    """Write a split as `<name>.safetensors` and `<name>.jsonl`."""
    tensors = {f"{key}.tokens": column.tokens for key, column in split.columns.items()}
    tensors |= {f"{key}.offsets": column.offsets for key, column in split.columns.items()}
    save_file(tensors, folder / f"{name}.safetensors")
    write_lines(folder / f"{name}.jsonl", split.rows)


def rows_of(split: TokenizedSplit, rows: Sequence[int]) -> TokenizedSplit:
    """Some rows of a split as a split."""
    columns = {
        name: make_ragged([column[row].tolist() for row in rows])
        for name, column in split.columns.items()
    }
    return TokenizedSplit(columns=columns, rows=[split.rows[row] for row in rows])


def load_split(folder: Path, name: str) -> TokenizedSplit:
    """Read a split that `save_split` wrote. Raises UserError where the data have no such split."""
    if not (folder / f"{name}.safetensors").exists():
        raise UserError(f"the data have no {name}, which this stage needs: add it to DATA=")
    tensors = load_file(folder / f"{name}.safetensors")
    keys = {key.split(".")[0] for key in tensors}
    columns = {key: Ragged(tensors[f"{key}.tokens"], tensors[f"{key}.offsets"]) for key in keys}
    return TokenizedSplit(columns=columns, rows=read_lines(folder / f"{name}.jsonl"))


def pad_left(sequences: list[Tensor], pad_id: int) -> Tensor:
    """Stack sequences so that they end together: [B, longest]."""
    return pad_sequence(sequences, batch_first=True, padding_value=pad_id, padding_side="left")


def pad_right(sequences: list[Tensor], pad_id: int) -> Tensor:
    """Stack sequences so that they begin together: [B, longest]."""
    return pad_sequence(sequences, batch_first=True, padding_value=pad_id)
