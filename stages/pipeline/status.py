"""The state of each run: `make status`. It writes nothing and does not load torch."""

import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stages.config import paths
from stages.config.config import Config
from stages.config.error_messages import (
    Parser,
    describe_user_error,
    in_one_line,
    show,
    unfiltered_stdout,
)
from stages.config.errors import UserError, first_few, visible
from stages.config.recorded import ignored_line, ignored_settings, recorded_config
from stages.config.stages import STAGES, is_part
from stages.runs.attempts import resume_point
from stages.runs.differences import unknown_settings
from stages.runs.files import read_record
from stages.runs.locks import is_under_way
from stages.runs.manifest import check_run, partial_of, read_manifest
from stages.runs.run import FAILED, PROGRESS
from stages.runs.staleness import changed_code, find_problem
from stages.runs.text import COLUMNS

DONE = "done"
OTHER_CODE = "done, code changed"
STALE = "stale"
RUNNING = "running"
HALF = "half finished"
FAILURE = "failed"
UNREADABLE = "unreadable"
UPSTREAM = "from upstream"
MISSING = "missing"
# State -> its color in a terminal, in the order in which a run's states are listed.
COLORS = {
    UPSTREAM: "green",
    DONE: "green",
    OTHER_CODE: "yellow",
    RUNNING: "cyan",
    HALF: "cyan",
    STALE: "yellow",
    FAILURE: "red",
    UNREADABLE: "red",
    MISSING: "dim",
}
STATE_WIDTH = max(len(state) for state in COLORS)
NO_RUNS = "no runs yet: make sft rm ppo eval"


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """The state of one stage of a run."""

    label: str
    """The name of the stage, with its judge if there are several."""
    state: str
    detail: str = ""
    """Why it is in this state, or its progress."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of one seed of a run."""

    name: str
    stages: tuple[StageStatus, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Rows of states and their stages. Stages share a row if state and detail are the same."""
        rows = []
        for state in COLORS:
            labels: dict[str, list[str]] = {}  # by detail
            for stage in self.stages:
                if stage.state == state:
                    labels.setdefault(stage.detail, []).append(stage.label)
            for detail, stages in labels.items():
                names = ", ".join(stages)
                rows.append((state, f"{names}: {detail}" if detail else names))
        return rows


def stage_status(folder: Path, stage: str, label: str) -> StageStatus:
    """Return the state of a stage's folder."""
    try:
        state, detail = _state_of(folder, stage)
    except (UserError, OSError) as error:
        state = UNREADABLE
        detail = describe_user_error(error) or ""
    return StageStatus(label=label, state=state, detail=detail)


def _state_of(folder: Path, stage: str) -> tuple[str, str]:
    """Return the state of a stage's folder, and its detail."""
    partial = partial_of(folder)
    is_finished = read_manifest(folder) is not None
    if is_under_way(folder):
        return RUNNING, _progress(partial, stage)

    if not is_finished and read_manifest(partial) is not None:
        return HALF, "finished, only its folder is left to rename"
    if partial.is_dir() and not is_finished:
        failure = read_record(partial / FAILED)
        if failure is not None:
            return FAILURE, _with_checkpoint(failure["error"], partial)
        return HALF, resume_point(partial) or "starts over, no checkpoint"
    if not is_finished:
        return MISSING, ""

    config = recorded_config(folder, warns=False)
    if config is None:
        return UNREADABLE, f"{folder / 'config.json'} does not contain settings of this project"
    problem = find_problem(config, stage)
    if problem is not None:
        return STALE, _with_checkpoint(str(problem), partial)
    files = changed_code(config, stage)
    if files:
        return OTHER_CODE, first_few(files)
    unknown = unknown_settings(config, stage)
    if unknown:
        return DONE, f"this version does not know the recorded settings {first_few(unknown)}"
    return DONE, ""


def _with_checkpoint(text: str, partial: Path) -> str:
    """Return a text, followed by where the stage resumes if it was interrupted."""
    resumes = resume_point(partial)
    return f"{text} ({resumes})" if resumes else text


def _progress(partial: Path, stage: str) -> str:
    """Return the progress of a running stage, in its main loop or in another one."""
    progress = read_record(partial / PROGRESS)
    if progress is None:
        return "it has just started"
    seconds = progress["seconds_left"]
    left = f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    count = f"{progress['done']} of {progress['total']}, {left} left"
    return count if progress["label"] == stage else f"{progress['label']}, {count}"


def run_status(seed: Path) -> RunStatus:
    """Return the state of every stage of a seed's folder `runs/<name>/seed<k>`."""
    config = _any_config(seed)
    stages = []
    for stage, row in STAGES.items():
        if config is not None and config.is_from_upstream(stage):
            stages.append(StageStatus(label=stage, state=UPSTREAM))
            continue

        if row.per_judge:
            of_judges = (seed / stage).glob("[!.]*")
            judges = sorted({path.name.removesuffix(".partial") for path in of_judges})
            folders = [seed / stage / judge for judge in judges]
        else:
            folders = [seed / stage]
        if not any(path.is_dir() for folder in folders for path in (folder, partial_of(folder))):
            is_needed = config is None or is_part(stage, config.kind)
            if is_needed and not row.optional:
                stages.append(StageStatus(label=stage, state=MISSING))
            continue

        for folder in folders:
            label = f"{stage} ({folder.name})" if len(folders) > 1 else stage
            stages.append(stage_status(folder, stage, label))
    name = f"{seed.parent.name}, {seed.name.replace('seed', 'seed ')}"
    return RunStatus(name=name, stages=tuple(stages))


def _any_config(seed: Path) -> Config | None:
    """Return what one of a seed's stages recorded, which decides which stages the seed has."""
    for folder in _recorded_folders(seed):
        try:
            config = recorded_config(folder, warns=False)
        except UserError:  # The stage itself is listed with this error.
            continue
        if config is not None:
            return config
    return None


def _recorded_folders(seed: Path) -> list[Path]:
    """Return the folders of a seed that have a record, without those that were moved aside."""
    records = sorted(seed.rglob("config.json"))
    return [path.parent for path in records if "aside" not in path.relative_to(seed).parts]


def seed_folders(name: str = "") -> list[Path]:
    """Return the folders of all runs and seeds, or of the seeds of one run.

    Raises UserError if `name` is given and there is no such run.
    """
    if name:
        check_run(name)
    folders = paths.RUNS.glob(f"{name or '*'}/seed*")
    return sorted(folders, key=lambda seed: (seed.parent.name, len(seed.name), seed.name))


def statuses(name: str = "") -> list[RunStatus]:
    """Return the state of all runs and seeds, or of those of one run. Raises as `seed_folders`."""
    return [run_status(seed) for seed in seed_folders(name)]


def ignored_lines(seeds: Iterable[Path]) -> list[str]:
    """Return one warning for each run and set of recorded settings that this version ignores."""
    seeds_of: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # run and settings -> its seeds
    for seed in seeds:
        names: dict[str, None] = {}  # in the order of the records, each once
        for folder in _recorded_folders(seed):
            names |= dict.fromkeys(ignored_settings(folder))
        if names:
            key = (seed.parent.name, tuple(names))
            seeds_of.setdefault(key, []).append(seed.name.removeprefix("seed"))

    lines = []
    for (run, ignored), numbers in seeds_of.items():
        word = "seed" if len(numbers) == 1 else "seeds"
        lines.append(ignored_line(f"{run} {word} {', '.join(numbers)}", ignored))
    return lines


def plain_lines(runs: Iterable[RunStatus]) -> list[str]:
    """Return a heading for each seed of a run, and a line for each of its states."""
    lines: list[str] = []
    for run in runs:
        lines.append(run.name)
        for state, text in run.rows:
            lines += textwrap.wrap(
                f"{state:{STATE_WIDTH}}  {text}",
                COLUMNS,
                initial_indent="  ",
                subsequent_indent=" " * (STATE_WIDTH + 6),
            )
    return lines


def table(runs: Sequence[RunStatus]) -> Table:
    """Return the same as a table for a terminal."""
    grid = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("run", "state", "stages"):
        grid.add_column(column, overflow="fold")
    for run in runs:
        name = run.name
        for state, text in run.rows:
            # Text, because square brackets in a string would be markup.
            grid.add_row(
                Text(visible(name)),
                Text(state, style=COLORS[state]),
                Text(visible(text)),
            )
            name = ""
    return grid


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print the state of all runs, or of one."""
    parser = Parser(description="show the state of each run")
    parser.add_argument("--name", default="", help="the run's folder; default: all runs")
    name = parser.parse_args(argv).name
    for line in ignored_lines(seed_folders(name)):
        print(line, file=sys.stderr, flush=True)
    runs = statuses(name)
    if runs and sys.stdout.isatty():
        Console(file=unfiltered_stdout()).print(table(runs))
    else:
        show(plain_lines(runs) or [NO_RUNS])


if __name__ == "__main__":
    main()
