"""The paper's numbers (paper.json), and which of them can be compared with a run."""

import json
from pathlib import Path
from typing import Any

PAPER = Path(__file__).with_name("paper.json")
PREFIX = "pythia-"
SIZES = ("1b", "2.8b", "6.9b")


def load() -> dict[str, Any]:
    """Return all of paper.json."""
    numbers: dict[str, Any] = json.loads(PAPER.read_text(encoding="utf-8"))
    return numbers


def is_comparable(preset: str) -> bool:
    """Whether a preset is the paper's setup: a Pythia model on the real data."""
    return preset.startswith(PREFIX)


def size_of(preset: str) -> str | None:
    """Return the paper's name for a preset's size; None if the paper has no such size."""
    size = preset.removeprefix(PREFIX)
    return size if is_comparable(preset) and size in SIZES else None


def source(entry: dict[str, Any]) -> str:
    """Return where a number comes from and how reliable it is."""
    return f"{entry['source']} ({entry['label']})"
