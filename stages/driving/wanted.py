"""Which stages lead to a goal, and which runs there are. Standard library only."""

from collections.abc import Sequence

from stages.finished import read_manifest, stage_folder
from stages.settings import config as settings
from stages.settings.checks import UserError, unknown
from stages.settings.config import Config
from stages.settings.stages import GIVEN_BY, NO_PART, STAGES, TRAINED, with_inputs

GOALS = tuple(dict.fromkeys(row.goal for row in STAGES.values()))


def names_of_runs() -> list[str]:
    """The names of all runs that there are."""
    return sorted({path.parent.name for path in settings.RUNS.glob("*/seed*")})


def no_such_run(name: str) -> UserError:
    """The error about a name that no run has, with the nearest names."""
    return unknown("run", name, names_of_runs(), "run `make status` to see what there is")


def check_run(name: str) -> None:
    """Raise UserError where there are runs, and none is called so."""
    if name not in (names_of_runs() or [name]):
        raise no_such_run(name)


def stages_of(config: Config, goals: Sequence[str]) -> set[str]:
    """The stages that some goals name.

    Raises UserError for an unknown goal, and for training where nothing is trained.
    """
    wanted, left_out = set(), set(NO_PART[config.kind])
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
