"""A Python function in place of a reward model (`reward.function=module:function`).

The module is a file in the working folder. `function(queries, responses, rows)` gets a list of
query texts, a list of response texts without EOS, and what the user's rows hold in addition (`id`,
`reference`, other fields). It returns a number for each response.

A row is looked up by the text of its query. If several rows have the same query, the function gets
the last of them for each.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stages.config.checks import UserError, first_line
from stages.runs.files import read_json, read_lines, write_json, write_lines

RECORD = "reward.json"
ROWS = "rows.jsonl"
TEXT_SHOWN = 60  # characters of a response in an error message
RewardFunction = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float]]


class TextReward(nn.Module):
    """A function of texts in the place of a reward model."""

    def __init__(
        self,
        function: str,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[dict[str, Any]],
        bias: float = 0.0,
    ) -> None:
        """`rows` are those that the function may get; each holds its query's text as `query`."""
        super().__init__()
        self.name = function
        self.function = load_function(function)
        self.tokenizer = tokenizer
        self.bias = bias  # added to every number, reward units
        self.rows = {row["query"]: row for row in rows}

    def scores(self, queries: Tensor, responses: Tensor, pad_id: int) -> Tensor:
        """Score each response.

        Shapes: queries [B, Q] left-padded, responses [B, T] right-padded -> [B], reward units.
        """
        query_texts = self._decode(queries, dropped_ids={pad_id, self.tokenizer.bos_token_id})
        response_texts = self._decode(responses, dropped_ids={pad_id, self.tokenizer.eos_token_id})
        numbers = self._call(query_texts, [text.strip() for text in response_texts])
        return torch.tensor(numbers, device=responses.device, dtype=torch.float32) + self.bias

    def _decode(self, token_ids: Tensor, dropped_ids: set[int | None]) -> list[str]:
        kept_ids = []
        for row in token_ids.tolist():
            kept_ids.append([token_id for token_id in row if token_id not in dropped_ids])
        texts: list[str] = self.tokenizer.batch_decode(kept_ids)
        return texts

    def _call(self, queries: list[str], responses: list[str]) -> list[float]:
        """The function's numbers. Raises UserError, which names a text, for anything else."""
        rows = [self.rows.get(query, {}) for query in queries]
        try:
            numbers = [float(number) for number in self.function(queries, responses, rows)]
            _check_numbers(numbers, expected=len(queries))
        except Exception as error:  # whatever the user's function raises
            if len(queries) > 1:
                # Call it with one text at a time, to name the one that fails.
                for query, response in zip(queries, responses, strict=True):
                    self._call([query], [response])
            raise UserError(
                f"reward.function={self.name}: {type(error).__name__}: {first_line(error)}, "
                f"for {responses[0][:TEXT_SHOWN]!r}"
            ) from None
        return numbers

    def save(self, folder: Path) -> None:
        """Write what `load_text_reward` reads; the tokenizer is saved separately."""
        write_json(folder / RECORD, {"function": self.name, "bias": self.bias})
        write_lines(folder / ROWS, self.rows.values())


def _check_numbers(numbers: list[float], *, expected: int) -> None:
    if len(numbers) != expected:
        raise ValueError(f"returned {len(numbers)} numbers for {expected} texts")
    for number in numbers:
        if not math.isfinite(number):
            raise ValueError(f"returned {number}")


def load_text_reward(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TextReward:
    """The `TextReward` that was saved in a folder."""
    record = read_json(folder / RECORD)
    return TextReward(
        function=record["function"],
        tokenizer=tokenizer,
        rows=read_lines(folder / ROWS),
        bias=record["bias"],
    )


def load_function(name: str) -> RewardFunction:
    """Import the function `module:function` names. Raises UserError if that fails."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
        return cast(RewardFunction, getattr(module, function_name))
    except Exception as error:  # whatever the user's module raises
        raise UserError(
            f"reward.function={name} does not load ({type(error).__name__}: {first_line(error)}): "
            "correct the name or the module"
        ) from None
    finally:
        sys.path.pop(0)
