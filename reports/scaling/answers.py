"""The blocks of the first screen, their plots over parameters, and the frontier of score and KL."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from reports.parts import plots
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record
from reports.parts.page import Block, Figure, Note, Table, Text
from reports.parts.plots import GRID, INK, Panel
from reports.parts.words import estimate, named, number, seeds_of
from reports.scaling import measures
from reports.scaling.beside_paper import NOT_COMPARABLE, PaperNumber
from reports.scaling.measures import (
    BEATS,
    DOES_NOT,
    UNKNOWN,
    OverOptimised,
    Pooled,
    SizeVerdict,
    over_optimised,
    parameters_of,
    policies,
    sizes,
)
from reports.sections.curves import frontier as proxy_against_kl
from reports.sections.curves import path

WIDE, HIGH = 1.6, 1.2
# Colours of sizes, from small to large: one hue, darker with size.
SHADES = ("#9ecae1", "#6baed6", "#3f8fc5", "#2171b5", "#08519c", "#08306b")
PAPER_MARK = "D"
APART = 1.025  # factor of parameters between the dots of two policies


def answer(verdicts: Sequence[SizeVerdict]) -> str:
    """Whether PPO beats the references, at which sizes, and whether it does at equal length."""
    if len(verdicts) == 1:
        (size,) = verdicts
        verb = f"is {UNKNOWN} against the references" if size.verdict == UNKNOWN else size.verdict
        if size.win_rate is None:
            return f"No seed of {size.name} has a win rate: too many posts have no verdict."
        rates = f"{pooled(size.win_rate)}, at equal length {at_length(size)}"
        return f"Over {seeds_of(size.seeds)} of {size.name} PPO {verb}: {rates}."
    verdict = _told([(size, size.verdict) for size in verdicts])
    lengths = [(size, measures.verdict_of(size.controlled)) for size in verdicts]
    same = lengths == [(size, size.verdict) for size in verdicts]
    marked = _named([size for size in verdicts if size.extrapolated])
    mark = f" (EXTRAPOLATED at {marked})" if marked else ""
    length = "the same holds" if same else f"it {_told(lengths)}"
    return f"PPO {verdict}. At equal length {length}{mark}."


def _told(verdicts: Sequence[tuple[SizeVerdict, str]]) -> str:
    """Which verdict holds at which sizes."""
    parts: list[str] = []
    first = {BEATS: BEATS, DOES_NOT: "does NOT beat the references"}
    first |= {UNKNOWN: "is inconclusive against the references"}
    later = {DOES_NOT: "does NOT beat them", UNKNOWN: "is inconclusive"}
    for verdict, verb in first.items():
        named = _named([size for size, own in verdicts if own == verdict])
        parts += [f"{later[verdict] if parts else verb} at {named}"] if named else []
    return ", ".join(parts)


def _named(verdicts: Sequence[SizeVerdict]) -> str:
    names = [f"{size.name} ({plots.count(size.parameters)})" for size in verdicts]
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)


def answers_table(verdicts: Sequence[SizeVerdict]) -> Table:
    """One row a size: the answer, the win rate, at equal length, tokens, the seeds called out."""
    rows = [
        [
            f"{size.name}, {plots.count(size.parameters)}",
            size.verdict,
            pooled(size.win_rate),
            at_length(size),
            number(size.tokens, 1),
            number(size.reference_tokens, 1),
            _seeds(size),
        ]
        for size in verdicts
    ]
    header = ("size", "PPO", "win rate", "at equal length", "PPO tokens", "reference", "seeds")
    caption = (
        "Means over seeds with 95% intervals over seeds and posts (of one seed: over posts alone)."
        " Beats: the whole interval lies above 50%; does not beat: below; else inconclusive."
        f"{_of_fewer_seeds(verdicts)}"
    )
    return Table(header, rows, caption, strong=True, name="sizes")


def pooled(mean: Pooled | None) -> Number:
    """A share with its interval, in percent; a dash for None."""
    return estimate(vars(mean)) if mean else MISSING


def at_length(size: SizeVerdict) -> Number:
    """The win rate at equal length, marked where the model answers and not the data."""
    return replace(pooled(size.controlled), note="EXTRAPOLATED" * size.extrapolated)


def _of_fewer_seeds(verdicts: Sequence[SizeVerdict]) -> str:
    """At which sizes a mean at equal length is of fewer seeds than the win rate beside it."""
    fewer = [
        f"{size.controlled.seeds} of {size.seeds} seeds of {size.name}"
        for size in verdicts
        if size.controlled is not None and size.controlled.seeds < size.seeds
    ]
    return f" At equal length: {', '.join(fewer)} have a rate." if fewer else ""


def _seeds(size: SizeVerdict) -> str:
    collapsed = [str(bad.seed) for bad in size.called_out if bad.collapsed]
    behind = [str(bad.seed) for bad in size.called_out if not bad.collapsed]
    named = [f"COLLAPSED: {', '.join(collapsed)}"] if collapsed else []
    named += [f"fell behind: {', '.join(behind)}"] if behind else []
    return f"{'; '.join(named)} (of {size.known})" if named else f"none of {size.known} fell behind"


def called_out_lines(verdicts: Sequence[SizeVerdict]) -> list[str]:
    """One line that names every seed that collapsed or fell behind; no line if none did."""
    lines = [
        f"{size.name} seed {bad.seed} {'COLLAPSED' if bad.collapsed else 'fell behind'} ({bad.why})"
        for size in verdicts
        for bad in size.called_out
    ]
    return [f"{'; '.join(lines)}. The rule: Seeds and posts apart."] if lines else []


def win_rate_figure(frame: pd.DataFrame, paper_numbers: Sequence[PaperNumber]) -> Figure:
    """Win rate against parameters, or of each seed where there is one size."""
    if len(sizes(frame)) == 1:
        drawn = [
            (f"{named(policy)}, {row['seed']}", plots.color_of(policy), *(row[k] for k in keys))
            for policy in policies(frame)
            for keys in [[f"{policy}/{key}" for key in ("win_rate", "low", "high")]]
            for row in frame.dropna(subset=keys).sort_values("seed").to_dict("records")
        ]
        caption = "Each seed with its 95% interval over posts. Dashed: even with the references."
        return plots.figure("sizes", caption, [plots.win_rates(drawn)], 1.75, plots.tall(drawn))
    seeds = [x for x in paper_numbers if x.key == "ppo_win_rate" and x.verdict != NOT_COMPARABLE]
    caption = (
        "A dot is a seed, a line goes through the means of the seeds. The axis of parameters is"
        " logarithmic."
    )
    if seeds:
        caption += f" Diamonds: seeds of Huang et al. 2024, {seeds[0].source}, at our parameters."
    return plots.figure("sizes", caption, [win_rates(frame, paper_numbers)], WIDE, HIGH)


def frontier_blocks(records: Sequence[Record], frame: pd.DataFrame) -> list[Block]:
    """Over-optimisation: the seeds where it was found, and the frontier that shows it."""
    bad_seeds = over_optimised(frame)
    lines = [
        f"{seed.name} seed {seed.seed}: the proxy rose by {number(seed.proxy_gain)} and"
        f" {_fell(seed)} fell, at a KL of {number(seed.kl, 1)} nats"
        for seed in bad_seeds
    ]
    panels = frontier(records, frame)
    several = "; darker is larger" if len(sizes(frame)) > 1 else ""
    caption = f"Left: each seed's path{several}. Right: every seed at its end."
    figure = plots.figure("frontier", caption, panels, 1.2, 1.2)
    first: Block = Text("No seed is over-optimised by this rule.")
    if lines:
        first = Note(f"OVER-OPTIMISATION: {'; '.join(lines)}.")
    return [first, Text(measures.OVER_OPTIMISED_RULE), figure]


def _fell(seed: OverOptimised) -> str:
    both = [("the win rate", seed.win_rate_fell), ("the gold score", seed.gold_fell)]
    return " and ".join(what for what, fell in both if fell)


# -- plots -----------------------------------------------------------------------------------------


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
    means = [(parameters_of(rows), float(rows[key].mean())) for _, rows in sizes(there)]
    return Series(label=label, color=color, seeds=seeds, means=means)


def win_rates(frame: pd.DataFrame, paper_numbers: Sequence[PaperNumber]) -> Panel:
    """Win rates of all policies over parameters, the references at 50 %, and the paper's seeds."""
    drawn = [
        replace(
            series(frame, f"{policy}/win_rate", named(policy), plots.color_of(policy)),
            paper=_paper_points(frame, paper_numbers, f"{policy}_win_rate"),
        )
        for policy in policies(frame)
    ]

    def draw(axes: Axes) -> None:
        axes.axhline(0.5, color=INK, lw=1, ls=(0, (4, 3)), label="references")
        for place, series_ in enumerate(drawn):
            _draw_series(axes, series_, APART ** (place - (len(drawn) - 1) / 2))
        _log_sizes(axes, [size for series_ in drawn for size, _ in series_.means])
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(plots.PERCENT)
        plots.legend(axes)

    about = " ".join(
        f"{series_.label} at {plots.count(size)} parameters: {value:.1%}."
        for series_ in drawn
        for size, value in series_.means
    )
    return Panel("Win rate against the reference", draw, about)


