"""Plots as SVG text: small panels that share one look and come out byte for byte the same."""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.parts import blocks
from stages.rl.algorithms import ALGORITHMS

SFT, PPO, RM, PAPER = "#2f7fc1", "#e0702b", "#2c9a6b", "#9a6bc1"
OTHER = "#8a8f3c"
OTHERS = (OTHER, "#b0506b", "#4f8f92", "#7a6a4f")  # of algorithms without a color of their own
COLORS = (SFT, PPO, RM, PAPER, OTHER)  # of what has no colour of its own
POLICY_COLORS = {"sft": SFT, "ppo": PPO, "dpo": PAPER, "rloo": RM}
INK, GRID, GROUND = "#48515b", "#dfe3e8", "#fefefe"
WIDTH, HEIGHT = 3.5, 2.35  # inches
POINTS = 72  # in an inch
COLUMNS = 3  # of panels
MOST_POINTS = 120
BAND = f"Of more than {MOST_POINTS} updates a line is the mean of neighbours, the band their range."
LETTER, LINE = 4.4, 13.0  # of a legend, points: width of a letter, height of a line
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:g}%")  # of an axis of shares
PLAIN = FuncFormatter(lambda value, _: f"{value:.4g}")  # without a power of ten above the axis
ROUND = (1, 2, 2.5, 5, 10)  # steps between ticks, times a power of ten
EDGE = 0.005  # room for a line that lies on 0 or 100%
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "reports",
    "text.parse_math": False,  # labels are plain text, names of systems among them
    "text.color": INK,
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.facecolor": GROUND,
    "figure.facecolor": GROUND,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
}


@dataclass(frozen=True)
class Panel:
    """One small plot."""

    title: str
    draw: Callable[[Axes], None]
    about: str = ""
    """What it shows, in words, for who cannot see it."""


@dataclass(frozen=True)
class Curve:
    """A curve: its name, colour and points."""

    label: str
    color: str
    steps: Sequence[float]
    values: Sequence[float]
    dots: bool = False
    """Whether the points are few and exact, so that each is marked."""


def curve(
    rows: list[dict[str, Any]], key: str, label: str, color: str, dots: bool = False
) -> Curve:
    """The rows of metrics.jsonl that have a key, as a line."""
    there = [row for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return Curve(label, color, [row["step"] for row in there], [row[key] for row in there], dots)


def lines(title: str, curves: Sequence[Curve], share: bool = False) -> Panel:
    """Curves over updates; many points are shown as the mean and the range of neighbours."""

    def draw(axes: Axes) -> None:
        for curve in curves:
            _draw_line(axes, curve)
        axes.set_xlabel("update")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=ROUND))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
        axes.yaxis.set_major_formatter(PLAIN)
        axes.margins(x=0.02)
        if share:
            axes.yaxis.set_major_formatter(PERCENT)
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -EDGE), min(high, 1 + EDGE))  # no share lies beyond
        legend(axes)

    return Panel(title, draw)


