"""The figures of the page about algorithms: differences from PPO, and win rate over KL."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.algorithm_points import (
    BASE,
    BEST_OF_N,
    Point,
    algorithms_of,
    lines_of,
    named,
    settings_of,
)
from reports.equal_kl import AlgorithmPair, pairs_with_base
from reports.penalties import differences_at_equal_penalty
from reports.plots import (
    INK,
    NO_DIFFERENCE,
    Bar,
    Figure,
    Panel,
    color_of,
    difference_bar,
    differences,
    draw_legend,
    figure,
)
from reports.results import Interval
from reports.verdicts import mean_over_seeds
from stages.config.stages import POLICY_GRADIENT_STAGES


def main_figure(points: Sequence[Point], pairs: Sequence[AlgorithmPair]) -> Figure | None:
    """Draw the differences from PPO, at equal KL and at equal penalty, and the win rate over KL."""
    panels = []
    bars = bars_against_base(pairs)
    if bars:
        title = f"Difference from {named(BASE)} at equal KL"
        panels.append(differences(title, bars, x_label="points of win rate"))
    if BASE in algorithms_of(points):
        panels.append(_penalty_panel(points))
    panels.append(_zoomed_panel(points))
    return figure("comparison", panels)


def bars_against_base(pairs: Sequence[AlgorithmPair]) -> list[Bar]:
    """Return each algorithm's difference from PPO with the interval that decides."""
    bars = []
    for pair in pairs_with_base(pairs):
        label = pair.first_title
        if pair.compared_seeds < pair.all_seeds:
            label = f"{label}\n({pair.compared_seeds} of {pair.all_seeds} seeds)"
        bar = difference_bar(label, line_color(pair.first), pair.verdict)
        if bar is not None:
            bars.append(bar)
    return bars


def line_color(algorithm: str) -> str:
    """Return the color of an algorithm; best-of-n is not trained and has that of the text."""
    return INK if algorithm == BEST_OF_N else color_of(algorithm)


def _penalty_panel(points: Sequence[Point]) -> Panel:
    penalties = sorted((setting for setting, _ in settings_of(points, BASE)), key=float)
    trained = [name for name in algorithms_of(points) if name in POLICY_GRADIENT_STAGES]
    others = [name for name in trained if name != BASE]

    def draw(axes: Axes) -> None:
        axes.axhspan(-NO_DIFFERENCE, NO_DIFFERENCE, color=INK, alpha=0.1, lw=0)
        axes.axhline(0.0, color=INK, lw=1, ls=(0, (4, 3)))
        for place, algorithm in enumerate(others):
            color = line_color(algorithm)
            # Next to each other, so that no interval hides another one.
            shift = 0.4 * (place - (len(others) - 1) / 2) / len(others)
            means = differences_at_equal_penalty(points, algorithm)
            for penalty, mean in means.items():
                if isinstance(mean, Interval):
                    x = penalties.index(penalty) + shift
                    axes.plot([x, x], [mean.low, mean.high], color=color, lw=4, alpha=0.35)
            axes.plot(
                [penalties.index(penalty) + shift for penalty in means],
                [mean.estimate if isinstance(mean, Interval) else mean for mean in means.values()],
                "o",
                ms=5,
                color=color,
                label=named(algorithm),
            )
        axes.set_xticks(range(len(penalties)), penalties)
        axes.set_xlim(-0.5, len(penalties) - 0.5)
        axes.set_xlabel("coefficient of the KL penalty")
        axes.set_ylabel("points of win rate")
        axes.grid(visible=False, axis="x")
        if others:
            draw_legend(axes)

    return Panel(title=f"Difference from {named(BASE)} at equal penalty", draw=draw, height=2.9)


def _mean_points(points: Sequence[Point], algorithm: str) -> list[tuple[float, float]]:
    """Return the mean KL and win rate, in percent, of each setting."""
    return [
        (fmean(point.kl for point in seeds), 100 * fmean(point.win_rate for point in seeds))
        for _, seeds in settings_of(points, algorithm)
    ]


