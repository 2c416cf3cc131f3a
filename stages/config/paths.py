"""Folders: `runs/`, the names of runs, and the settings that may name a folder."""

import os
from pathlib import Path

from stages.config.sections import HUB, RANDOM, TOY, TRAIN_TOKENIZER

# Folders below runs/ that are not runs.
RESERVED = ("bench", "bench-check", "cache", "judge_cache", "models", "peers", "reports")
NO_RUN_NAME = f"names no run: give the name of a folder, and none of {', '.join(RESERVED)}"

RUNS = Path("runs")
# Settings that may name a folder of this machine, and their values when they do not.
PLACES = (
    "base.checkpoint",
    "base.tokenizer",
    "data.source",
    "released.policy",
    "released.reward_model",
    "outputs.file",
)
NO_FOLDERS = ("", TOY, HUB, RANDOM, TRAIN_TOKENIZER)


def is_run_name(name: str) -> bool:
    """Whether this may be the name of a run: a single folder that nothing else uses."""
    is_text = name.isprintable() and name == name.strip()  # without control characters
    return is_text and "/" not in name and name not in ("", ".", "..", *RESERVED)


def is_path(value: str) -> bool:
    """Whether a setting names a place on this machine, as opposed to an id of the hub."""
    if value.startswith(("/", ".", "~")) or "\\" in value:
        return True
    return "/" in value and os.path.isdir(value)
