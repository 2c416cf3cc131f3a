"""What a command does with each stage of a run, and why. Planning runs and writes nothing.

A command runs those stages leading to its targets that are missing or stale, and those that REPLACE
asks for:

    REPLACE=1             reruns the stages of the targets
    REPLACE="ppo rloo"    reruns these stages and all that depend on either

Stages that an upstream supplies never run. Changed code does not rerun anything, but a warning
names the stages that ran with different code. Errors that a later stage would raise are raised now,
before the first one runs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.config.config import Config
from stages.config.errors import UserError, first_few, unknown
from stages.config.fitting import check_batch_divides, check_batch_not_larger_than_data
from stages.config.judge_models import check_asking
from stages.config.sections import POSTS
from stages.config.stages import (
    GIVEN_BY,
    LEFT_OUT,
    STAGES,
    TRAINED,
    TRAINING_SPLITS,
    stage_row,
    with_inputs,
)
from stages.runs.attempts import check_resumable, is_resumable, resume_point
from stages.runs.differences import unknown_settings
from stages.runs.gold import check_gold
from stages.runs.manifest import partial_of, read_manifest, stage_folder
from stages.runs.staleness import MISSING, Problem, changed_code, find_problem, refusal

REPLACE_TARGETS = "1"
"""The value of REPLACE that stands for the stages of the targets."""
TARGETS = tuple(dict.fromkeys(row.target for row in STAGES.values()))


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a command does with one stage of a run."""

    stage: str
    reason: str = ""
    """Why it runs, to be shown in brackets; empty if it has finished and is kept."""
    is_replaced: bool = False
    """Whether REPLACE asks for it: its result, if there is one, moves aside first."""
    has_rerun_inputs: bool = False
    """Whether one of its inputs is rerun first. Then it runs only if it is missing or stale after
    that: an input with the same result as before changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command does with a run."""

    steps: tuple[Step, ...]
    """One step for each stage leading to the targets, in order, without those of an upstream."""
    warnings: tuple[str, ...]
    """Lines about finished stages that are kept even though code or settings have changed."""

    @property
    def stages(self) -> list[str]:
        """All stages that lead to the targets, including finished ones."""
        return [step.stage for step in self.steps]

    @property
    def reasons(self) -> dict[str, str]:
        """The stages that will run, with the reason."""
        return {step.stage: step.reason for step in self.steps if step.reason}

    @property
    def replaced(self) -> list[str]:
        """The stages that REPLACE asks for."""
        return [step.stage for step in self.steps if step.is_replaced]


def make_plan(
    config: Config, targets: Sequence[str], replace: str = "", processes: int = 1
) -> Plan:
    """Return what a command does to reach its targets with a run.

    Raises UserError for an unknown target, for a stage that only REPLACE may rerun, for a stage
    that an upstream lacks, for a checkpoint of other settings, and if a stage could not run.
    """
    wanted = wanted_stages(config, targets)
    own = [stage for stage in wanted if not config.is_from_upstream(stage)]
    replaced = replaced_stages(config, replace, targets, own)

    for stage in wanted:
        if config.is_from_upstream(stage):
            problem = find_problem(config, stage)
            if problem is not None:
                raise refusal(config, stage, problem)

    steps: list[Step] = []
    for stage in own:
        if stage in replaced:
            steps.append(Step(stage=stage, reason="rerun by REPLACE", is_replaced=True))
            continue

        row = stage_row(stage, config.kind)
        inputs = (*row.inputs, *row.joined_by)
        rerun_inputs = [step.stage for step in steps if step.reason and step.stage in inputs]
        problem = find_problem(config, stage)
        if problem is not None:
            if problem.needs_replace:
                raise refusal(config, stage, problem)
            check_resumable(config, stage)
            reason = reason_to_run(config, stage, problem)
        elif rerun_inputs:
            reason = f"if the result of {rerun_inputs[-1]} changes"
        else:
            reason = ""
        steps.append(Step(stage=stage, reason=reason, has_rerun_inputs=bool(rerun_inputs)))

    to_run = [step.stage for step in steps if step.reason]
    kept = [stage for stage in wanted if stage not in to_run]
    check_can_run(config, to_run, processes)
    warnings = [*code_warnings(config, kept), *settings_warnings(config, kept)]
    return Plan(steps=tuple(steps), warnings=tuple(warnings))


# -- which stages ----------------------------------------------------------------------------------


def stages_of_targets(config: Config, targets: Sequence[str]) -> set[str]:
    """Return the stages that these targets name.

    Raises UserError for an unknown target, and for a training target in a run without training.
    """
    stages: set[str] = set()
    left_out = set(LEFT_OUT[config.kind])
    for target in targets:
        named = {name for name, row in STAGES.items() if target in (name, row.target)}
        if not named:
            raise unknown("target", target, (*TARGETS, *STAGES))
        # Each kind of run has different stages of `eval`.
        if named & left_out and target != "eval":
            raise UserError(refusal_text(target, config.kind))
        stages |= named - left_out

    # A labeled file of summaries is also the data for the judge's calibration.
    if config.outputs.label and "report" in stages:
        stages.add("calibration")
    return stages


