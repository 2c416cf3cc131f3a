"""Updates of ours beside TRL's, at every shape of a bench (`reports/speed/bench_page.py`)."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from reports.parts import plots
from reports.parts.blocks import Block, Table
from reports.parts.words import OURS, PEER, TRL, number

Record = dict[str, Any]


def label(shape: dict[str, Any]) -> str:
    """The names of the stage and of the preset."""
    return f"{shape['stage'].upper()}, {shape['preset']}"


def shapes_table(bench: Record, figures: pd.DataFrame) -> Table:
    """A row for every shape: ours over TRL's, and over the lower bound."""
    table = figures.unstack("who").reindex(list(bench["shapes"]))
    columns = ("speedup", OURS), ("memory", OURS), ("seconds", OURS), ("seconds", PEER)
    rows = [
        [
            label(bench["shapes"][name]),
            *(number(row.get(column)) for column in (*columns, ("bound", OURS))),
        ]
        for name, row in table.iterrows()
    ]
    caption = (
        f"Ours beside {TRL}, of the fastest run of each. Memory: the most that any run held. Over"
        " lower bound: our seconds over those of the matrix products that an update needs."
    )
    header = "update|times TRL's speed|share of TRL's memory|seconds|TRL's seconds|over lower bound"
    return Table(header.split("|"), rows, caption, strong=True, name="shapes")


def picture(bench: Record, figures: pd.DataFrame) -> Block:
    """Everybody's seconds at every shape, over those of the lower bound."""
    bounds, shapes = figures["bound"], list(bench["shapes"])

    def draw(axes: Axes) -> None:
        axes.axvline(1.0, color=plots.INK, lw=1, ls=(0, (4, 3)), label="lower bound")
        for who, name, color, up in ((OURS, OURS, plots.PPO, 8), (PEER, TRL, plots.SFT, -16)):
            own = bounds[bounds.index.isin([who], level="who")].droplevel("who")
            places = [shapes.index(shape) for shape in own.index]
            axes.plot(own, places, "o", color=color, ms=8, label=name)
            for place, bound in zip(places, own, strict=True):
                at: Any = {"xytext": (0, up), "textcoords": "offset points", "ha": "center"}
                axes.annotate(f"{bound:.2f}", (bound, place), **at)
        axes.set_yticks(range(len(shapes)), [label(bench["shapes"][name]) for name in shapes])
        axes.set_ylim(len(shapes) - 0.5, -0.5)
        axes.set_xlim(left=0.0)
        axes.margins(x=0.12)
        axes.set_xlabel("seconds over those of the lower bound")
        plots.legend(axes)

    caption = "The lower bound is the matrix products that an update needs; further left is faster."
    panel = plots.Panel("Seconds of an update", draw)
    return plots.figure("seconds", caption, [panel], 1.75, 2 * plots.tall(shapes))
