"""A reward of one's own: `reward.function=module:function` where else a reward model stands.

The module lies in the working folder. `function(queries, responses, rows)` gets lists of texts and
of what the user's rows hold beside them (`id`, `reference`, other fields), and gives a number for
each. No response holds its EOS.
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

from stages.running.files import read_json, read_lines, write_json, write_lines
from stages.settings.checks import UserError, first_line

RECORD, ROWS = "reward.json", "rows.jsonl"
Reward = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float]]


def load_function(name: str) -> Reward:
    """The function of `module:function`. Raises UserError where there is none."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return cast(Reward, getattr(importlib.import_module(module), function))
    except Exception as error:  # whatever the user's module raises
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"reward.function={name} does not load ({what}): correct it") from None
    finally:
        sys.path.pop(0)


class TextReward(nn.Module):
    """A function of texts in the place of a reward model."""

    def __init__(
        self,
        function: str,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[dict[str, Any]],
        bias: float = 0.0,
    ) -> None:
        super().__init__()
        self.name, self.function, self.tokenizer = function, load_function(function), tokenizer
        self.bias = bias  # added to every number, reward units
        self.rows = {row["query"]: row for row in rows}

    def scores(self, queries: Tensor, responses: Tensor, pad_id: int) -> Tensor:
        """The function's number for each text, [B]; shapes as in `score_responses`."""
        texts = self._texts(queries, {pad_id, self.tokenizer.bos_token_id})
        answers = self._texts(responses, {pad_id, self.tokenizer.eos_token_id})
        numbers = self._numbers(texts, [answer.strip() for answer in answers])
        return torch.tensor(numbers, device=responses.device, dtype=torch.float32) + self.bias

    def _texts(self, rows: Tensor, without: set[int | None]) -> list[str]:
        shown = [[token for token in row if token not in without] for row in rows.tolist()]
        texts: list[str] = self.tokenizer.batch_decode(shown)
        return texts

    def _numbers(self, queries: list[str], responses: list[str]) -> list[float]:
        rows = [self.rows.get(query, {}) for query in queries]
        try:
            numbers = [float(number) for number in self.function(queries, responses, rows)]
            if len(numbers) != len(queries):
                raise ValueError(f"gave {len(numbers)} numbers for {len(queries)} texts")
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"gave {next(x for x in numbers if not math.isfinite(x))}")
        except Exception as error:  # whatever the user's function raises
            if len(queries) > 1:  # one text at a time, to name the one at fault
                for query, response in zip(queries, responses, strict=True):
                    self._numbers([query], [response])
            what = f"{type(error).__name__}: {first_line(error)}"
            text = responses[0][:60]
            raise UserError(f"reward.function={self.name}: {what}, for {text!r}") from None
        return numbers

    def save(self, folder: Path) -> None:
        """Write what `load_text_reward` reads, beside the tokenizer."""
        write_json(folder / RECORD, {"function": self.name, "bias": self.bias})
        write_lines(folder / ROWS, self.rows.values())


def load_text_reward(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TextReward:
    """What `TextReward.save` wrote."""
    record = read_json(folder / RECORD)
    return TextReward(record["function"], tokenizer, read_lines(folder / ROWS), record["bias"])