def _paper_points(
    frame: pd.DataFrame, paper_numbers: Sequence[PaperNumber], key: str
) -> list[tuple[float, float]]:
    """The paper's seeds where our judge and data allow it, at the parameters of our own run."""
    places = {
        str(preset).removeprefix("pythia-"): parameters_of(rows)
        for preset, rows in frame.groupby("preset")
    }
    rows = [
        number for number in paper_numbers if number.key == key and number.verdict != NOT_COMPARABLE
    ]
    return [(places[number.size], value) for number in rows for value in number.paper_values]


def _draw_series(axes: Axes, series_: Series, apart: float) -> None:
    """Dots of the seeds, moved by a factor so that those of two policies stand apart, and means."""
    if series_.means:
        axes.plot(*zip(*series_.means, strict=True), color=series_.color, label=series_.label)
    if series_.seeds:
        seeds = [(size * apart, value) for size, value in series_.seeds]
        axes.plot(*zip(*seeds, strict=True), "o", color=series_.color, ms=4.5, alpha=0.75)
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
    labels = {name: plots.count(parameters_of(seeds)) for name, seeds in sizes(frame)}
    colors = {name: SHADES[min(place, len(SHADES) - 1)] for place, name in enumerate(labels)}
    if len(labels) == 1:
        colors = dict.fromkeys(labels, plots.PPO)
    bad = {(seed.name, seed.seed) for seed in over_optimised(frame)}
    labelled: set[str] = set()
    curves = []
    for record in records:
        label = "" if record.name in labelled else labels[record.name]
        labelled.add(record.name)
        curves.append(path(record.rows("ppo"), label, colors[record.name]))
    x = "KL from SFT, nats per summary"

    def draw_ends(axes: Axes) -> None:
        axes.axhline(0.5, color=INK, lw=1, ls=(0, (4, 3)))
        for row in frame.dropna(subset=["ppo/win_rate"]).to_dict("records"):
            mark = "X" if (row["name"], row["seed"]) in bad else "o"
            size = 9 if mark == "X" else 6
            color = colors[row["name"]]
            axes.plot(row["kl"], row["ppo/win_rate"], mark, color=color, ms=size, mec=GRID)
        axes.set_xlabel(x)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(plots.PERCENT)

    ends = " ".join(
        f"{row['name']} seed {row['seed']}: KL {row['kl']:.1f}, win rate {row['ppo/win_rate']:.1%}."
        for row in frame.to_dict("records")
    )
    return [
        proxy_against_kl("Proxy score while PPO learns", curves, x, ends=False),
        Panel("Win rate at its end (X: over-optimised)", draw_ends, ends),
    ]
