"""A Python function in place of a reward model (`reward.function=module:function`).

The module is a file in the working folder. `function(queries, responses, rows)` gets a list of
query texts, a list of response texts without EOS, and a list of dicts: the columns of the user's
rows, plus `id`, `query` and `reference` unless a row has a column of that name. It returns a number
for each response.
"""

import importlib
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from stages.config.errors import UserError, first_line
from stages.data.schemas import COLUMNS
from stages.runs.files import read_json, write_json

RECORD = "reward.json"
TEXT_SHOWN = 60  # characters of a response in an error message
FACTS_SHOWN = ("id", "title", "query", "reference")
"""The fields that a function gets besides the user's columns."""
Facts = Mapping[str, Any]
"""The fields that a tokenized split keeps of each row, besides tokens."""
RewardFunction = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float]]


class TextReward(nn.Module):
    """A function of texts in place of a reward model."""

    def __init__(
        self, function: str, tokenizer: PreTrainedTokenizerBase, bias: float = 0.0
    ) -> None:
        super().__init__()
        self.name = function
        self.function = load_function(function)
        self.tokenizer = tokenizer
        self.bias = bias  # added to every number, reward units

    def scores(
        self, queries: Tensor, responses: Tensor, facts: Sequence[Facts], pad_id: int
    ) -> Tensor:
        """Score each response.

        `facts` has those of each query's row, or is empty if the texts are not from the data.
        Shapes: queries [B, Q] left-padded, responses [B, T] right-padded -> [B], reward units.
        """
        query_texts = self._decode(queries, dropped_ids={pad_id, self.tokenizer.bos_token_id})
        response_texts = self._decode(responses, dropped_ids={pad_id, self.tokenizer.eos_token_id})
        rows: list[dict[str, Any]] = [{} for _ in query_texts]
        if facts:
            rows = [function_row(facts_of_row) for facts_of_row in facts]
            query_texts = [
                facts_of_row.get("query", decoded)
                for facts_of_row, decoded in zip(facts, query_texts, strict=True)
            ]
        numbers = self._call(query_texts, [text.strip() for text in response_texts], rows)
        return torch.tensor(numbers, device=responses.device, dtype=torch.float32) + self.bias

    def _decode(self, token_ids: Tensor, dropped_ids: set[int | None]) -> list[str]:
        kept_ids = []
        for row in token_ids.tolist():
            kept_ids.append([token_id for token_id in row if token_id not in dropped_ids])
        texts: list[str] = self.tokenizer.batch_decode(kept_ids)
        return texts

    def _call(
        self, queries: list[str], responses: list[str], rows: list[dict[str, Any]]
    ) -> list[float]:
        """The function's numbers. Raises UserError, with file and line, for anything else."""
        try:
            # Copies, so that a function that changes its arguments changes nothing here.
            return _as_numbers(self.function([*queries], [*responses], [*rows]), len(responses))
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            problem = self._describe(error)

        # Call it with one text at a time, to find one that fails if others do not.
        failing = []
        for query, response, row in zip(queries, responses, rows, strict=True):
            try:
                _as_numbers(self.function([query], [response], [row]), 1)
            except (Exception, SystemExit) as error:
                if self._describe(error) == problem:
                    failing.append(response)
        if 0 < len(failing) < len(responses):
            problem += f", for {failing[0][:TEXT_SHOWN]!r}"
        raise UserError(f"reward.function={self.name}: {problem}") from None

    def _describe(self, error: BaseException) -> str:
        """What went wrong, after the line of the user's code if the error was raised there."""
        if isinstance(error, _WrongNumbersError):
            return str(error)
        place = place_of_error(error, self.name.partition(":")[0])
        code = getattr(self.function, "__code__", None)
        if not place and code is not None:
            # The call itself failed, such as for a wrong number of arguments.
            place = f"{Path(code.co_filename).name}:{code.co_firstlineno}: "
        return place + text_of_error(error)

    def save(self, folder: Path) -> None:
        """Write what `load_text_reward` reads; the tokenizer is saved separately."""
        write_json(folder / RECORD, {"function": self.name, "bias": self.bias})


class _WrongNumbersError(Exception):
    """A function has returned something other than a finite number for each response."""


def _as_numbers(returned: Any, expected: int) -> list[float]:
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
        raise _WrongNumbersError(
            f"returned {type(returned).__name__} instead of a list of {expected} numbers"
        )
    numbers = []
    for number in returned:
        try:
            numbers.append(float(number))
        except (TypeError, ValueError):
            raise _WrongNumbersError(
                f"returned {str(number)[:TEXT_SHOWN]!r}, which is not a number"
            ) from None
    if len(numbers) != expected:
        raise _WrongNumbersError(f"returned {len(numbers)} numbers for {expected} texts")
    for number in numbers:
        if not math.isfinite(number):
            raise _WrongNumbersError(f"returned {number}")
    return numbers


def function_row(facts: Facts) -> dict[str, Any]:
    """The dict that a function gets for a row: our fields, overridden by the user's columns."""
    shown = {name: facts[name] for name in FACTS_SHOWN if name in facts}
    return shown | facts.get(COLUMNS, {})


def text_of_error(error: BaseException) -> str:
    """An error's name and the first line of its text."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called: return numbers or raise an exception"
    return f"{type(error).__name__}: {first_line(error)}"


def place_of_error(error: BaseException, module: str) -> str:
    """`file:line: ` of the last line of a user's module that led to an error, or an empty text."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: "
    relative = Path(*module.split(".")).with_suffix(".py")
    imported = sys.modules.get(module)
    file = Path(getattr(imported, "__file__", None) or relative).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f"{relative}:{lines[-1]}: " if lines else ""


def load_text_reward(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TextReward:
    """The `TextReward` that was saved in a folder."""
    record = read_json(folder / RECORD)
    return TextReward(function=record["function"], tokenizer=tokenizer, bias=record["bias"])


def load_function(name: str) -> RewardFunction:
    """Import the function `module:function` names. Raises UserError if that fails."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        problem = place_of_error(error, module_name) + text_of_error(error)
        raise UserError(
            f"reward.function={name} does not load ({problem}): correct the name or the module"
        ) from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise UserError(
            f"reward.function={name} is of type {type(function).__name__}: name a function"
        )
    return cast(RewardFunction, function)
