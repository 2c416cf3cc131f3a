"""Plots of what training did: score against distance, and how values are spread."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from reports.parts.plots import INK, Line, Panel, smoothed

FRONTIER_POINTS = 40
BINS = 24
TAIL = 0.005  # share at each end that a histogram does not stretch for


def frontier(title: str, runs: Sequence[Line], x: str, y: str) -> Panel:
    """Where training went: the second number against the first, update by update.

    A run is a line whose `steps` are the first number; neighbouring updates are averaged.
    """

    def draw(axes: Axes) -> None:
        for run in runs:
            across, up = smoothed(run, FRONTIER_POINTS)
            width, alpha = (0.9, 0.45) if run.faint else (1.7, 1.0)
            axes.plot(across, up, color=run.color, lw=width, alpha=alpha, label=run.label or None)
            if run.faint or not up:
                continue
            axes.scatter(across, up, s=9, color=run.color, zorder=3)
            for place, word in ((0, "start"), (-1, "end")):
                axes.annotate(
                    word, (across[place], up[place]), (4, -10), textcoords="offset points"
                )
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4))
        if sum(bool(run.label) for run in runs) > 1:
            axes.legend(loc="best", handlelength=1.3)

    return Panel(title, draw, " ".join(_path(run) for run in runs if run.label))


def _path(run: Line) -> str:
    across, up = smoothed(run, FRONTIER_POINTS)
    if not up:
        return f"{run.label}: no points."
    return (
        f"{run.label}: from {up[0]:.4g} at {across[0]:.4g} to {up[-1]:.4g} at {across[-1]:.4g};"
        f" the highest, {max(up):.4g}, at {across[up.index(max(up))]:.4g}."
    )


def spread(title: str, groups: Sequence[tuple[str, str, Sequence[float]]], x: str) -> Panel:
    """How values are spread, as outlines of histograms with common bins: name, colour, values."""
    edges = _edges([value for _, _, values in groups for value in values])

    def draw(axes: Axes) -> None:
        for name, color, values in groups:
            inside = np.clip(values, edges[0], edges[-1])
            shares = np.histogram(inside, edges)[0] / max(1, len(values))
            axes.stairs(100 * shares, edges, color=color, lw=1.5, label=name)
            axes.axvline(float(np.mean(values)), color=color, lw=0.9, ls=(0, (2, 2)))
        axes.set_xlabel(x)
        axes.set_ylabel("% of posts")
        axes.set_ylim(0)
        axes.margins(x=0.02)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4))
        axes.legend(loc="best", handlelength=1.3)
        axes.spines["bottom"].set_color(INK)

    return Panel(title, draw, " ".join(_summary(name, values) for name, _, values in groups))


def _edges(values: Sequence[float]) -> list[float]:
    """Common edges of the bins; what lies beyond counts in the first or the last."""
    low, high = np.quantile(values, [TAIL, 1 - TAIL])
    if low == high:
        low, high = low - 0.5, high + 0.5
    whole = all(float(value).is_integer() for value in values)
    if whole:  # tokens: a bin holds whole numbers, each as many
        size = max(1, round((high - low + 1) / BINS))
        count = int(np.ceil((high - low + 1) / size))
        return [float(np.floor(low) - 0.5 + size * place) for place in range(count + 1)]
    return [float(edge) for edge in np.linspace(low, high, BINS + 1)]


def _summary(name: str, values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{name}: median {middle:.3g}, middle half {low:.3g} to {high:.3g}."
