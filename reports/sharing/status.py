"""What there is: `make status`. It only reads: it writes, locks and makes nothing.

Standard library only.
"""

import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stages.config import config as settings
from stages.config.checks import UserError
from stages.config.command_line import recorded_config
from stages.config.faults import Parser, in_one_line, show, what_to_mend
from stages.config.stages import STAGES
from stages.pipeline.wanted import check_run, kept
from stages.runs.files import read_record
from stages.runs.machine import first_of
from stages.runs.manifest import changed_code, lock_of, partial_of, read_manifest, why_not
from stages.runs.progress import COLUMNS
from stages.runs.run import holder_of

SHOWN = {name: stage.head for name, stage in STAGES.items() if stage.head}
COLUMN_WIDTH = 5  # of a stage's mark
MARKS = (
    "ok done, ok* done with other code, old stale, run running, half interrupted,",
    "fail failed, up made by its upstream, - not made",
)


def look(folder: Path, stage: str) -> tuple[str, str]:
    """A stage's mark in the table, and why it is not done; empty where that needs no words."""
    partial, finished = partial_of(folder), read_manifest(folder) is not None
    config = recorded_config(folder if folder.is_dir() else partial)
    if config is None:
        return "-", ""
    if holder_of(lock_of(folder)) is not None:
        noted = read_record(partial / "progress.json")
        if noted is None:
            return "run", "running, just begun"
        left = f"{noted['total']}, {noted['seconds_left']} s left"
        return "run", f"running, {noted['label']} {noted['done']} of {left}"
    if not finished and partial.is_dir():
        failure = read_record(partial / "failed.json")
        if failure is not None:
            return "fail", f"failed: {failure['error']}"
        return "half", f"half done, {kept(partial) or 'without a checkpoint'}"
    problem = why_not(config, stage)
    if problem:
        return ("old", str(problem)) if finished else ("-", "")
    files = changed_code(config, stage)
    return ("ok*", f"was made with other code ({first_of(files)})") if files else ("ok", "")


def upstreams_of(seed: Path) -> set[str]:
    """The stages that a seed takes from its upstream, by what one of its own recorded."""
    with suppress(UserError):  # of a record that a person has changed
        for path in sorted(seed.glob("*/config.json")):
            if config := recorded_config(path.parent):
                return {stage for stage in SHOWN if config.is_upstreams(stage)}
    return set()


def shown_stages(seeds: Sequence[Path]) -> list[str]:
    """The stages that get a column; an optional one only if some run has it."""
    return [
        stage
        for stage in SHOWN
        if not STAGES[stage].optional
        or any((seed / name).exists() for seed in seeds for name in (stage, f"{stage}.partial"))
    ]


def seed_lines(seed: Path, stages: Sequence[str]) -> list[str]:
    """A seed's row of the table, and the reasons of what is not done.

    Where there are several judges, the row shows one that is not done, if any.
    """
    marks, reasons, upstreams = [], [], upstreams_of(seed)
    for stage in stages:
        if stage in upstreams:
            marks.append("up")
            continue
        paths = (seed / stage).glob("[!.]*") if STAGES[stage].per_judge else ()
        judges = sorted({path.name.removesuffix(".partial") for path in paths})
        folders = [seed / stage / judge for judge in judges] or [seed / stage]
        views = []
        for folder in folders:
            try:
                views.append(look(folder, stage))
            except (UserError, OSError) as error:  # of a record that a person has changed
                views.append(("fail", what_to_mend(error) or ""))
            judge = f", judge {folder.name}" if len(folders) > 1 else ""
            reasons += [f"{stage}{judge}: {views[-1][1]}"] if views[-1][1] else []
        marks.append(next((mark for mark, _ in views if mark != "ok"), "ok"))
    number = seed.name.removeprefix("seed")
    name = seed.parent.name[: label_width(stages) - 1 - len(number)]
    lines = [_line(f"{name} {number}", marks)]
    for reason in reasons:
        lines += textwrap.wrap(reason, COLUMNS, initial_indent="  ", subsequent_indent="      ")
    return lines


def label_width(stages: Sequence[str]) -> int:
    """Characters for a run's name and seed in front of the columns of some stages."""
    return COLUMNS - COLUMN_WIDTH * len(stages)


def _line(label: str, marks: Sequence[str]) -> str:
    width = label_width(marks)
    cells = "".join(f"{mark:{COLUMN_WIDTH}}" for mark in marks)
    return f"{label[:width]:{width}} {cells}".rstrip()


def status(name: str = "") -> list[str]:
    """The table of runs, seeds and stages, at most 80 columns wide.

    Raises UserError if `name` is given and there is no such run.
    """
    if name:
        check_run(name)
    folders = settings.RUNS.glob(f"{name or '*'}/seed*")
    seeds = sorted(folders, key=lambda seed: (seed.parent.name, len(seed.name), seed.name))
    if not seeds:
        return ["no runs yet: make sft rm ppo eval"]
    stages = shown_stages(seeds)
    lines = [line for seed in seeds for line in seed_lines(seed, stages)]
    return [_line("run and seed", [SHOWN[stage] for stage in stages]), *lines, "", *MARKS]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(description="what there is of each run")
    parser.add_argument("--name", default="", help="the run's folder; else all runs")
    show(status(parser.parse_args(argv).name))


if __name__ == "__main__":
    main()
