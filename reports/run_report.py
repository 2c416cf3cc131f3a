"""The stage `report` of a run: its page, headline.txt for the terminal, numbers.json for programs.

Which page it is, the page's own module says: a run, a released policy, or given summaries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports import page
from reports.blocks import Block
from reports.collect import Record, load_run
from reports.page import PUBLIC
from stages.finished import inputs_now
from stages.runs import open_stage
from stages.settings.command_line import config_from_arguments
from stages.settings.config import Config, UserError, fail
from stages.system.files import write_json, write_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page's module makes of a finished run."""

    title: str
    blocks: Sequence[Block]
    numbers: dict[str, Any]
    """The run's row, as numbers.json holds it."""
    headline: str
    """The result for a terminal of 80 columns; ends with the page's path."""
    without_the_data: bool = False
    """Whether the page is written once more without the texts of real data, to be published."""


Make = Callable[[Record, Path], Report]
"""Makes the report of a run whose page will have this path."""


def print_report(argv: list[str] | None, about: str, make: Make) -> None:
    """Write and print the report of the run that the arguments name."""
    try:
        print(write_report(config_from_arguments(argv, about), make), end="")
    except UserError as error:
        fail(error)


def write_report(config: Config, make: Make) -> str:
    """Write the page, its numbers and the headline of one finished run; returns the headline.

    Raises UserError, with the make command to run, if a stage is missing or stale.
    """
    record = load_run(config)
    with open_stage(config, "report") as run:
        run.inputs = inputs_now(config, "report")
        stem = f"{record.name}-seed{record.seed}"
        report = make(record, run.folder / f"{stem}.html")
        page.write(run.partial, stem, report.title, report.blocks)
        if report.without_the_data:
            ours = [block.without_the_data() for block in report.blocks]
            page.write(run.partial / PUBLIC, stem, report.title, ours)
        write_text(run.partial / "headline.txt", report.headline)
        write_json(run.partial / "numbers.json", report.numbers)
        run.finish({})
    return report.headline
