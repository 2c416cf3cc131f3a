"""Assertions that many tests share: equal tensors, and errors of one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stages.config.errors import UserError


def close(found: torch.Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    """Assert equal shapes and every element within the tolerance; NaN equals nothing."""
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def refused_by(capsys: Any, command: Callable[..., Any], *words: str) -> str:
    """The one line with which a command, given these words, ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        command([*words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def refusal_of(call: Callable[..., Any], *values: Any, **named: Any) -> str:
    """The one line of the UserError that a call raises."""
    with pytest.raises(UserError) as refused:
        call(*values, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)
