"""What is printed about the stages of a run: a table that fills on a terminal, lines in a log."""

from dataclasses import dataclass, field
from typing import Any

from stages.config.config import Config
from stages.config.stages import row_of
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.progress import COLUMNS, folded, is_terminal, numbers_text

WIDTHS = {"stage": 11, "what": 29, "time": 6, "result": 28}


@dataclass(kw_only=True)
class Terminal:
    """Prints how the stages of a run get on; on a terminal, one row of a table for each."""

    shows_table: bool = field(default_factory=is_terminal)
    numbers: dict[str, str] = field(default_factory=dict)
    """Stage -> its place among the stages, such as 2/10."""

    def start(self, label: str, stages: list[str]) -> None:
        """A run begins: print the heading of its table."""
        self.numbers = {
            stage: f"{number}/{len(stages)}" for number, stage in enumerate(stages, start=1)
        }
        if self.shows_table:
            print(f"\n{label}\n", flush=True)
            print_row(*WIDTHS, style="bold")

    def skip(self, config: Config, stage: str) -> None:
        """A stage has finished before."""
        if self.shows_table:
            what = row_of(stage, config.kind).what
            print_row(stage, what, "", "finished before", style="dim")

    def begin(self, config: Config, stage: str, why: str) -> None:
        """A stage begins: a log has a heading, a terminal has the progress line."""
        if not self.shows_table:
            what = row_of(stage, config.kind).what
            heading = f"[{self.numbers[stage]}] {stage}: {what} ({why})"
            print("", *folded(heading), sep="\n", flush=True)

    def finish(self, config: Config, stage: str) -> None:
        """A stage has finished: fill its row. A log has the stage's own last line."""
        if self.shows_table:
            what = row_of(stage, config.kind).what
            manifest = read_manifest(stage_folder(config, stage)) or {}
            time = duration(manifest.get("seconds", 0.0))
            print_row(stage, what, time, numbers_text(manifest.get("results", {})))


def print_row(*cells: str, style: str = "") -> None:
    """Print one row of the table of stages; long cells take several lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    options: dict[str, Any] = {"box": None, "show_header": False, "padding": (0, 2, 0, 0)}
    table = Table(**options)
    for name, width in WIDTHS.items():
        table.add_column(width=width, justify="right" if name == "time" else "left")
    table.add_row(*(Text(cell, style=style) for cell in cells))
    Console(width=COLUMNS, highlight=False).print(table)


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, or hours and minutes: `2:10`, `3 h 05`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}h{minutes % 60:02}"
