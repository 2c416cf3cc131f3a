"""Prints the stages of a run: as a table that fills up on a terminal, as lines in a log."""

from dataclasses import dataclass, field

from stages.config.config import Config
from stages.config.error_messages import unfiltered_stdout
from stages.config.errors import visible
from stages.config.stages import stage_row
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.progress import is_terminal, numbers_text
from stages.runs.text import COLUMNS, duration, folded

# The columns of the table and their widths.
WIDTHS = {"stage": 11, "what": 29, "time": 6, "result": 28}


@dataclass(kw_only=True)
class Terminal:
    """Prints what happens to the stages of a run, one after the other.

    A terminal shows a table, which gets a row when a stage has finished; the progress line is below
    it. A log gets a heading when a stage begins, and the stage prints its own result.
    """

    shows_table: bool = field(default_factory=is_terminal)
    stages: list[str] = field(default_factory=list)
    """The stages of this run."""

    def start(self, label: str, stages: list[str]) -> None:
        """Begin a run: print the heading of its table."""
        self.stages = stages
        if self.shows_table:
            print(f"\n{label}\n", flush=True)
            print_row(stage="stage", what="what", time="time", result="result", style="bold")

    def skip(self, config: Config, stage: str) -> None:
        """Print that a stage had already finished."""
        if self.shows_table:
            what = stage_row(stage, config.kind).what
            print_row(stage=stage, what=what, time="", result="already finished", style="dim")

    def begin(self, config: Config, stage: str, reason: str) -> None:
        """Print the heading of a stage in a log."""
        if not self.shows_table:
            place = f"[{self.stages.index(stage) + 1}/{len(self.stages)}]"
            heading = f"{place} {stage}: {stage_row(stage, config.kind).what} ({reason})"
            print("", *folded(heading), sep="\n", flush=True)

    def finish(self, config: Config, stage: str) -> None:
        """Print the time and the result of a stage in its row."""
        if self.shows_table:
            manifest = read_manifest(stage_folder(config, stage)) or {}
            print_row(
                stage=stage,
                what=stage_row(stage, config.kind).what,
                time=duration(manifest.get("seconds", 0.0)),
                result=numbers_text(manifest.get("results", {})),
            )


def print_row(*, stage: str, what: str, time: str, result: str, style: str = "") -> None:
    """Print one row of the table of stages; long cells take several lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, width in WIDTHS.items():
        table.add_column(width=width, justify="right" if name == "time" else "left")
    table.add_row(*(Text(visible(cell), style=style) for cell in (stage, what, time, result)))
    Console(file=unfiltered_stdout(), width=COLUMNS, highlight=False).print(table)
