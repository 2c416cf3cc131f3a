"""Runs the stages of a run in turn: those that are missing or stale, up to the first that fails.

Each stage is called in this process. If there is a launcher, stages that train or run a model are
started by it instead, as `<launcher> -m stages --stage ppo ...`.
"""

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from stages.config.checks import say_error
from stages.config.command_line import Request
from stages.config.config import Config, UserError
from stages.config.stages import row_of
from stages.pipeline.launch import run_launched
from stages.pipeline.terminal import Terminal
from stages.pipeline.wanted import (
    check_rows,
    check_settings,
    lacking,
    reason,
    replaced_stages,
    wanted_stages,
    warnings,
)
from stages.runs.manifest import lock_of, partial_of, read_manifest, stage_folder, why_not
from stages.runs.run import held, move_aside, put_in_place
from stages.runs.signals import handled_signals


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that was requested, its config, and the targets that it is to reach."""

    request: Request
    config: Config
    targets: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.config.name} seed {self.config.seed}"


class StageFailedError(Exception):
    """A launched stage has failed; it has said why."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a stage ended with status {status}")
        self.status = status


@dataclass(kw_only=True)
class Runner:
    """Runs the stages of runs, one after the other."""

    run_stage: Callable[[Config, str], None]
    """Runs one stage in this process."""
    launcher: Sequence[str] = ()
    """The words that start a stage in several processes; none: all stages run in this process."""
    processes: int = 1
    """How many processes a launched stage has, as far as that is known here."""
    max_cost: float = 0
    """The most that a judge may cost, in USD; 0: what the settings say."""
    replace: str = ""
    """What to rerun although it has finished: `1` for the targets, or stages."""
    resume_command: str = "the same command"
    """What a launched stage names if it fails."""
    on_finished: Callable[[Config, str], None] = lambda config, stage: None
    """Called after each stage that has finished."""
    terminal: Terminal = field(default_factory=Terminal)

    def config_of(self, planned: PlannedRun) -> Config:
        """Return the config of a run, with the most that a judge may cost."""
        config = planned.config
        if not self.max_cost:
            return config
        return config.changed(judge=config.judge.changed(max_cost=self.max_cost))

    def plan(self, planned: PlannedRun) -> dict[str, str]:
        """Return the stages that would run, with the reason.

        Raises UserError for what one of these stages would refuse, before the first of them runs.
        """
        config = self.config_of(planned)
        steps = lacking(config, planned.targets, self.replace)
        check_settings(config, list(steps), self.processes, capped=config.judge.max_cost > 0)
        return steps

    def warn(self, planned: PlannedRun, steps: Mapping[str, str]) -> None:
        """Print what is odd about finished stages that are kept, such as other code."""
        stages = wanted_stages(planned.config, planned.targets)
        kept = [stage for stage in stages if stage not in steps]
        for line in warnings(planned.config, kept):
            print(f"{planned.label}: {line}", file=sys.stderr, flush=True)

    def run(self, planned: PlannedRun) -> list[str]:
        """Run what is missing or stale; return the stages that ran.

        Raises UserError for finished stages with other settings, and StageFailedError.
        """
        config = self.config_of(planned)
        stages = [
            stage
            for stage in wanted_stages(config, planned.targets)
            if not config.is_upstreams(stage)
        ]
        finish_renaming(config, stages)
        self.warn(planned, self.plan(planned))
        replaced = replaced_stages(config, self.replace, planned.targets, stages)
        move_all_aside(config, replaced)

        ran = []
        self.terminal.start(planned.label, stages)
        for stage in stages:
            # Earlier stages of this loop decide whether this one is stale.
            problem = why_not(config, stage)
            if problem is None:
                self.terminal.skip(config, stage)
                continue
            if stage != "base":  # which counts the rows
                check_rows(config, stages)
            why = "rerun by REPLACE" if stage in replaced else reason(config, stage, problem)
            self.terminal.begin(config, stage, why)
            self.run_one(config, stage, planned.request)
            self.on_finished(config, stage)
            self.terminal.finish(config, stage)
            ran.append(stage)
        return ran

    def run_one(self, config: Config, stage: str, request: Request) -> None:
        """Run one stage, here or by the launcher."""
        if not (self.launcher and row_of(stage, config.kind).computes):
            self.run_stage(config, stage)
            return
        status = run_launched(
            [
                *self.launcher,
                *("-m", "stages", "--stage", stage),
                f"--resume-command={self.resume_command}",
                *request.arguments,
            ]
        )
        if status == 128 + signal.SIGKILL:  # it could not say so itself
            raise UserError(
                f"stage {stage} was killed (SIGKILL), by somebody or for lack of memory:"
                " the same command, without REPLACE, resumes it"
            )
        if status - 128 in handled_signals():
            # A cluster may stop only the launched processes. srun ends with the same status if one
            # of its tasks fails.
            name = signal.Signals(status - 128).name
            say_error(
                f"stage {stage} was ended by {name}: if one of its processes failed, its error is"
                f" above; otherwise `{self.resume_command}` resumes it"
            )
        if status:
            raise StageFailedError(status)


def finish_renaming(config: Config, stages: Sequence[str]) -> None:
    """Rename stages that had finished when their process was killed, just before the rename."""
    for stage in stages:
        folder = stage_folder(config, stage)
        if read_manifest(partial_of(folder)) is not None:
            with held(lock_of(folder), stage):
                put_in_place(config, stage)


def move_all_aside(config: Config, stages: Sequence[str]) -> None:
    """Move stages aside, finished or half done.

    Raises UserError, and moves nothing, if one of them is running elsewhere.
    """
    folders = {stage: stage_folder(config, stage) for stage in stages}
    with ExitStack() as locks:
        for stage, folder in folders.items():
            if folder.parent.is_dir():
                locks.enter_context(held(lock_of(folder), stage))
        for stage, folder in folders.items():
            for path in (folder, partial_of(folder)):
                if path.is_dir():
                    print(f"{stage}: moved to {move_aside(path)}", flush=True)
