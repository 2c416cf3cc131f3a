"""Runs the stages of a run in turn, as planned, until one fails.

Each stage is called in this process. If there is a launcher, stages that train or run a model are
started by it instead, as `<launcher> -m stages --stage ppo ...`.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from stages.config.command_line import Request
from stages.config.config import Config
from stages.config.stages import stage_row
from stages.pipeline.launch import launch_stage
from stages.pipeline.plan import Plan, Step, check_rows, make_plan, reason_to_run, wanted_stages
from stages.pipeline.terminal import Terminal
from stages.runs.locks import held
from stages.runs.manifest import lock_of, partial_of, read_manifest, stage_folder
from stages.runs.run import move_aside, put_in_place
from stages.runs.staleness import find_problem


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A requested run, its config, and its targets."""

    request: Request
    config: Config
    targets: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.config.name} seed {self.config.seed}"


@dataclass(kw_only=True)
class Runner:
    """Runs the stages of runs, one after the other."""

    run_stage: Callable[[Config, str], None]
    """Runs one stage in this process."""
    launcher: Sequence[str] = ()
    """The words that start a stage in several processes; empty: all stages run in this process."""
    processes: int = 1
    """The number of processes of a launched stage, as far as it is known here."""
    max_cost: float = 0
    """Maximum cost of a judge, in USD. 0: the limit in the settings."""
    replace: str = ""
    """What to rerun even if it has finished: `1` for the targets, or names of stages."""
    resume_command: str = "the same command"
    """The command that a launched stage prints if it fails."""
    on_finished: Callable[[Config, str], None] | None = None
    """Called after each stage that has finished."""
    terminal: Terminal = field(default_factory=Terminal)

    def run(self, planned: PlannedRun) -> list[str]:
        """Run the stages that are missing or stale; return those that ran.

        Raises UserError as `make_plan` does, and StageFailedError.
        """
        config = planned.config
        finish_renaming(config, planned.targets)
        plan = self.plan(planned)
        print_warnings(planned, plan)
        move_all_aside(config, plan.replaced)

        ran = []
        self.terminal.start(planned.label, plan.stages)
        for step in plan.steps:
            reason = reason_now(config, step)
            if not reason:
                self.terminal.skip(config, step.stage)
                continue
            # The base stage counts the rows of the data.
            if step.stage != "base":
                check_rows(config, plan.stages)

            self.terminal.begin(config, step.stage, reason)
            row = stage_row(step.stage, config.kind)
            # MAX_COST is not a setting of the run: only stages that ask the judge record it.
            stage_config = self.limit_cost(config) if "judge" in row.sections else config
            if self.launcher and row.computes:
                launch_stage(self.launcher, step.stage, planned.request, self.resume_command)
            else:
                self.run_stage(stage_config, step.stage)
            if self.on_finished is not None:
                self.on_finished(stage_config, step.stage)
            self.terminal.finish(config, step.stage)
            ran.append(step.stage)
        return ran

    def show(self, planned: PlannedRun) -> None:
        """Print what `run` would do, and why, without writing anything. Raises the same errors."""
        plan = self.plan(planned)
        print_warnings(planned, plan)
        to_rename = stages_to_rename(planned.config, planned.targets)
        lines = []
        for stage, reason in plan.reasons.items():
            if stage in to_rename and stage not in plan.replaced:
                lines.append(f"would only rename the folder of {stage}, which has finished")
            else:
                lines.append(f"would run {stage} ({reason})")
        for line in lines or ["nothing to do"]:
            print(f"{planned.label}: {line}")

    def plan(self, planned: PlannedRun) -> Plan:
        """Return what this runner does with a run. Raises UserError as `make_plan` does."""
        return make_plan(
            self.limit_cost(planned.config),
            planned.targets,
            replace=self.replace,
            processes=self.processes,
        )

    def limit_cost(self, config: Config) -> Config:
        """Return a config with the maximum cost of the judge."""
        if not self.max_cost:
            return config
        return config.changed(judge=config.judge.changed(max_cost=self.max_cost))


def reason_now(config: Config, step: Step) -> str:
    """Return why a step runs, now that the steps before it are done; empty if it is kept.

    A step whose inputs were rerun depends on their results.
    """
    if not step.has_rerun_inputs:
        return step.reason
    problem = find_problem(config, step.stage)
    return "" if problem is None else reason_to_run(config, step.stage, problem)


def print_warnings(planned: PlannedRun, plan: Plan) -> None:
    """Print warnings about finished stages that are kept, such as changed code."""
    for line in plan.warnings:
        print(f"{planned.label}: {line}", file=sys.stderr, flush=True)


def stages_to_rename(config: Config, targets: Sequence[str]) -> list[str]:
    """Return the stages that were killed between writing their manifest and being renamed."""
    own = [stage for stage in wanted_stages(config, targets) if not config.is_from_upstream(stage)]
    return [
        stage for stage in own if read_manifest(partial_of(stage_folder(config, stage))) is not None
    ]


def finish_renaming(config: Config, targets: Sequence[str]) -> None:
    """Rename the folders of stages that were killed right after writing their manifest."""
    for stage in stages_to_rename(config, targets):
        with held(lock_of(stage_folder(config, stage)), stage):
            put_in_place(config, stage)


def move_all_aside(config: Config, stages: Sequence[str]) -> None:
    """Move stages aside, whether finished or not.

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
