"""The table of `make bench` on the terminal, and its page in runs/bench/."""

from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from reports.parts import blocks, page, plots
from tests.bench.environment import TRL
from tests.bench.results import Bench, Row

COLUMNS = 80
MISSING = "–"
OUR_COLOR = "#e0702b"
TRL_COLOR = "#2f7fc1"


def title(bench: Bench) -> str:
    """Return how fast our update is at each shape."""
    compared = [row for row in bench.our_rows if row.speed_over_trl is not None]
    if compared:
        speeds = ", ".join(f"{row.speed_over_trl:.2f} ({row.case.title})" for row in compared)
        return f"Speed of an update compared with {TRL}: {speeds} times as fast"
    bounds = ", ".join(f"{row.over_lower_bound:.2f} ({row.case.title})" for row in bench.our_rows)
    return f"An update takes {bounds} times its lower bound"


def answer(bench: Bench) -> str:
    """Return the memory compared with TRL's, and the distance from the lower bound."""
    bounds = as_range([row.over_lower_bound for row in bench.our_rows])
    memory = [row.memory_over_trl for row in bench.our_rows if row.memory_over_trl is not None]
    compared = f"It needs {as_range(memory)} times the memory. " if memory else ""
    return (
        f"{compared}An update takes {bounds} times as long as the matrix products that it needs."
        f" Measured on: {bench.device}."
    )


def as_range(values: list[float]) -> str:
    """Return the lowest and the highest of some values."""
    low = f"{min(values):.2f}"
    high = f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def header() -> list[str]:
    """Return the titles of the columns of the table."""
    return [
        "update",
        "by",
        "seconds",
        "spread",
        "tokens/s",
        "GB",
        "TRL's speed",
        "TRL's memory",
        "lower bound",
    ]


def cells(row: Row) -> list[str]:
    """Return a row of the table; the last three columns are ratios."""
    return [
        row.case.title,
        row.name,
        f"{row.seconds:.2f}",
        f"{row.spread:.1%}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.gigabytes:.2f}",
        MISSING if row.speed_over_trl is None else f"{row.speed_over_trl:.2f}×",
        MISSING if row.memory_over_trl is None else f"{row.memory_over_trl:.2f}×",
        f"{row.over_lower_bound:.2f}×",
    ]


def print_table(bench: Bench) -> None:
    """Print the answer, the table and the notes to the terminal."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(header()):
        table.add_column(name, justify="left" if place < 2 else "right")
    for row in bench.rows:
        table.add_row(*cells(row))

    console = Console(width=COLUMNS, highlight=False, markup=False)
    console.print(table)
    for note in bench.notes:
        console.print(f"note: {note}")
    console.print(f"{title(bench)}. {answer(bench)}")


def how_measured(bench: Bench) -> list[str]:
    """Return what the numbers mean, and what they were measured with."""
    versions = ", ".join(f"{name} {version}" for name, version in bench.versions.items())
    overrides = f" Settings: {' '.join(bench.overrides)}." if bench.overrides else ""
    return [
        f"Both implementations get the same queries in one batch, random tokens with the lengths"
        f" of real posts, and new weights of the published shape. Each measurement is a process"
        f" of its own, and ours and TRL's take turns. The smallest update runs first and is not"
        f" counted. Of {bench.runs} runs the fastest counts for time, and the one with the highest"
        f" peak for memory: bytes above what the process held before it loaded weights. The spread"
        f" is the slowest run over the fastest, minus 1.",
        f"The lower bound is the time of all matrix products that an update needs, without"
        f" padding, at {bench.matrix_rate / 1e9:,.0f} Gflop/s, the rate of a large matrix product"
        f" on the same machine (tests/bench/lower_bound.py).",
        f"Measured on {bench.date} with code {bench.code_version} on {bench.machine};"
        f" {versions}.{overrides}",
    ]


def draw(axes: Axes, bench: Bench) -> None:
    """Draw the seconds of each update over those of its lower bound."""
    cases = [row.case for row in bench.our_rows]
    axes.axvline(1.0, color=plots.INK, lw=1, ls=(0, (4, 3)), label="lower bound")
    for name, color, offset in (("ours", OUR_COLOR, 8), (TRL, TRL_COLOR, -16)):
        rows = [row for row in bench.rows if row.name == name]
        places = [cases.index(row.case) for row in rows]
        axes.plot([row.over_lower_bound for row in rows], places, "o", color=color, label=name)
        for row, place in zip(rows, places, strict=True):
            axes.annotate(
                f"{row.over_lower_bound:.2f}",
                xy=(row.over_lower_bound, place),
                xytext=(0, offset),
                textcoords="offset points",
                ha="center",
            )
    axes.set_yticks(range(len(cases)), [case.title for case in cases])
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    axes.margins(x=0.12)
    axes.set_xlabel("seconds over those of the lower bound")
    plots.legend(axes)


def write_page(bench: Bench, folder: Path) -> Path:
    """Write bench.md, bench.html, bench.json and the figure; return the path of the HTML."""
    panel = plots.Panel("Seconds of an update", lambda axes: draw(axes, bench))
    content = [
        blocks.Text(answer(bench), lead=True),
        blocks.Table(header(), [cells(row) for row in bench.rows], strong=True, name="updates"),
        plots.figure("seconds", "Further left is faster.", [panel], wide=1.75, high=1.5),
        *(blocks.Note(note) for note in bench.notes),
        blocks.Heading("How it was measured"),
        *(blocks.Text(text) for text in how_measured(bench)),
    ]
    made_from = {
        "kind": "bench",
        "names": [comparison.case.name for comparison in bench.comparisons],
        "judges": [],
        "code_versions": [bench.code_version],
        "finished": bench.date,
        "devices": [f"{bench.machine}: {bench.device}"],
        "versions": bench.versions,
        "stages": {},
        "measured": asdict(bench),
    }
    return page.write(folder, "bench", title(bench), content, made_from)
