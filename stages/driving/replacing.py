"""What REPLACE makes anew. Standard library only.

REPLACE=1 makes anew the stages of the goals that were asked for, and of the stages that they need
those made with other settings or other code. REPLACE=ppo makes that stage anew and what follows
from it; REPLACE="ppo rloo" does so for both. What an upstream supplies stays as it is.

The old stages move to `aside/` first, all at once. An interrupted command goes on without REPLACE.
"""

from collections.abc import Sequence
from contextlib import ExitStack

from stages.driving.wanted import stages_of
from stages.finished import changed_code, damage, lock_of, partial_of, stage_folder, why_not
from stages.runs import held, move_aside
from stages.settings.checks import UserError, unknown
from stages.settings.config import Config
from stages.settings.stages import STAGES, row_of

ALL = "1"


def replaced_stages(
    config: Config, replace: str, goals: Sequence[str], own: Sequence[str]
) -> list[str]:
    """The stages that a REPLACE makes anew, in the order of the run; none where it is empty.

    `own`: the stages that the run makes itself. Raises UserError for any other one.
    """
    if replace not in ("", ALL):
        return _following(config, replace.split(), own)
    wanted = stages_of(config, goals)
    return [name for name in own if replace and (name in wanted or _differs(config, name))]


def move_all_aside(config: Config, stages: Sequence[str]) -> None:
    """Move stages aside, finished or half done.

    Raises UserError, and moves nothing, if one of them is under way elsewhere.
    """
    folders = {stage: stage_folder(config, stage) for stage in stages}
    there = [
        (stage, path)
        for stage, folder in folders.items()
        for path in (folder, partial_of(folder))
        if path.is_dir()
    ]
    with ExitStack() as locks:
        for stage in dict(there):
            locks.enter_context(held(lock_of(folders[stage]), stage))
        for stage, path in there:
            print(f"{stage}: moved to {move_aside(path)}", flush=True)


def _differs(config: Config, stage: str) -> bool:
    """Whether a stage was made, or begun, with other settings or other code, or is damaged."""
    problem = why_not(config, stage) or damage(config, stage)
    needs_replace = problem is not None and problem.needs_replace
    return needs_replace or bool(changed_code(config, stage))


def _following(config: Config, named: Sequence[str], own: Sequence[str]) -> list[str]:
    """Stages of the run and those made from them, directly or not, in the order of the run."""
    for stage in named:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
        if config.is_upstreams(stage):
            where = f"it belongs to {config.upstream}"
            raise UserError(f"REPLACE={stage}: {where}: leave out UPSTREAM=")
        if stage not in own:
            raise UserError(f"REPLACE={stage}: no goal here needs it: add {STAGES[stage].goal}")
    following: list[str] = []
    for name in own:
        row = row_of(name, config.kind)
        if name in named or {*row.inputs, *row.joined_by}.intersection(following):
            following.append(name)
    return following
