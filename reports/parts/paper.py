"""The paper's numbers (paper.json), and which of them stand beside a run."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from reports.parts.cells import Number
from reports.parts.words import number, percent

PAPER = Path(__file__).parents[1] / "paper.json"
PREFIX = "pythia-"
SIZES = ("1b", "2.8b", "6.9b")


def load() -> dict[str, Any]:
    """All of paper.json."""
    numbers: dict[str, Any] = json.loads(PAPER.read_text(encoding="utf-8"))
    return numbers


def is_comparable(preset: str) -> bool:
    """Whether a preset is the paper's set-up: a Pythia model on the real data."""
    return preset.startswith(PREFIX)


def size_of(preset: str) -> str | None:
    """The paper's name for a preset's size, where the paper has that size."""
    size = preset.removeprefix(PREFIX)
    return size if is_comparable(preset) and size in SIZES else None


def source(entry: dict[str, Any]) -> str:
    """Where a number comes from and how far to trust it."""
    return f"{entry['source']} ({entry['label']})"


# Number of the paper -> the key in a run's row, and how it is written.
COMPARED: tuple[tuple[str, str, Callable[[float | None], Number]], ...] = (
    ("sft_rougeL", "sft/rougeL", partial(number, digits=4)),
    ("rm_accuracy", "accuracy", percent),
    ("sft_win_rate", "sft/win_rate", percent),
    ("ppo_win_rate", "ppo/win_rate", percent),
    ("sft_tokens", "sft/tokens", partial(number, digits=1)),
    ("ppo_tokens", "ppo/tokens", partial(number, digits=1)),
    ("rm_gpt_agreement", "ppo/rm_agrees", percent),
    ("ppo_kl", "kl", partial(number, digits=1)),
    ("ppo_scores", "scores", number),
)


def caption() -> str:
    """What to know before comparing with the paper."""
    numbers = load()
    return (
        f"The paper ({numbers['papers']['P1']}) gives means over {len(numbers['seeds'])} seeds. Its"
        f" judge was {numbers['judge']}; win rates of different judges do not compare, for the"
        " same policy can move by tens of points."
    )
