"""Plots of pages: small panels in one look, as SVG that is legible on a phone and in dark mode.

Each panel is a drawing of its own, so that a row of them wraps on a narrow screen. Backgrounds are
transparent, and text and grid follow the theme of the reader. The same numbers give the same bytes.
"""

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator, NullLocator

from reports.formats import parameter_count
from reports.results import Curve, Interval
from reports.verdicts import Verdict
from stages.rl.algorithms import ALGORITHMS

# One color per policy on all pages; algorithms that are added later take the others in turn.
POLICY_COLORS = {
    "sft": "#2f7fc1",
    "ppo": "#e0702b",
    "rloo": "#2c9a6b",
    "dpo": "#9a6bc1",
    "grpo": "#b0506b",
    "reinforce": "#8a8f3c",
}
OTHER_COLORS = ("#4f8f92", "#7a6a4f", "#c1912f", "#6b7bc1")
REWARD_MODEL_COLOR = "#2c9a6b"
JUDGE_COLOR = "#4f8f92"
NO_DIFFERENCE = 3.0  # percentage points; the shaded band of a plot of differences
FAR_OFF = 3.0  # how many times as far as a typical bar an end is that a plot cuts off

INK = "#48515b"
GRID = "#dfe3e8"
# The two colors of the drawing that follow the reader's theme: variable -> light, dark.
THEME = {"--plot-ink": (INK, "#c3cbd3"), "--plot-grid": (GRID, "#3a424a")}

WIDTH = 3.6  # inches; 346 CSS pixels, so that a panel fills a phone's screen
HEIGHT = 2.5
ROUND_STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
APART = 1.03  # the factor of parameters between the dots of two policies
MOST_POINTS = 120  # of a line; more are averaged
BAND_CAPTION = (
    f"With more than {MOST_POINTS} updates, a line shows the mean of neighboring updates and the"
    " band their range."
)
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "reports",
    "text.parse_math": False,  # labels are plain text
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "savefig.transparent": True,
    "lines.solid_capstyle": "butt",  # a bar ends where its interval ends
    "lines.dash_capstyle": "butt",
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One drawing: what it shows, and the function that draws it."""

    title: str
    draw: Callable[[Axes], None]
    height: float = HEIGHT
    width: float = WIDTH


@dataclass(frozen=True)
class Drawing:
    """A finished panel: its title, which is read aloud in its place, and its SVG."""

    title: str
    svg: str


@dataclass(frozen=True)
class Figure:
    """Panels that belong together under one name."""

    name: str
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve with the name and color that the legend shows."""

    label: str
    color: str
    curve: Curve
    has_dots: bool = False
    """Whether the points are few and exact, so that each is marked."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """An estimate with its interval, in a row of a plot of intervals."""

    label: str
    color: str
    value: float
    interval: tuple[float, float] | None
    seeds: tuple[float, ...] = ()
    """The estimates of single seeds, if the bar is their mean."""
    inner: tuple[float, float] | None = None
    """The 90% interval of a difference, if it is the one that decides."""
    is_of_one_seed: bool = False
    """Whether it has a single seed where other bars have several."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one policy at several sizes of the model."""

    label: str
    color: str
    seeds: tuple[tuple[float, float], ...]
    """Parameters and value of each seed."""
    means: tuple[tuple[float, float], ...]
    """Parameters and mean of each size."""
    paper: tuple[tuple[float, float], ...] = ()
    """Parameters and value of the paper's seeds."""


def color_of(policy: str) -> str:
    """Return the color of a policy, the same on all pages."""
    if policy in POLICY_COLORS:
        return POLICY_COLORS[policy]
    added = [name for name in ALGORITHMS if name not in POLICY_COLORS]
    if policy in added:
        return OTHER_COLORS[added.index(policy) % len(OTHER_COLORS)]
    return OTHER_COLORS[0]


def figure(name: str, panels: Sequence[Panel]) -> Figure | None:
    """Draw panels; None if there are none."""
    if not panels:
        return None
    return Figure(name, tuple(Drawing(panel.title, draw(panel)) for panel in panels))