@dataclass(frozen=True)
class Zoom:
    """The part of a plot of win rate, in percent, over KL that is drawn."""

    kls: tuple[float, float]
    rates: tuple[float, float]

    def shows(self, kl: float, rate: float) -> bool:
        """Whether a point is in this part."""
        return self.kls[0] <= kl <= self.kls[1] and self.rates[0] <= rate <= self.rates[1]


def zoom_of(points: Sequence[Point]) -> Zoom | None:
    """Return where the trained algorithms are, with a margin; None without any."""
    trained = [name for name in algorithms_of(points) if name in POLICY_GRADIENT_STAGES]
    means = [mean for name in trained for mean in _mean_points(points, name)]
    if not means:
        return None
    return Zoom(
        kls=_padded([kl for kl, _ in means], at_least=0.2),
        rates=_padded([rate for _, rate in means], at_least=1.0),
    )


def _padded(values: Sequence[float], at_least: float) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    margin = max(at_least, 0.12 * (high - low))
    return low - margin, high + margin


def outside_the_zoom(points: Sequence[Point]) -> list[str]:
    """Return the algorithms that the zoomed plot does not show."""
    zoom = zoom_of(points)
    if zoom is None:
        return []
    outside = []
    for algorithm in algorithms_of(points):
        is_shown = any(zoom.shows(kl, rate) for kl, rate in _mean_points(points, algorithm))
        if not is_shown:
            outside.append(named(algorithm))
    return outside


def _zoomed_panel(points: Sequence[Point]) -> Panel:
    """The mean win rate over KL, where the trained algorithms are."""
    zoom = zoom_of(points)
    hidden = outside_the_zoom(points)

    def draw(axes: Axes) -> None:
        for algorithm in algorithms_of(points):
            if named(algorithm) in hidden:
                continue
            means = _mean_points(points, algorithm)
            style = ":" if algorithm == BEST_OF_N else "-"
            axes.plot(
                [kl for kl, _ in means],
                [rate for _, rate in means],
                style,
                marker="o",
                ms=4,
                color=line_color(algorithm),
                label=named(algorithm),
            )
        if zoom is not None:
            axes.set_xlim(*zoom.kls)
            axes.set_ylim(zoom.rates[0], min(100.0, zoom.rates[1]))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axes.set_xlabel("KL from SFT, nats per summary")
        axes.set_ylabel("win rate")
        draw_legend(axes)

    return Panel(title="Win rate over KL", draw=draw, height=2.9)


def over_kl_figure(points: Sequence[Point], is_gold: bool) -> Figure | None:
    """Draw gold scores or win rates over the root of KL, with intervals; None without any."""
    drawn = []
    for algorithm in lines_of(points):
        means = []
        for _, seeds in settings_of(points, algorithm):
            values = [point.gold if is_gold else 100 * point.win_rate for point in seeds]
            measured = [value for value in values if value is not None]
            if len(measured) == len(values):
                root = fmean(point.root for point in seeds)
                means.append((root, fmean(measured), mean_over_seeds(measured)))
        if means:
            drawn.append((algorithm, means))
    if not drawn:
        return None

    def draw(axes: Axes) -> None:
        for algorithm, means in drawn:
            color = line_color(algorithm)
            roots = [root for root, _, _ in means]
            middles = [middle for _, middle, _ in means]
            style = ":" if algorithm == BEST_OF_N else "-"
            axes.plot(
                roots, middles, style, marker="o", ms=3.5, color=color, label=named(algorithm)
            )
            bands = [mean for _, _, mean in means if isinstance(mean, Interval)]
            if len(bands) == len(means):
                lows = [band.low for band in bands]
                highs = [band.high for band in bands]
                axes.fill_between(roots, lows, highs, color=color, alpha=0.13, lw=0)
        axes.set_xlabel("square root of the KL from SFT in nats")
        axes.set_ylabel("gold score" if is_gold else "win rate, %")
        draw_legend(axes)

    title = "Gold score over KL" if is_gold else "Win rate over KL"
    name = "gold-score" if is_gold else "win-rate"
    return figure(name, [Panel(title=title, draw=draw, width=5.2, height=3.4)])
