"""Plots over parameters, and the frontier of score, win rate and KL."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from reports.parts import plots
from reports.parts.collect import Record
from reports.parts.plots import GRID, INK, Panel
from reports.scaling.beside_paper import NOT_COMPARABLE, PaperNumber
from reports.scaling.fits import policies, sizes
from reports.scaling.verdicts import over_optimised

# Colours of sizes, from small to large: one hue, darker with size.
SHADES = ("#9ecae1", "#6baed6", "#3f8fc5", "#2171b5", "#08519c", "#08306b")
PAPER_MARK = "D"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One number over parameters: every seed, and the means of the sizes."""

    label: str
    color: str
    seeds: Sequence[tuple[float, float]]
    """Parameters and value of every seed."""
    means: Sequence[tuple[float, float]]
    paper: Sequence[tuple[float, float]] = ()
    """The paper's seeds, at the parameters of our run of the same size."""


def series(frame: pd.DataFrame, key: str, label: str, color: str) -> Series:
    """A column of the frame over parameters; seeds without a number are left out."""
    there = frame.dropna(subset=[key]) if key in frame else frame.iloc[:0]
    seeds = [(float(seed["parameters"]), float(seed[key])) for seed in there.to_dict("records")]
    means = [
        (float(rows["parameters"].iloc[0]), float(rows[key].mean())) for _, rows in sizes(there)
    ]
    return Series(label=label, color=color, seeds=seeds, means=means)


def win_rates(frame: pd.DataFrame, beside: Sequence[PaperNumber]) -> Panel:
    """Win rates of all policies over parameters, the references at 50 %, and the paper's seeds."""
    policies_series = [
        series(frame, f"{policy}/win_rate", policy.upper(), plots.POLICY_COLORS[policy])
        for policy in policies(frame)
        if policy in plots.POLICY_COLORS
    ]
    drawn = [
        Series(
            label=series_.label,
            color=series_.color,
            seeds=series_.seeds,
            means=series_.means,
            paper=_paper_points(frame, beside, f"{series_.label.lower()}_win_rate"),
        )
        for series_ in policies_series
    ]

    def draw(axes: Axes) -> None:
        axes.axhline(0.5, color=INK, lw=1, ls=(0, (4, 3)), label="references")
        for series_ in drawn:
            _draw_series(axes, series_)
        _log_sizes(axes, [size for series_ in drawn for size, _ in series_.means])
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(plots.PERCENT)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.3)

    return Panel("Win rate against the reference", draw, _about(drawn))


def shares(title: str, drawn: Sequence[Series]) -> Panel:
    """Any shares over parameters."""

    def draw(axes: Axes) -> None:
        for series_ in drawn:
            _draw_series(axes, series_)
        _log_sizes(axes, [size for series_ in drawn for size, _ in series_.means])
        axes.yaxis.set_major_formatter(plots.PERCENT)
        if len(drawn) > 1:
            axes.legend(loc="best", handlelength=1.3)

    return Panel(title, draw, _about(drawn))


def _about(drawn: Sequence[Series]) -> str:
    """Series of shares in words, size by size."""
    return " ".join(
        f"{series_.label} at {plots.count(size)} parameters: {value:.1%}."
        for series_ in drawn
        for size, value in series_.means
    )


def _paper_points(
    frame: pd.DataFrame, beside: Sequence[PaperNumber], key: str
) -> list[tuple[float, float]]:
    """The paper's seeds where our judge and data allow it, at the parameters of our own run."""
    places = {
        str(preset).removeprefix("pythia-"): float(rows["parameters"].iloc[0])
        for preset, rows in frame.groupby("preset")
    }
    rows = [number for number in beside if number.key == key and number.verdict != NOT_COMPARABLE]
    return [(places[number.size], value) for number in rows for value in number.theirs]


def _draw_series(axes: Axes, series_: Series) -> None:
    if series_.means:
        axes.plot(
            *zip(*series_.means, strict=True),
            color=series_.color,
            label=series_.label,
        )
    if series_.seeds:
        axes.plot(
            *zip(*series_.seeds, strict=True),
            "o",
            color=series_.color,
            ms=4.5,
            alpha=0.75,
        )
    if series_.paper:
        axes.plot(
            *zip(*series_.paper, strict=True),
            PAPER_MARK,
            mfc="none",
            mec=series_.color,
            ms=6.5,
            label=f"paper's {series_.label}",
        )


def _log_sizes(axes: Axes, parameters: Sequence[float]) -> None:
    places = sorted(set(parameters))
    axes.set_xscale("log")
    axes.set_xticks(places, [plots.count(place) for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("parameters")
    axes.margins(x=0.12)


def frontier(records: Sequence[Record], frame: pd.DataFrame) -> list[Panel]:
    """Proxy score over KL while PPO learns, and the win rate over KL at its end, seed by seed.

    Over-optimised seeds are crossed.
    """
    names = [name for name, _ in sizes(frame)]
    colors = {name: SHADES[min(place, len(SHADES) - 1)] for place, name in enumerate(names)}
    bad = {(seed.name, seed.seed) for seed in over_optimised(frame)}
    paths = [(record.name, _path(record)) for record in records]

    def draw_paths(axes: Axes) -> None:
        told: set[str] = set()
        for name, path in paths:
            label = plots.count(_parameters(frame, name)) if name not in told else None
            told.add(name)
            if path:
                axes.plot(*zip(*path, strict=True), color=colors[name], lw=1.2, label=label)
        axes.set_xlabel("KL from SFT, nats an episode")
        if told:
            axes.legend(loc="best", handlelength=1.3)

    def draw_ends(axes: Axes) -> None:
        axes.axhline(0.5, color=INK, lw=1, ls=(0, (4, 3)))
        for row in frame.dropna(subset=["ppo/win_rate"]).to_dict("records"):
            mark = "X" if (row["name"], row["seed"]) in bad else "o"
            size = 9 if mark == "X" else 6
            color = colors[row["name"]]
            axes.plot(row["kl"], row["ppo/win_rate"], mark, color=color, ms=size, mec=GRID)
        axes.set_xlabel("KL from SFT, nats an episode")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(plots.PERCENT)

    ends = " ".join(
        f"{row['name']} seed {row['seed']}: KL {row['kl']:.1f}, win rate {row['ppo/win_rate']:.1%}."
        for row in frame.to_dict("records")
    )
    about = "Each seed's proxy score over its KL, a line darker the larger the model."
    return [
        Panel("Proxy score while PPO learns", draw_paths, about),
        Panel("Win rate at its end (X: over-optimised)", draw_ends, ends),
    ]


def _parameters(frame: pd.DataFrame, name: str) -> float:
    return float(frame.loc[frame["name"] == name, "parameters"].iloc[0])


def _path(record: Record) -> list[tuple[float, float]]:
    """KL and proxy score, the means of ten parts of the training of one seed."""
    rows = [
        (update["objective/kl"], update["objective/scores"])
        for update in record.rows("ppo")
        if update.get("objective/kl") is not None and update.get("objective/scores") is not None
    ]
    step = max(1, len(rows) // 10)
    parts = [rows[start : start + step] for start in range(0, len(rows), step)]
    return [(fmean([a for a, _ in part]), fmean([b for _, b in part])) for part in parts]
