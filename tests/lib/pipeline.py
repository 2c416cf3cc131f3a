"""A runner whose stages are one file each, and `make` in a folder of the test's own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.config.command_line import Request, make_config
from stages.config.config import Config
from stages.config.stages import STAGES
from stages.pipeline.launch import StageFailedError
from stages.pipeline.runner import PlannedRun, Runner
from stages.runs.manifest import stage_folder
from stages.runs.run import open_stage
from tests.lib.places import ROOT

TINY = make_config("tiny")
EVALUATED = [name for name in STAGES if not STAGES[name].optional]
RESULTS: dict[str, dict[str, Any]] = {}  # what a stage is to find; tests put it there
FAILED = 7  # the status of a stage that is to fail


def finish(config: Config, stage: str, text: str = "made") -> Path:
    """Write a finished stage with the inputs of the table and one output file."""
    with open_stage(config, stage) as run:
        for name in (*STAGES[stage].inputs, *STAGES[stage].joined_by):
            if stage_folder(config, name).exists() or name in STAGES[stage].inputs:
                run.require(name)
        (run.partial / "out.txt").write_text(text)
        (run.partial / "headline.txt").write_text(f"{stage} of {config.name}\n")
        run.finish(RESULTS.get(stage, {}))
    return run.folder


class Recorder(Runner):
    """A runner that remembers the stages that it has run, as (name, seed, stage)."""

    def __init__(self, fails: tuple[str, int, str] | str = "", **options: Any) -> None:
        """`fails`: the stage that is to fail, or its name, seed and stage."""
        super().__init__(run_stage=self._run_stage, **options)
        self.fails = fails
        self.made: list[tuple[str, int, str]] = []

    def _run_stage(self, config: Config, stage: str) -> None:
        made = (config.name, config.seed, stage)
        if self.fails in (stage, made):
            raise StageFailedError(FAILED)
        finish(config, stage)
        self.made.append(made)

    @property
    def stages(self) -> list[str]:
        """The stages that it has run."""
        return [stage for _, _, stage in self.made]


def planned(config: Config = TINY, *targets: str) -> PlannedRun:
    """Return a config as a run that was requested; it is evaluated if no target is given."""
    request = Request(
        preset=config.preset,
        seed=config.seed,
        name="" if config.name == config.preset else config.name,
        upstream=config.upstream,
        overrides=config.overrides,
    )
    return PlannedRun(request=request, config=config, targets=targets or ("eval",))


def make(config: Config = TINY, *targets: str, **options: Any) -> list[str]:
    """Run what a config lacks, as `make` would; return the stages that ran."""
    return Recorder(**options).run(planned(config, *targets))


def named(*overrides: str, **changes: Any) -> Config:
    """Return the config of a run called `mine`."""
    return make_config("tiny", name="mine", overrides=overrides, **changes)


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return all files below a folder with their bytes and times."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def typed(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `make` in a folder, with this interpreter as it is; `variables`: of the environment."""
    command = ["make", "-f", str(ROOT / "Makefile"), "VENV=", f"PYTHON={sys.executable}", *words]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment | variables
    )
