"""The table of `make bench` on the terminal, and its page in runs/bench/."""

from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from reports import plots, render
from stages.config.error_messages import unfiltered_stdout
from stages.config.errors import visible
from tests.bench.environment import TRL
from tests.bench.results import Bench, Comparison, fastest, peak, spread

COLUMNS = 80
HEADER = [
    "update",
    "seconds",
    "TRL's seconds",
    "times TRL's speed",
    "GB",
    "times TRL's memory",
    "times the lower bound",
    "spread",
]


def title(bench: Bench) -> str:
    """Return how fast our update is at each shape."""
    ratios = []
    for comparison in bench.comparisons:
        if comparison.speed_over_trl is not None:
            ratios.append(f"{comparison.speed_over_trl:.2f} ({comparison.case.title})")
    return f"An update is {', '.join(ratios)} times as fast as with {TRL}" if ratios else "Updates"


def cells(bench: Bench, comparison: Comparison) -> list[str]:
    """Return a row of the table."""
    ours = comparison.ours
    trl = comparison.trl
    trl_seconds = speed_over_trl = memory_over_trl = widest_spread = "–"
    if trl:
        trl_seconds = f"{fastest(trl):.2f}"
        speed_over_trl = f"{comparison.speed_over_trl:.2f}"
        memory_over_trl = f"{comparison.memory_over_trl:.2f}"
    spreads = [spread(updates) for updates in (ours, trl) if len(updates) > 1]
    if spreads:
        widest_spread = f"{max(spreads):.1%}"
    return [
        comparison.case.title,
        f"{fastest(ours):.2f}",
        trl_seconds,
        speed_over_trl,
        f"{peak(ours) / 1e9:.2f}",
        memory_over_trl,
        f"{fastest(ours) / bench.lower_bound(comparison):.2f}",
        widest_spread,
    ]


def print_table(bench: Bench) -> None:
    """Print the table and the notes to the terminal."""
    table = Table(box=None, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "update" else "right")
    for comparison in bench.comparisons:
        table.add_row(*map(visible, cells(bench, comparison)))

    console = Console(file=unfiltered_stdout(), width=COLUMNS, highlight=False, markup=False)
    console.print(table)
    for note in bench.notes:
        console.print(f"note: {visible(note)}")
    console.print(f"Measured on: {bench.device}")


def draw(axes: Axes, bench: Bench) -> None:
    """Draw the seconds of each update over those of its lower bound."""
    axes.axvline(1.0, color=plots.INK, lw=1, ls=(0, (4, 3)), label="lower bound")
    names = [comparison.case.title for comparison in bench.comparisons]
    for name, color in (("ours", "#e0702b"), (TRL, "#2f7fc1")):
        ratios = []
        places = []
        for place, comparison in enumerate(bench.comparisons):
            updates = comparison.ours if name == "ours" else comparison.trl
            if updates:
                ratios.append(fastest(updates) / bench.lower_bound(comparison))
                places.append(place)
        axes.plot(ratios, places, "o", color=color, label=name)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds over those of the lower bound")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    axes.set_title(axes.get_title(loc="left"), pad=24)  # above the legend


def write_page(bench: Bench, folder: Path) -> Path:
    """Write bench.md, bench.html, bench.json and the figure; return the path of the HTML."""
    panel = plots.Panel(title="Seconds of an update", draw=lambda axes: draw(axes, bench))
    page = render.fill(
        "bench.md",
        stem="bench",
        title=title(bench),
        bench=bench,
        header=HEADER,
        rows=[cells(bench, comparison) for comparison in bench.comparisons],
        seconds=plots.figure("seconds", [panel]),
    )
    made_from = {
        "kind": "bench",
        "names": [comparison.case.name for comparison in bench.comparisons],
        "judges": [],
        "code_versions": [bench.code_version],
        "finished": bench.date,
        "devices": [f"{bench.machine}: {bench.device}"],
        "versions": bench.versions,
        "stages": {},
    }
    return render.write(folder, page, numbers=bench, made_from=made_from)