def refusal_text(target: str, kind: str) -> str:
    """Return why a run of this kind does not have a target, and what to do."""
    if kind == TRAINED:
        return f"{target} needs a released policy: add POLICY= (SET=released.policy=...)"
    variable = GIVEN_BY[kind]
    return f"{target} trains, but {variable} is judged without training: leave out one of the two"


def wanted_stages(config: Config, targets: Sequence[str]) -> list[str]:
    """Return the stages that lead to these targets, in order, including those of an upstream.

    Finished optional stages are included: a trained DPO policy is summarized and judged with the
    others. Raises UserError as `stages_of_targets` does.
    """
    needed = with_inputs(stages_of_targets(config, targets), config.kind)
    joining = set()
    for stage in needed:
        for name in STAGES[stage].joined_by:
            has_part = name not in LEFT_OUT[config.kind]
            if has_part and read_manifest(stage_folder(config, name)) is not None:
                joining.add(name)
    return with_inputs({*needed, *joining}, config.kind)


def replaced_stages(
    config: Config, replace: str, targets: Sequence[str], own: Sequence[str]
) -> list[str]:
    """Return the stages that a REPLACE reruns, in the order of the run.

    `own`: the stages that the run does not take from an upstream. Raises UserError for another one.
    """
    if replace == REPLACE_TARGETS:
        stages = stages_of_targets(config, targets)
        return [stage for stage in own if stage in stages]

    named = replace.split()
    for stage in named:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if stage not in own:
            fix = f"add {STAGES[stage].target}"
            if config.is_from_upstream(stage):
                fix = "leave out UPSTREAM="
            raise UserError(f"REPLACE={stage}: no target of this command runs it: {fix}")

    replaced: list[str] = []
    for stage in own:
        row = stage_row(stage, config.kind)
        follows = any(name in replaced for name in (*row.inputs, *row.joined_by))
        if stage in named or follows:
            replaced.append(stage)
    return replaced


def reason_to_run(config: Config, stage: str, problem: Problem) -> str:
    """Return why a stage runs in which `find_problem` has found a problem."""
    if is_resumable(config, stage):
        partial = partial_of(stage_folder(config, stage))
        return resume_point(partial) or "started, no checkpoint yet"
    if problem == MISSING:
        return "not run yet"
    return problem.text


# -- errors before the first stage runs ------------------------------------------------------------


def check_can_run(config: Config, stages: Sequence[str], processes: int) -> None:
    """Raise UserError if one of these stages cannot run, or not with this number of processes."""
    if any("judge" in STAGES[stage].sections for stage in stages):
        check_asking(config)
        check_gold(config)
    for stage in stages_with_batches(config, stages):
        # Stages that train have a section of the same name.
        section: Any = getattr(config, stage, None)
        if hasattr(section, "batch_size"):
            check_batch_divides(
                stage,
                section.batch_size,
                processes,
                num_minibatches=getattr(section, "num_minibatches", 1),
                samples=getattr(section, "samples_per_query", 1),
            )


def stages_with_batches(config: Config, stages: Sequence[str]) -> list[str]:
    """Return the stages that may form batches: not `rm` if its reward comes from elsewhere."""
    return [stage for stage in stages if not (stage == "rm" and config.has_external_reward)]


def check_rows(config: Config, stages: Sequence[str]) -> None:
    """Raise UserError if the finished base stage has too few rows for one of these stages."""
    manifest = read_manifest(stage_folder(config, "base"))
    if manifest is None:
        return
    counts = manifest["results"].get("rows", {})
    rows = {split: counts_of_split["rows"] for split, counts_of_split in counts.items()}
    for stage in stages_with_batches(config, stages):
        split = TRAINING_SPLITS.get(stage)
        if split in rows:
            check_batch_not_larger_than_data(stage, getattr(config, stage).batch_size, rows[split])

    posts = rows.get(POSTS[1], config.eval.posts)
    if "summaries" in stages and config.eval.posts > posts:
        raise UserError(
            f"eval.posts is {config.eval.posts} but the validation split has {posts} posts: "
            "lower it, or 0 for all"
        )


# -- warnings --------------------------------------------------------------------------------------


def code_warnings(config: Config, stages: Sequence[str]) -> list[str]:
    """Return a line for each group of stages that ran with different code, and how to rerun them.

    `ppo ran with different code: stages/rl/advantages.py. To rerun: REPLACE=ppo`
    """
    stages_by_files: dict[str, list[str]] = {}
    for stage in stages:
        files = changed_code(config, stage)
        if files:
            stages_by_files.setdefault(first_few(files), []).append(stage)

    lines = []
    for files_text, names in stages_by_files.items():
        line = f"{', '.join(names)} ran with different code: {files_text}."
        own = [name for name in names if not config.is_from_upstream(name)]
        if own:
            line += f" To rerun: REPLACE={shlex.quote(' '.join(own))}"
        lines.append(line)
    return lines


def settings_warnings(config: Config, stages: Sequence[str]) -> list[str]:
    """Return a line for each stage that recorded settings that this version does not know."""
    lines = []
    for stage in stages:
        names = unknown_settings(config, stage)
        if names:
            lines.append(
                f"{stage} recorded settings that this version does not know: {first_few(names)}. "
                "They are ignored."
            )
    return lines
