"""What there is: `make status`. It only reads: it writes, locks and makes nothing.

Standard library only.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from stages.driving.wanted import no_such_run
from stages.finished import changed_code, lock_of, partial_of, read_manifest, why_not
from stages.running.files import read_record
from stages.running.machine import first_of
from stages.running.progress import COLUMNS
from stages.runs import RESUME, holder_of
from stages.settings import config as settings
from stages.settings.checks import UserError, unknown
from stages.settings.command_line import recorded_config
from stages.settings.faults import what_to_mend
from stages.settings.stages import STAGES

SHOWN = {name: stage.head for name, stage in STAGES.items() if stage.head}
LABEL = COLUMNS - 5 * len(SHOWN)  # characters of a run's name and seed
MARKS = (
    "ok done, ok* done with other code, old stale, run running, half interrupted,",
    "fail failed, - missing",
)


class Seen(NamedTuple):
    """One stage as it lies on disk: its mark in the grid, and why."""

    mark: str
    why: str = ""


def look(folder: Path, stage: str) -> Seen:
    """Whether a stage is done, stale, running, half done, failed or missing, and why."""
    partial, finished = partial_of(folder), read_manifest(folder) is not None
    config = recorded_config(folder if folder.is_dir() else partial)
    if config is None:
        return Seen("-")
    if holder_of(lock_of(folder)) is not None:
        noted = read_record(partial / "progress.json")
        if noted is None:
            return Seen("run", "running, just begun")
        left = f"{noted['total']}, {noted['seconds_left']} s left"
        return Seen("run", f"running, {noted['label']} {noted['done']} of {left}")
    if not finished and partial.is_dir():
        failure = read_record(partial / "failed.json")
        if failure is not None:
            return Seen("fail", f"failed: {failure['error']}")
        return Seen("half", f"half done, {kept(partial)}")
    problem = why_not(config, stage)
    if problem:
        return Seen("old", str(problem)) if finished else Seen("-")
    files = changed_code(config, stage)
    return Seen("ok*", f"was made with other code ({first_of(files)})") if files else Seen("ok")


def kept(partial: Path) -> str:
    """What an interrupted stage goes on from."""
    checkpoints = sorted((partial / RESUME).glob("checkpoint-[0-9]*[0-9]"))
    if checkpoints:
        return f"its last checkpoint is of update {int(checkpoints[-1].name.split('-')[1])}"
    measured = [*(partial / RESUME).glob("*.jsonl"), *partial.glob("judgements.jsonl")]
    return "its finished part is kept" if measured else "without a checkpoint"


def seed_lines(seed: Path) -> list[str]:
    """A seed's row of the grid, one more for each judge if there are several, and the reasons."""
    rows: dict[str, dict[str, Seen]] = {"": {}}  # by judge, first what all share
    reasons = []
    for stage in SHOWN:
        parent = seed / stage if STAGES[stage].per_judge else seed
        names = {path.name.removesuffix(".partial") for path in parent.glob("*") if path.is_dir()}
        for name in sorted(names) if parent != seed else [stage]:
            judge = name if parent != seed else ""
            try:
                seen = look(parent / name, stage)
            except (UserError, OSError) as error:  # of a record that a person has changed
                seen = Seen("fail", what_to_mend(error) or "")
            rows.setdefault(judge, {})[stage] = seen
            if seen.why:
                reasons.append(f"{stage}{f', judge {judge}' if judge else ''}: {seen.why}")
    number = seed.name.removeprefix("seed")
    label = f"{seed.parent.name[: LABEL - 1 - len(number)]} {number}"
    shared, *judged = rows.pop(""), *(row for _, row in sorted(rows.items()))
    if len(judged) > 1:
        lines = [_line(label, shared, "")]
        lines += [_line(f"  {judge}", rows[judge], "") for judge in sorted(rows)]
    else:
        lines = [_line(label, shared | (judged[0] if judged else {}), "-")]
    for reason in reasons:
        lines += textwrap.wrap(reason, COLUMNS, initial_indent="  ", subsequent_indent="      ")
    return lines


def _line(label: str, row: Mapping[str, Seen], missing: str) -> str:
    marks = [row[stage].mark if stage in row else missing for stage in SHOWN]
    return f"{label[:LABEL]:{LABEL}} " + "".join(f"{mark:5}" for mark in marks).rstrip()


def status(name: str = "") -> list[str]:
    """The grid of runs, seeds and stages, at most 80 columns wide.

    Raises UserError if `name` is given and there is no such run.
    """
    folders = settings.RUNS.glob("*/seed*")
    seeds = sorted(folders, key=lambda seed: (seed.parent.name, len(seed.name), seed.name))
    names = [seed.parent.name for seed in seeds]
    if name and name not in names:
        raise no_such_run(name) if names else unknown("run", name, (), "there is no run yet")
    if not seeds:
        return ["no runs yet: make sft rm ppo eval"]
    shown = [seed for seed in seeds if name in ("", seed.parent.name)]
    head = _line("run and seed", {stage: Seen(head) for stage, head in SHOWN.items()}, "")
    return [head, *(line for seed in shown for line in seed_lines(seed)), "", *MARKS]
