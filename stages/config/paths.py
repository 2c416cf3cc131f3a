"""Folders: `runs/`, the names of runs in it, and settings that may name a folder.

RUNS is read as `paths.RUNS`, so that a test can move all runs to another folder.
"""

import os
from pathlib import Path

from stages.config.sections import HUB, RANDOM, TOY, TRAIN_TOKENIZER

RUNS = Path("runs")
RESERVED = ("bench", "bench-check", "cache", "judge_cache", "models", "peers", "reports")
"""Folders below `runs/` that are not runs."""
NO_RUN_NAME = f"names no run: give the name of a folder, and none of {', '.join(RESERVED)}"

FOLDER_SETTINGS = (
    "base.checkpoint",
    "base.tokenizer",
    "data.source",
    "released.policy",
    "released.reward_model",
    "outputs.file",
)
"""Settings that may name a folder or file of this machine."""
NO_FOLDERS = ("", TOY, HUB, RANDOM, TRAIN_TOKENIZER)
"""Their values that name neither a folder nor an id of the hub."""


def is_run_name(name: str) -> bool:
    """Return whether this may be the name of a run: a single folder that nothing else uses."""
    is_text = name.isprintable() and name == name.strip()  # without control characters
    return is_text and "/" not in name and name not in ("", ".", "..", *RESERVED)


def is_path(value: str) -> bool:
    """Return whether a setting names a place on this machine, as opposed to an id of the hub."""
    if value.startswith(("/", ".", "~")) or "\\" in value:
        return True
    return "/" in value and os.path.isdir(value)