def legend(axes: Axes) -> None:
    """The names of what is drawn, above the plot; none for a single one."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    spec = axes.get_subplotspec()
    assert spec is not None
    assert isinstance(axes.figure, Figure)
    width = POINTS * axes.figure.get_figwidth() / spec.get_gridspec().ncols - 40
    columns = max(1, int(width // (LETTER * max(map(len, labels)) + 30)))
    shape: dict[str, Any] = {"handlelength": 1.3, "columnspacing": 1.2, "borderpad": 0.1}
    shape |= {"bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
    axes.legend(handles, labels, ncols=min(columns, len(labels)), loc="lower left", **shape)
    rows = math.ceil(len(labels) / columns)
    axes.set_title(axes.get_title(loc="left"), pad=6 + LINE * rows)


def win_rates(rates: Sequence[tuple[str, str, float, float, float]]) -> Panel:
    """Rates with their intervals, one below the other: name, colour, rate, low, high."""

    def draw(axes: Axes) -> None:
        _intervals(axes, rates, "{:.1%}", 0.5)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PERCENT)

    return Panel("Win rate against the reference", draw)


def win_rate_figure(rates: Sequence[tuple[str, str, float, float, float]]) -> list[blocks.Figure]:
    """The rates with their intervals over posts as a picture; none where there is no rate."""
    caption = "Bars are 95% intervals over the posts; the dashed line is even with the reference."
    return [figure("win-rate", caption, [win_rates(rates)], 1.75, tall(rates))] if rates else []


def differences(title: str, rows: Sequence[tuple[str, float, float | None, float | None]]) -> Panel:
    """Differences in points with their intervals, one below the other; one may have no interval."""
    drawn = [(name, PPO, middle, low, high) for name, middle, low, high in rows]

    def draw(axes: Axes) -> None:
        _intervals(axes, drawn, "{:+.1f}", 0.0)
        axes.margins(x=0.1)
        axes.set_xlabel("points of win rate")

    return Panel(title, draw)


def _intervals(axes: Axes, rows: Sequence[tuple[Any, ...]], form: str, even: float) -> None:
    for place, (_, color, middle, low, high) in enumerate(rows):
        if low is not None:
            axes.plot([low, high], [place, place], color=color, lw=5, alpha=0.35)
        axes.plot([middle], [place], "o", color=color, ms=8)
        axes.annotate(  # beside the plot, where no line crosses it
            *(form.format(round(middle, 3) + 0.0), (1.0, place), (6, 0)),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(even, color=INK, lw=1, ls=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.grid(visible=False, axis="y")


def tall(rows: Sequence[Any]) -> float:
    """How high a plot of so many intervals is, beside a usual one."""
    return max(0.8, 0.2 * len(rows))


def color_of(policy: str) -> str:
    """The color of a policy's curves and bars; other algorithms take the next free ones."""
    others = [name for name in ALGORITHMS if name not in POLICY_COLORS]
    colors = dict(zip(others, cycle(OTHERS), strict=False))
    return (POLICY_COLORS | colors).get(policy, OTHER)


def count(number: float) -> str:
    """A large number as people say it: 0.9M, 1.01B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"


def figure(
    name: str, caption: str, panels: Sequence[Panel], wide: float = 1.0, high: float = 1.0
) -> blocks.Figure:
    """Panels as a block of a page, three in a row; `wide` and `high` stretch each of them."""
    about = "; ".join(" - ".join(filter(None, (x.title, x.about))) for x in panels)
    return blocks.Figure(name, caption, drawn(panels, wide, high, about), about)


def drawn(panels: Sequence[Panel], wide: float, high: float, about: str) -> str:
    """The panels as the text of an SVG file."""
    columns = min(len(panels), COLUMNS)
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own style would change the page's bytes
        matplotlib.rcParams.update(LOOK)
        size = WIDTH * wide * columns, HEIGHT * high * rows
        figure = Figure(figsize=size, layout="constrained")
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, columns, place)
            axes.set_title(panel.title)
            axes.tick_params(length=0)
            panel.draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = _tidy(re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL))
    title = f"<title>{html.escape(about)}</title>"
    return re.sub(r"<svg [^>]*>", lambda root: root[0] + title, svg, count=1)


def _tidy(svg: str) -> str:
    """The SVG without metadata and comments, and with shorter coordinates."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<!DOCTYPE.*?>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), svg)
    return re.sub(r"\n\s*\n+", "\n", svg)


def _draw_line(axes: Axes, line: Curve) -> None:
    if line.dots:
        axes.plot(line.steps, line.values, "o:", color=line.color, label=line.label, ms=4)
        return
    size = max(1, math.ceil(len(line.steps) / MOST_POINTS))
    groups = [slice(start, start + size) for start in range(0, len(line.steps), size)]
    steps, values = ([fmean(each[x]) for x in groups] for each in (line.steps, line.values))
    if size > 1:
        lows, highs = ([edge(line.values[x]) for x in groups] for edge in (min, max))
        axes.fill_between(steps, lows, highs, color=line.color, alpha=0.18, lw=0)
    axes.plot(steps, values, color=line.color, label=line.label)