# -- kinds of panels -------------------------------------------------------------------------------


def lines(
    title: str,
    unit: str,
    lines: Sequence[Line],
    is_share: bool = False,
    x_label: str = "update",
) -> Panel:
    """Curves over the updates of a stage. `unit` labels the vertical axis."""

    def draw_lines(axes: Axes) -> None:
        for line in lines:
            _draw_line(axes, line)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=ROUND_STEPS))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND_STEPS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.margins(x=0.02)
        if is_share:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -0.005), min(high, 1.005))  # no share lies beyond
        if len(lines) > 1:
            draw_legend(axes)

    return Panel(title=title, draw=draw_lines)


def win_rates(title: str, bars: Sequence[Bar]) -> Panel:
    """Win rates with their intervals, one row each; the dashed line is even."""

    def draw_rates(axes: Axes) -> None:
        _draw_bars(axes, bars, write=lambda rate: f"{round(100 * rate, 1):.1f}%", reference=0.5)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        axes.set_xlabel("win rate against the references")

    return Panel(title=title, draw=draw_rates, height=_bars_height(bars))


def agreements(title: str, bars: Sequence[Bar], ceiling: tuple[float, float] | None) -> Panel:
    """How often judges agree with labels, one row each; the dashed line is chance.

    `ceiling`: the shares between which people agree with each other, as a shaded band.
    """

    def draw_agreements(axes: Axes) -> None:
        _draw_bars(axes, bars, write="{:.1%}".format, reference=0.5)
        axes.set_ylim(len(bars) - 0.5, -1.2)  # room for the names of line and band
        axes.text(0.51, -0.9, "chance", ha="left", va="center")
        if ceiling is not None:
            axes.axvspan(*ceiling, color=INK, alpha=0.1, lw=0)
            axes.text(sum(ceiling) / 2, -0.9, "people", ha="center", va="center")
        lows = [bar.interval[0] for bar in bars if bar.interval is not None]
        axes.set_xlim(min([0.4, *lows]), 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        axes.xaxis.set_major_locator(MultipleLocator(0.25))
        axes.set_xlabel("share of the labeled pairs")

    return Panel(title=title, draw=draw_agreements, height=_bars_height(bars) + 0.5)


def differences(title: str, bars: Sequence[Bar], x_label: str) -> Panel:
    """Differences in percentage points; within the shaded band counts as no difference.

    An interval that reaches far beyond the others is cut off at the edge. An arrow and the number
    mark it, so that one outlier does not squeeze all others.
    """
    low, high = limits_of_differences(bars)
    is_cut = any(_ends_of(bar)[0] < low or _ends_of(bar)[1] > high for bar in bars)
    label = f"{x_label}\n(arrow: reaches beyond the axis)" if is_cut else x_label
    label_height = 0.2 if is_cut else 0.0  # of its second line

    def draw_differences(axes: Axes) -> None:
        axes.axvspan(-NO_DIFFERENCE, NO_DIFFERENCE, color=INK, alpha=0.1, lw=0)
        _draw_bars(axes, bars, write=_signed, reference=0.0)
        axes.set_xlim(low, high)
        for place, bar in enumerate(bars):
            _mark_cut_ends(axes, bar, place)
        axes.set_xlabel(label)

    return Panel(title=title, draw=draw_differences, height=_bars_height(bars) + label_height)


def difference_bar(
    label: str, color: str, verdict: Verdict | None, by_seed: Sequence[float] = ()
) -> Bar | None:
    """Return the bar of a difference with the interval that decides; None without an interval.

    Of no difference the interval of 90% decides, so the bar has it as well. `by_seed` are the
    differences of the seeds, of which one alone is not marked.
    """
    if verdict is None or verdict.interval is None:
        return None
    inner = verdict.interval_of_90
    return Bar(
        label=label,
        color=color,
        value=100 * verdict.interval.estimate,
        interval=(100 * verdict.interval.low, 100 * verdict.interval.high),
        inner=None if inner is None else (100 * inner.low, 100 * inner.high),
        seeds=tuple(100 * gap for gap in by_seed) if len(by_seed) > 1 else (),
    )


def limits_of_differences(bars: Sequence[Bar]) -> tuple[float, float]:
    """Return the ends of the axis: the band and all bars, without ends that are far off.

    An end is far off if it is more than FAR_OFF times as far from 0 as a typical bar reaches.
    """
    reaches = [max(abs(end) for end in _ends_of(bar)) for bar in bars]
    farthest = FAR_OFF * max(NO_DIFFERENCE, median_low(reaches))
    shown = [-NO_DIFFERENCE, NO_DIFFERENCE]
    for bar in bars:
        shown += [end for end in (bar.value, *_ends_of(bar)) if abs(end) <= farthest]
    low = min(shown)
    high = max(shown)
    margin = 0.1 * (high - low)
    return low - margin, high + margin


def _ends_of(bar: Bar) -> tuple[float, float]:
    return bar.interval or (bar.value, bar.value)


def _mark_cut_ends(axes: Axes, bar: Bar, place: int) -> None:
    """Draw an arrow inside each edge that cuts a bar off, with the numbers that lie beyond."""
    left, right = axes.get_xlim()
    low, high = _ends_of(bar)
    inset = 0.025 * (right - left)
    is_value_shown = left <= bar.value <= right
    all_numbers = f"{_signed(bar.value)} [{_signed(low)}, {_signed(high)}]"

    if low < left:
        note = f"to {_signed(low)}" if is_value_shown else all_numbers
        axes.plot([left + inset], [place], "<", color=bar.color, ms=8)
        _write_above(axes, note, x=left + inset, place=place, align="left")
    if high > right:
        note = f"to {_signed(high)}" if is_value_shown else all_numbers
        axes.plot([right - inset], [place], ">", color=bar.color, ms=8)
        _write_above(axes, note, x=right - inset, place=place, align="right")


def _write_above(axes: Axes, note: str, x: float, place: int, align: str) -> None:
    axes.annotate(
        note,
        xy=(x, place),
        xytext=(0, 5),
        textcoords="offset points",
        ha=align,
        va="bottom",
        fontsize=7.5,
    )


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"


def rates_over_parameters(title: str, all_series: Sequence[Series]) -> Panel:
    """Win rates over the number of parameters: a dot for each seed, a line through the means."""
    sizes = sorted({parameters for series in all_series for parameters, _ in series.means})

    def draw_rates(axes: Axes) -> None:
        axes.axhline(0.5, color=INK, lw=1, ls=(0, (4, 3)))
        for place, series in enumerate(all_series):
            # Dots of two policies would cover each other, so each policy is moved a little.
            shift = APART ** (place - (len(all_series) - 1) / 2)
            axes.plot(*zip(*series.means, strict=True), color=series.color, label=series.label)
            for parameters, rate in series.seeds:
                axes.plot([shift * parameters], [rate], "o", color=series.color, ms=4, alpha=0.75)
            for parameters, rate in series.paper:
                axes.plot([parameters], [rate], "D", mfc="none", mec=series.color, ms=6)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [parameter_count(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("parameters (logarithmic axis)")
        axes.margins(x=0.08)
        axes.set_ylim(-0.02, 1.02)  # room for dots at 0 and 100%
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        axes.set_ylabel("win rate against the references")
        draw_legend(axes)

    return Panel(title=title, draw=draw_rates, height=3.0)


def _bars_height(bars: Sequence[Bar]) -> float:
    return max(1.6, 0.9 + 0.32 * len(bars))


def _draw_bars(
    axes: Axes, bars: Sequence[Bar], write: Callable[[float], str], reference: float
) -> None:
    for place, bar in enumerate(bars):
        # An interval of one seed leaves out how much seeds differ, so it is only an outline.
        if bar.interval is not None and bar.is_of_one_seed:
            axes.plot(list(bar.interval), [place, place], color=bar.color, lw=1.5, ls=(0, (2, 1)))
        elif bar.interval is not None:
            axes.plot(list(bar.interval), [place, place], color=bar.color, lw=5, alpha=0.35)
        if bar.inner is not None:
            axes.plot(list(bar.inner), [place, place], color=bar.color, lw=10, alpha=0.35)
        for seed in bar.seeds:
            axes.plot([seed], [place], "|", color=bar.color, ms=12, mew=1.2)
        fill = "none" if bar.is_of_one_seed else bar.color
        axes.plot([bar.value], [place], "o", color=bar.color, mfc=fill, ms=7)
        axes.annotate(  # to the right of the plot, where no line crosses it
            write(bar.value),
            xy=(1.0, place),
            xytext=(5, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(reference, color=INK, lw=1, ls=(0, (4, 3)))
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.7)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
    axes.grid(visible=False, axis="y")


def _draw_line(axes: Axes, line: Line) -> None:
    """Draw a curve; of many points, the mean and the range of neighbors."""
    steps = line.curve.steps
    values = line.curve.values
    if line.has_dots:
        axes.plot(steps, values, "o:", color=line.color, label=line.label, ms=4)
        return
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    groups = [slice(start, start + size) for start in range(0, len(steps), size)]
    middles = [fmean(steps[group]) for group in groups]
    if size > 1:
        lows = [min(values[group]) for group in groups]
        highs = [max(values[group]) for group in groups]
        axes.fill_between(middles, lows, highs, color=line.color, alpha=0.18, lw=0)
    means = [fmean(values[group]) for group in groups]
    axes.plot(middles, means, color=line.color, label=line.label)


def draw_legend(axes: Axes) -> None:
    """Put the legend between the title and the plot, where it covers no line."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(len(label) for label in labels)
    columns = min(len(labels), max(1, 44 // (longest + 6)))
    axes.legend(
        handles,
        labels,
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        borderpad=0.1,
        handlelength=1.3,
        columnspacing=1.2,
    )
    rows = math.ceil(len(labels) / columns)
    axes.set_title(axes.get_title(loc="left"), pad=6 + 13 * rows)


# -- SVG -------------------------------------------------------------------------------------------


def draw(panel: Panel) -> str:
    """Draw a panel as SVG."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own style would change the bytes
        matplotlib.rcParams.update(LOOK)
        drawing = MatplotlibFigure(figsize=(panel.width, panel.height), layout="constrained")
        axes = drawing.add_subplot()
        axes.set_title(panel.title)
        axes.tick_params(length=0)
        panel.draw(axes)
        text = io.StringIO()
        drawing.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _themed(_shortened(text.getvalue()), title=panel.title)


def _shortened(svg: str) -> str:
    """Remove what no reader sees: the prolog, metadata, unused ids, digits of coordinates."""
    svg = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # Ids that are not referred to would clash with those of other figures on a page.
    used = set(re.findall(r'(?:url\(#|href="#)([\w.-]+)', svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), svg)
    return re.sub(r"\n\s*\n+", "\n", svg)


def _themed(svg: str, title: str) -> str:
    """Let ink and grid follow the reader's theme, and give the drawing a title."""
    light = ""
    dark = ""
    for variable, (color, dark_color) in THEME.items():
        svg = svg.replace(color, f"var({variable}, {color})")
        light += f"{variable}: {color}; "
        dark += f"{variable}: {dark_color}; "
    style = (
        f"<style>svg {{ {light}}} @media (prefers-color-scheme: dark) {{ svg {{ {dark}}} }}</style>"
    )
    opening = re.search(r"<svg [^>]*>", svg)
    assert opening is not None
    return f"{opening[0]}<title>{html.escape(title)}</title>{style}{svg[opening.end() :]}"


# -- the figures of a run --------------------------------------------------------------------------


def bars_of(rates: Mapping[str, tuple[str, Interval | None]]) -> list[Bar]:
    """Return a bar for each policy that has a rate: policy -> title and rate."""
    return [
        Bar(
            label=title,
            color=color_of(policy),
            value=rate.estimate,
            interval=(rate.low, rate.high),
        )
        for policy, (title, rate) in rates.items()
        if rate is not None
    ]
