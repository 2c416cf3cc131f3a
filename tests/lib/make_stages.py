"""Runs stages in a folder, as the command line does."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stages.pipeline.start import run_module


def make_stages(root: Path, stages: Iterable[Any], arguments: list[str]) -> None:
    """Run the stages of these modules in a working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage in stages:
            run_module(stage, arguments)
