"""Runs stages in a folder, as the pipeline does."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from stages.__main__ import run_stage
from stages.config.environment import is_one_of_several
from stages.config.error_messages import in_one_line
from stages.config.options import config_from_arguments
from stages.config.stages import STAGES
from stages.pipeline.start import errors_end_process
from stages.runs.make_command import make_command
from stages.runs.signals import stopping_on_signals


def run_module(module: Any, arguments: list[str], stage: str = "") -> None:
    """Run the stage of a module with the options of a run; an error ends in one line."""
    stages = [name for name, row in STAGES.items() if row.module == module.__name__]
    stage = stage or (stages[0] if stages else "")
    if module.__name__ == "eval.outputs":
        stage = "summaries"
    with in_one_line(), errors_end_process():
        config = config_from_arguments(arguments, "a stage")
        command = make_command(config, stage)
        with stopping_on_signals("" if is_one_of_several() else command):
            run_stage(config, stage, command)


def make_stages(root: Path, stages: Iterable[Any], arguments: list[str]) -> None:
    """Run the stages of these modules in a working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage in stages:
            run_module(stage, arguments)
