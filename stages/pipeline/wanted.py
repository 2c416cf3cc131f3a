"""Which stages a command makes: those that lead to its goals, of these what is missing or stale,
and what REPLACE makes anew. What the last ones would refuse is refused before the first.

REPLACE=1 makes anew the stages of the goals, and of the stages that they need those made with other
settings or other code. REPLACE="ppo rloo" makes these anew and what follows from either. What an
upstream supplies stays as it is. Standard library only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.config import config as settings
from stages.config.checks import UserError, check_dealt, check_filled, unknown
from stages.config.config import Config, settings_hash
from stages.config.judge_models import check_asking
from stages.config.sections import COMPARISONS, POSTS
from stages.config.stages import GIVEN_BY, NO_PART, STAGES, TRAINED, row_of, with_inputs
from stages.runs.files import read_record
from stages.runs.manifest import (
    ATTEMPT,
    MISSING,
    changed_code,
    check_gold,
    current_inputs,
    damage,
    partial_of,
    read_manifest,
    refusal,
    stage_folder,
    why_not,
)
from stages.runs.run import RESUME

GOALS = tuple(dict.fromkeys(row.goal for row in STAGES.values()))
ALL, ANEW = "1", "anew, as REPLACE asks"
LEARNED = {"sft": POSTS[0], "rm": COMPARISONS[0], "dpo": COMPARISONS[0]}  # stage -> its split


def stages_of(config: Config, goals: Sequence[str]) -> set[str]:
    """The stages that some goals name.

    Raises UserError for an unknown goal, and for training where nothing is trained.
    """
    wanted, left_out = set[str](), {*NO_PART[config.kind]}
    for goal in goals:
        named = {name for name, row in STAGES.items() if goal in (name, row.goal)}
        if not named:
            raise unknown("goal", goal, (*GOALS, *STAGES))
        if named & left_out and goal != "eval":
            raise UserError(no_part(goal, config.kind))
        wanted |= named - left_out
    if config.outputs.label and "report" in wanted:  # the judge is tried on the file's own labels
        wanted |= {"calibration"}
    return wanted


def wanted_stages(config: Config, goals: Sequence[str]) -> list[str]:
    """The stages that lead to some goals, in order; an optional one joins if it was made before.

    Raises UserError as `stages_of` does.
    """
    needed = with_inputs(stages_of(config, goals), config.kind)
    joined = {name for stage in needed for name in STAGES[stage].joined_by}
    there = {name for name in joined if read_manifest(stage_folder(config, name)) is not None}
    return with_inputs({*needed, *there.difference(NO_PART[config.kind])}, config.kind)


def no_part(goal: str, kind: str) -> str:
    """Why a goal has no part in a run of this kind, with the mend."""
    if kind == TRAINED:
        return f"{goal} needs a released policy: add POLICY= (SET=released.policy=...)"
    variable = GIVEN_BY[kind]
    return f"{goal} trains, and {variable} is judged without training: leave out one of the two"


def lacking(config: Config, goals: Sequence[str], replace: str = "") -> dict[str, str]:
    """The stages that a command would make, and why. Some depend on the outcome of an earlier one.

    Raises UserError for a stage that only REPLACE may touch, and for one that an upstream lacks.
    """
    wanted = wanted_stages(config, goals)
    own = [stage for stage in wanted if not config.is_upstreams(stage)]
    anew = replaced_stages(config, replace, goals, own)
    steps: dict[str, str] = {}
    for stage in wanted:
        row, problem = row_of(stage, config.kind), why_not(config, stage)
        before = [name for name in steps if name in (*row.inputs, *row.joined_by)]
        if stage in anew:
            steps[stage] = ANEW
        elif problem and (problem.needs_replace or stage not in own):
            raise refusal(config, stage, problem)
        elif problem:
            steps[stage] = reason(config, stage, problem)
        elif before:
            steps[stage] = f"if {before[-1]} puts out something else than before"
    return steps


def reason(config: Config, stage: str, problem: Any) -> str:
    """Why a stage is to be made (`why_not`), to be read in brackets."""
    partial = partial_of(stage_folder(config, stage))
    attempt = read_record(partial / ATTEMPT) or {}
    same = attempt.get("settings_hash") == settings_hash(config, stage)
    if problem == MISSING and same and attempt.get("inputs") == current_inputs(config, stage):
        return f"goes on, {part}" if (part := kept(partial)) else "begun, no checkpoint yet"
    return "not made yet" if problem == MISSING else str(problem)


def kept(partial: Path) -> str:
    """What an interrupted stage goes on from; empty if it begins again."""
    checkpoints = sorted((partial / RESUME).glob("checkpoint-[0-9]*[0-9]"))
    if checkpoints:
        return f"its last checkpoint is of update {int(checkpoints[-1].name.split('-')[1])}"
    measured = [*(partial / RESUME).glob("*.jsonl"), *partial.glob("judgements.jsonl")]
    return "its finished part is kept" if measured else ""


def check_run(name: str) -> None:
    """Raise UserError, with the nearest names, where there are runs, and none is called so."""
    names = sorted({path.parent.name for path in settings.RUNS.glob("*/seed*")})
    if names and name not in names:
        raise unknown("run", name, names, "run `make status` to see what there is")


def replaced_stages(
    config: Config, replace: str, goals: Sequence[str], own: Sequence[str]
) -> list[str]:
    """The stages that a REPLACE makes anew, in the order of the run; none where it is empty.

    `own`: the stages that the run makes itself. Raises UserError for any other one.
    """
    named, anew = replace.split(), list[str]()
    if replace == ALL:
        wanted = stages_of(config, goals)
        return [name for name in own if name in wanted or differs(config, name)]
    for stage in named:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if stage not in own:
            mend = f"add {STAGES[stage].goal}"
            mend = "leave out UPSTREAM=" if config.is_upstreams(stage) else mend
            raise UserError(f"REPLACE={stage}: no goal here makes it: {mend}")
    for name in own:
        row = row_of(name, config.kind)
        if name in named or {*row.inputs, *row.joined_by}.intersection(anew):
            anew.append(name)
    return anew


def differs(config: Config, stage: str) -> bool:
    """Whether a stage was made, or begun, with other settings or other code, or is damaged."""
    problem = why_not(config, stage) or damage(config, stage)
    return (problem or MISSING).needs_replace or bool(changed_code(config, stage))


def check_settings(
    config: Config, stages: Sequence[str], processes: int = 1, capped: bool = False
) -> None:
    """Raise UserError where one of some stages cannot be made, or not in so many processes.

    `capped`: whether a command gives the most that a judge may cost.
    """
    if any("judge" in STAGES[stage].sections for stage in stages):
        check_asking(config, capped)
        check_gold(config)
    for stage in stages:
        section: Any = getattr(config, stage, None)
        if hasattr(section, "batch_size"):
            minibatches = getattr(section, "num_minibatches", 1)
            samples = getattr(section, "samples_per_query", 1)
            check_dealt(stage, section.batch_size, processes, minibatches, samples)


def check_rows(config: Config, stages: Sequence[str]) -> None:
    """Raise UserError where the base stage has too few rows for one of some stages."""
    manifest = read_manifest(stage_folder(config, "base"))
    counts = manifest["results"].get("rows", {}) if manifest else {}
    rows = {split: of_split["rows"] for split, of_split in counts.items()}
    for stage in stages:
        split = LEARNED.get(stage)
        if split in rows:
            check_filled(stage, getattr(config, stage).batch_size, rows[split])
    if "summaries" in stages and config.eval.posts > rows.get(POSTS[1], config.eval.posts):
        check = f"eval.posts is {config.eval.posts} but the validation split has {rows[POSTS[1]]}"
        raise UserError(f"{check} posts: lower it, or 0 for all")
