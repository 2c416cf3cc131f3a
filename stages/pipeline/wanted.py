"""Which stages a command runs: those that lead to its targets, as far as they are missing or stale,
and those that REPLACE asks for. What the last stage would refuse is refused before the first.

REPLACE=1 reruns the stages of the targets. REPLACE="ppo rloo" reruns these stages and what follows
from either. Stages that an upstream supplies are never rerun. Changed code reruns nothing:
`code_warnings` names the stages that ran with other code.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.config import config as settings
from stages.config.checks import UserError, unknown
from stages.config.config import Config
from stages.config.fitting import check_batch_divides, check_batch_not_larger_than_data
from stages.config.judge_models import check_asking
from stages.config.sections import COMPARISONS, POSTS
from stages.config.stages import GIVEN_BY, NO_PART, STAGES, TRAINED, row_of, with_inputs
from stages.runs.machine import first_of
from stages.runs.manifest import (
    MISSING,
    RESUME,
    Problem,
    changed_code,
    check_gold,
    check_resumable,
    is_resumable,
    last_checkpoint,
    partial_of,
    read_manifest,
    refusal,
    stage_folder,
    unknown_settings,
    why_not,
)

GOALS = tuple(dict.fromkeys(row.goal for row in STAGES.values()))
ALL = "1"
ANEW = "as REPLACE asks"
TRAINING_SPLITS = {"sft": POSTS[0], "rm": COMPARISONS[0], "dpo": COMPARISONS[0]}


def stages_of(config: Config, goals: Sequence[str]) -> set[str]:
    """The stages that some targets name.

    Raises UserError for an unknown target, and for training in a run that trains nothing.
    """
    wanted: set[str] = set()
    left_out = set(NO_PART[config.kind])
    for goal in goals:
        named = {name for name, row in STAGES.items() if goal in (name, row.goal)}
        if not named:
            raise unknown("goal", goal, (*GOALS, *STAGES))
        if named & left_out and goal != "eval":
            raise UserError(no_part(goal, config.kind))
        wanted |= named - left_out

    # A file of summaries with labels is itself the judge's calibration data.
    if config.outputs.label and "report" in wanted:
        wanted.add("calibration")
    return wanted


def wanted_stages(config: Config, goals: Sequence[str]) -> list[str]:
    """The stages that lead to some targets, in order, with the optional ones that have finished.

    Raises UserError as `stages_of` does.
    """
    needed = with_inputs(stages_of(config, goals), config.kind)
    finished = set()
    for stage in needed:
        for name in STAGES[stage].joined_by:
            if read_manifest(stage_folder(config, name)) is not None:
                finished.add(name)
    return with_inputs({*needed, *finished.difference(NO_PART[config.kind])}, config.kind)


def no_part(goal: str, kind: str) -> str:
    """Why a target has no part in a run of this kind, and what to do."""
    if kind == TRAINED:
        return f"{goal} needs a released policy: add POLICY= (SET=released.policy=...)"
    variable = GIVEN_BY[kind]
    return f"{goal} trains, and {variable} is judged without training: leave out one of the two"


def lacking(config: Config, goals: Sequence[str], replace: str = "") -> dict[str, str]:
    """The stages that a command would run, and why.

    Some depend on the outcome of an earlier one. Raises UserError for a stage that only REPLACE may
    rerun, for a checkpoint of other settings, and for a stage that an upstream lacks.
    """
    wanted = wanted_stages(config, goals)
    own = [stage for stage in wanted if not config.is_upstreams(stage)]
    replaced = replaced_stages(config, replace, goals, own)

    steps: dict[str, str] = {}
    for stage in wanted:
        if stage in replaced:
            steps[stage] = ANEW
            continue
        problem = why_not(config, stage)
        row = row_of(stage, config.kind)
        rerun_inputs = [name for name in steps if name in (*row.inputs, *row.joined_by)]
        if problem is not None:
            if problem.needs_replace or stage not in own:
                raise refusal(config, stage, problem)
            check_resumable(config, stage)
            steps[stage] = reason(config, stage, problem)
        elif rerun_inputs:
            steps[stage] = f"if {rerun_inputs[-1]} comes out differently than before"
    return steps


def reason(config: Config, stage: str, problem: Problem) -> str:
    """Why a stage is to run (`problem` is that of `why_not`), to be read in brackets."""
    if is_resumable(config, stage):
        return kept(partial_of(stage_folder(config, stage))) or "begun, no checkpoint yet"
    if problem == MISSING:
        return "not run yet"
    return str(problem)


def kept(partial: Path) -> str:
    """From where an interrupted stage resumes; empty if it starts over."""
    update = last_checkpoint(partial)
    if update is not None:
        return f"resumes after update {update}"
    measured = [*(partial / RESUME).glob("*.jsonl"), *partial.glob("judgements.jsonl")]
    return "resumes after the part that has finished" if measured else ""


def warnings(config: Config, stages: Sequence[str]) -> list[str]:
    """Lines about finished stages that are kept although code or settings are other ones now."""
    return code_warnings(config, stages) + settings_warnings(config, stages)


def code_warnings(config: Config, stages: Sequence[str]) -> list[str]:
    """A line for each group of stages that ran with other code, and how to rerun them.

    `ppo was trained with other code: stages/rl/advantages.py. REPLACE=ppo reruns it.`
    """
    groups: dict[tuple[str, bool, bool], list[str]] = {}
    for stage in stages:
        files = changed_code(config, stage)
        if files:
            is_trained = bool(row_of(stage, config.kind).models)
            group = (first_of(files), is_trained, config.is_upstreams(stage))
            groups.setdefault(group, []).append(stage)

    lines = []
    for (files_text, is_trained, is_upstreams), names in groups.items():
        be = "was" if len(names) == 1 else "were"
        verb = "trained" if is_trained else "run"
        line = f"{', '.join(names)} {be} {verb} with other code: {files_text}."
        if not is_upstreams:
            it = "it" if len(names) == 1 else "them"
            line += f" REPLACE={shlex.quote(' '.join(names))} reruns {it}."
        lines.append(line)
    return lines


def settings_warnings(config: Config, stages: Sequence[str]) -> list[str]:
    """A line for each stage that recorded settings that this version does not know."""
    lines = []
    for stage in stages:
        names = unknown_settings(config, stage)
        if names:
            lines.append(
                f"{stage} recorded settings that this version does not know: {first_of(names)}. "
                "They are ignored."
            )
    return lines


def check_run(name: str) -> None:
    """Raise UserError, with the nearest names, if there are runs but none of this name."""
    names = sorted({path.parent.name for path in settings.RUNS.glob("*/seed*")})
    if names and name not in names:
        raise unknown("run", name, names, "run `make status` to see what there is")


def replaced_stages(
    config: Config, replace: str, goals: Sequence[str], own: Sequence[str]
) -> list[str]:
    """The stages that a REPLACE reruns, in the order of the run.

    `own`: the stages that the run does not take from an upstream. Raises UserError for another one.
    """
    if replace == ALL:
        wanted = stages_of(config, goals)
        return [name for name in own if name in wanted]

    named = replace.split()
    for stage in named:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if stage not in own:
            fix = f"add {STAGES[stage].goal}"
            if config.is_upstreams(stage):
                fix = "leave out UPSTREAM="
            raise UserError(f"REPLACE={stage}: no target of this command runs it: {fix}")

    replaced: list[str] = []
    for name in own:
        row = row_of(name, config.kind)
        follows = not {*row.inputs, *row.joined_by}.isdisjoint(replaced)
        if name in named or follows:
            replaced.append(name)
    return replaced


def check_settings(
    config: Config, stages: Sequence[str], processes: int = 1, capped: bool = False
) -> None:
    """Raise UserError if one of some stages cannot run, or not in this number of processes.

    `capped`: whether the command limits what a judge may cost.
    """
    if any("judge" in STAGES[stage].sections for stage in stages):
        check_asking(config, capped)
        check_gold(config)
    for stage in stages:
        section: Any = getattr(config, stage, None)
        if hasattr(section, "batch_size"):
            check_batch_divides(
                stage,
                section.batch_size,
                processes,
                num_minibatches=getattr(section, "num_minibatches", 1),
                samples=getattr(section, "samples_per_query", 1),
            )


def check_rows(config: Config, stages: Sequence[str]) -> None:
    """Raise UserError if the base stage has too few rows for one of some stages."""
    manifest = read_manifest(stage_folder(config, "base"))
    if manifest is None:
        return
    counts = manifest["results"].get("rows", {})
    rows = {split: counts_of_split["rows"] for split, counts_of_split in counts.items()}
    for stage in stages:
        split = TRAINING_SPLITS.get(stage)
        if split in rows:
            check_batch_not_larger_than_data(stage, getattr(config, stage).batch_size, rows[split])

    posts = rows.get(POSTS[1], config.eval.posts)
    if "summaries" in stages and config.eval.posts > posts:
        raise UserError(
            f"eval.posts is {config.eval.posts} but the validation split has {posts} posts: "
            "lower it, or 0 for all"
        )
