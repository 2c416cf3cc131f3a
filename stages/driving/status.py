"""What there is and what can be asked for: `make status`, `make help`, `make settings`.

Looking only reads: it writes, locks and makes nothing. Standard library only.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from stages.finished import changed_code, lock_of, no_such_run, partial_of, read_manifest, why_not
from stages.goals import GROUPS, VARIABLES
from stages.running.files import read_record
from stages.running.machine import first_of
from stages.runs import RESUME, holder_of
from stages.settings import config as settings
from stages.settings.checks import UserError, unknown, what_to_mend
from stages.settings.command_line import recorded_config
from stages.settings.config import LINE_BREAK, SECTIONS, Config
from stages.settings.presets import PRESETS
from stages.settings.stages import STAGES

COLUMNS = 80
SHOWN = {name: stage.head for name, stage in STAGES.items() if stage.head}
LABEL = COLUMNS - 5 * len(SHOWN)  # characters of a run's name and seed
MARKS = (
    "ok done, ok* done with other code, old stale, run running, half interrupted,",
    "fail failed, - missing",
)
PRESET_LINES = {
    "tiny": "0.07 to 3 M parameters on the built-in world: minutes on 2 cores",
    "posts": "14 M parameters, new weights, on posts of your own (DATA, TOKENIZER)",
    "smollm2": "a pretrained 135 M model, people's labels (make smollm, DATA): 1 to 4 h",
    "outputs": "summaries in your own files (INPUT): nothing is trained",
    "pythia": "the paper's study on the hub's TL;DR data: a GPU, an LLM judge",
}


class Seen(NamedTuple):
    """One stage as it lies on disk."""

    mark: str
    why: str = ""


def look(config: Config, stage: str, folder: Path) -> Seen:
    """Whether a stage is done, stale, running, half done, failed or missing, and why."""
    partial = partial_of(folder)
    if holder_of(lock_of(folder)) is not None:
        return Seen("run", f"running, {_how_far(partial)}")
    finished = read_manifest(folder) is not None
    if not finished and partial.is_dir():
        failure = read_record(partial / "failed.json")
        if failure is not None:
            return Seen("fail", f"failed: {failure['error']}")
        return Seen("half", f"half done, {kept(partial)}")
    if not finished:
        return Seen("-")
    problem = why_not(config, stage)
    if problem:
        return Seen("old", str(problem))
    files = changed_code(config, stage)
    return Seen("ok*", f"was made with other code ({first_of(files)})") if files else Seen("ok")


def kept(partial: Path) -> str:
    """What an interrupted stage goes on from."""
    checkpoints = sorted((partial / RESUME).glob("checkpoint-[0-9]*[0-9]"))
    if checkpoints:
        return f"its last checkpoint is of update {int(checkpoints[-1].name.split('-')[1])}"
    measured = [*(partial / RESUME).glob("*.jsonl"), *partial.glob("judgements.jsonl")]
    return "its finished part is kept" if measured else "without a checkpoint"


def _how_far(partial: Path) -> str:
    noted = read_record(partial / "progress.json")
    if noted is None:
        return "just begun"
    left = f"{noted['seconds_left']} s left"
    return f"{noted['label']} {noted['done']} of {noted['total']}, {left}"


def _folders(seed: Path, stage: str) -> Iterator[Path]:
    """The folders of one stage of a seed, one for each judge; a stage under way has one too."""
    folders = [seed / stage]
    if STAGES[stage].per_judge:
        folders = [folder for folder in (seed / stage).glob("*") if folder.is_dir()]
    names = {folder.name.removesuffix(".partial"): folder for folder in folders}
    yield from (folder.with_name(name) for name, folder in sorted(names.items()))


def seed_lines(seed: Path) -> tuple[list[str], list[str]]:
    """A seed's row of the grid, one more for each judge if there are several, and what to say."""
    rows: dict[str, dict[str, Seen]] = {}
    for stage in SHOWN:
        for folder in _folders(seed, stage):
            there = folder if folder.is_dir() else partial_of(folder)
            judge = folder.name if STAGES[stage].per_judge else ""
            try:
                config = recorded_config(there)
                seen = look(config, stage, folder) if config else Seen("-")
            except (UserError, OSError) as error:  # of a record that a person has changed
                seen = Seen("fail", what_to_mend(error) or "")
            rows.setdefault(judge, {})[stage] = seen
    shared, number = rows.pop("", {}), seed.name.removeprefix("seed")
    label = f"{seed.parent.name[: LABEL - 1 - len(number)]} {number}"
    if len(rows) > 1:  # what all judges share first, then each judge
        lines = [
            _line(label, shared, ""),
            *(_line(f"  {judge}", rows[judge], "") for judge in sorted(rows)),
        ]
    else:
        lines = [_line(label, shared | next(iter(rows.values()), {}), "-")]
    reasons = [f"{stage}: {seen.why}" for stage, seen in shared.items() if seen.why]
    for judge, own in sorted(rows.items()):
        reasons += [
            f"{stage}, judge {judge}: {seen.why}" for stage, seen in own.items() if seen.why
        ]
    return lines, reasons


def _line(label: str, row: dict[str, Seen], missing: str) -> str:
    marks = [row[stage].mark if stage in row else missing for stage in SHOWN]
    return _columns(label, marks)


def _columns(label: str, cells: Sequence[str]) -> str:
    return f"{label[:LABEL]:{LABEL}} " + "".join(f"{cell:5}" for cell in cells).rstrip()


def status(name: str = "") -> list[str]:
    """The grid of runs, seeds and stages, at most 80 columns wide.

    Raises UserError if `name` is given and there is no such run.
    """
    root = settings.RUNS
    seeds = sorted(
        root.glob("*/seed*"), key=lambda seed: (seed.parent.name, len(seed.name), seed.name)
    )
    names = [seed.parent.name for seed in seeds]
    if name and name not in names:
        raise no_such_run(name) if names else unknown("run", name, (), "there is no run yet")
    if not seeds:
        return ["no runs yet: make sft rm ppo eval"]
    lines = [_columns("run and seed", list(SHOWN.values()))]
    for seed in seeds:
        if name in ("", seed.parent.name):
            rows, reasons = seed_lines(seed)
            lines += rows
            lines += [part for reason in reasons for part in _wrapped(reason)]
    return [*lines, "", *MARKS]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="      ")


def help_lines() -> list[str]:
    """Goals, variables and presets, one line each, at most 80 columns wide."""
    lines = ["make sft rm ppo eval        one run, from data to page: minutes on 2 cores"]
    for group, goals in GROUPS.items():
        lines += ["", group, *(f"  {name:18} {goal.what}" for name, goal in goals.items())]
    lines += ["", "variables"]
    lines += [f"  {name:18} {variable.what}" for name, variable in VARIABLES.items()]
    lines += ["", "presets (PRESET=...)"]
    for family, what in PRESET_LINES.items():
        members = " ".join(name for name in PRESETS if name.split("-")[0] == family)
        lines += textwrap.wrap(f"{members}", COLUMNS, initial_indent="  ", subsequent_indent="  ")
        lines.append(f"      {what}")
    return lines


def settings_lines(config: Config) -> list[str]:
    """Every setting with its value, as `--set` takes it."""
    lines = [
        f"{section}.{setting.name}={_shown(getattr(getattr(config, section), setting.name))}"
        for section, kind in SECTIONS.items()
        for setting in fields(kind)
    ]
    return [line.rstrip() for line in lines]


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\n", LINE_BREAK)
