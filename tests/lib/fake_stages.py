"""Stages that write one file instead of training: for tests of run folders and of what is stale."""

from contextlib import suppress
from pathlib import Path

from stages.config.command_line import Request
from stages.config.config import Config
from stages.config.stages import stage_row
from stages.pipeline.runner import PlannedRun, Runner
from stages.pipeline.status import plain_lines, statuses
from stages.runs.manifest import partial_of, stage_folder
from stages.runs.run import open_stage


def finish(config: Config, stage: str, text: str = "made") -> Path:
    """Finish a stage, with the inputs that it has in the table and an output file; its folder."""
    row = stage_row(stage, config.kind)
    with open_stage(config, stage) as run:
        for name in (*row.inputs, *row.joined_by):
            if name in row.inputs or stage_folder(config, name).exists():
                run.require(name)
        (run.partial / "out.txt").write_text(text)
        run.finish({"updates": 3})
    return run.folder


def finish_alone(config: Config, stage: str, text: str = "made") -> Path:
    """Finish a stage, with an output file and without its inputs; its folder."""
    with open_stage(config, stage) as run:
        (run.partial / "out.txt").write_text(text)
        run.finish({"updates": 3})
    return run.folder


def interrupt(config: Config, stage: str, update: int | None = None) -> Path:
    """Interrupt a stage, with a checkpoint after some updates if `update` is given.

    Returns its partial folder.
    """
    with suppress(KeyboardInterrupt), open_stage(config, stage) as run:
        run.resume.mkdir(exist_ok=True)
        if update is not None:
            (run.resume / f"checkpoint-{update:07d}").mkdir(exist_ok=True)
        raise KeyboardInterrupt
    return partial_of(stage_folder(config, stage))


def run_stages(config: Config, *targets: str, replace: str = "", text: str = "made") -> list[str]:
    """Run what is missing or stale for some targets, as the pipeline does; the stages that ran."""

    def run_stage(config: Config, stage: str) -> None:
        finish(config, stage, text)

    runner = Runner(run_stage=run_stage, replace=replace)
    return runner.run(PlannedRun(request=Request(), config=config, targets=targets))


def status_lines(name: str = "") -> list[str]:
    """The lines of `make status` about all runs, or about one."""
    return plain_lines(statuses(name))
