"""The blocks of the first screen, their plots over parameters, and over-optimisation."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from reports.parts import plots
from reports.parts.blocks import Block, Figure, Note, Table, Text
from reports.parts.cells import MISSING, Number
from reports.parts.paired import rows_of
from reports.parts.plots import INK, Panel
from reports.parts.words import estimate, named, number, percent, seeds_of
from reports.scaling import measures
from reports.scaling.beside_paper import NOT_COMPARABLE, PaperNumber
from reports.scaling.measures import (
    BEATS,
    DOES_NOT,
    UNKNOWN,
    Pooled,
    SizeVerdict,
    over_optimised,
    parameters_of,
    policies,
    sizes,
)

WIDE, HIGH = 1.6, 1.2
APART = 1.025  # factor of parameters between the dots of two policies


def title(verdicts: Sequence[SizeVerdict]) -> str:
    """At which sizes PPO beats the references, in one sentence; of one size its rate."""
    count = len(verdicts)
    if count == 1:
        (size,) = verdicts
        rate = (
            "" if size.win_rate is None else f", winning {percent(size.win_rate.estimate)} of posts"
        )
        verdict = (
            size.verdict if size.verdict != UNKNOWN else f"is {UNKNOWN} against the references"
        )
        return f"{size.name}: PPO {verdict}{rate}, over {seeds_of(size.seeds)}"
    beats = [size.verdict == BEATS for size in verdicts]
    if not any(beats):
        return f"PPO is not shown to beat the references at any of {count} sizes"
    smallest = plots.count(verdicts[beats.index(True)].parameters)
    if all(beats[beats.index(True) :]):
        where = f"from {smallest} parameters on, at {sum(beats)} of {count} sizes"
        return f"PPO beats the references {where}"
    return f"PPO beats the references at {sum(beats)} of {count} sizes, the smallest {smallest}"


def answer(verdicts: Sequence[SizeVerdict]) -> str:
    """What the title leaves open: where PPO does not beat the references, and at equal length."""
    if len(verdicts) == 1:
        (size,) = verdicts
        return f"PPO wins {pooled(size.win_rate)}, at equal length {at_length(size)}."
    verdict = _in_words([(size, size.verdict) for size in verdicts if size.verdict != BEATS])
    lengths = [(size, measures.verdict_of(size.controlled)) for size in verdicts]
    same = lengths == [(size, size.verdict) for size in verdicts]
    marked = _named([size for size in verdicts if size.extrapolated])
    mark = f" (EXTRAPOLATED at {marked})" if marked else ""
    length = "the same holds" if same else f"it {_in_words(lengths)}"
    first = f"PPO {verdict}. " if verdict else ""
    return f"{first}At equal length {length}{mark}."


def _in_words(verdicts: Sequence[tuple[SizeVerdict, str]]) -> str:
    """Which verdict holds at which sizes."""
    verbs = {BEATS: BEATS, DOES_NOT: DOES_NOT, UNKNOWN: f"is {UNKNOWN}"}
    where = {key: _named([size for size, own in verdicts if own == key]) for key in verbs}
    return ", ".join(f"{verbs[key]} at {names}" for key, names in where.items() if names)


def _named(verdicts: Sequence[SizeVerdict]) -> str:
    names = [f"{size.name} ({plots.count(size.parameters)})" for size in verdicts]
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)


def answers_table(verdicts: Sequence[SizeVerdict]) -> Table:
    """One row a size: the answer, the win rate, at equal length, the seeds called out."""
    rows = [
        [
            f"{size.name}, {plots.count(size.parameters)}",
            size.verdict,
            pooled(size.win_rate),
            at_length(size),
            _seeds(size),
        ]
        for size in verdicts
    ]
    header = ("size", "verdict", "win rate", "at equal length", "seeds that failed")
    caption = (
        "Means over seeds with 95% intervals over seeds and posts (of one seed: over posts alone)."
        " Beats: the whole interval lies above 50%; does not beat: below; else inconclusive."
        " Failed: collapsed or fell behind."
    )
    return Table(header, rows, caption, strong=True, name="sizes")


def pooled(mean: Pooled | None) -> Number:
    """A share with its interval, in percent; a dash for None."""
    return estimate(vars(mean)) if mean else MISSING


def at_length(size: SizeVerdict) -> Number:
    """The win rate at equal length, marked where the model answers and not the data, and where
    fewer seeds have it than have a win rate.
    """
    notes = ["EXTRAPOLATED"] * size.extrapolated
    if size.controlled is not None and size.controlled.seeds < size.seeds:
        notes.append(f"{size.controlled.seeds} of {size.seeds} seeds")
    return replace(pooled(size.controlled), note=", ".join(notes))


def _seeds(size: SizeVerdict) -> str:
    collapsed = int(size.called_out["collapsed"].sum())
    mark = f", {collapsed} COLLAPSED" if collapsed else ""
    return f"{len(size.called_out)} of {size.known}{mark}"


def called_out_lines(verdicts: Sequence[SizeVerdict]) -> list[str]:
    """One line that names every seed that collapsed or fell behind; no line if none did."""
    lines = []
    for row in rows_of(pd.concat([size.called_out for size in verdicts])):
        other = f"the median of the others {percent(row['median'])}"
        if row["collapsed"]:
            other = f"its own SFT {percent(row['sft/win_rate'])}"
        what = "COLLAPSED" if row["collapsed"] else "fell behind"
        rates = f"PPO {percent(row['ppo/win_rate'])}, {other}"
        lines.append(f"{row['name']} seed {row['seed']} {what} ({rates})")
    return [f"{'; '.join(lines)}. The rule: Seeds and posts apart."] if lines else []


def win_rate_figure(frame: pd.DataFrame, paper_numbers: Sequence[PaperNumber]) -> list[Figure]:
    """Win rate against parameters, or of each seed where there is one size."""
    if len(sizes(frame)) == 1:
        drawn = [
            (f"{named(policy)}, {row['seed']}", plots.color_of(policy), *(row[k] for k in keys))
            for policy in policies(frame)
            for keys in [[f"{policy}/{key}" for key in ("win_rate", "low", "high")]]
            for row in frame.dropna(subset=keys).sort_values("seed").to_dict("records")
        ]
        return plots.win_rate_figure(drawn)
    comparable = [entry for entry in paper_numbers if entry.verdict != NOT_COMPARABLE]
    caption = (
        "A dot is a seed, a line goes through the means of the seeds. The axis of parameters is"
        " logarithmic."
    )
    if sources := {entry.source for entry in comparable if entry.key == "ppo_win_rate"}:
        caption += f" Diamonds: seeds of Huang et al. 2024, {sources.pop()}, at our parameters."
    return [plots.figure("sizes", caption, [win_rates(frame, comparable)], WIDE, HIGH)]


def over_optimisation(frame: pd.DataFrame) -> list[Block]:
    """The seeds where over-optimisation was found, and the rule."""
    lines = []
    for row in rows_of(over_optimised(frame)):
        fell = ["the win rate"] * (row["difference_high"] < 0)
        fell += ["the gold score"] * (row["gold_gain/high"] < 0)
        lines.append(
            f"{row['name']} seed {row['seed']}: the proxy rose by"
            f" {number(row['score_gain']['estimate'])} and {' and '.join(fell)} fell, at a KL of"
            f" {number(row['kl'], 1)} nats"
        )
    first: Block = Text("No seed is over-optimised by this rule.")
    if lines:
        first = Note(f"OVER-OPTIMISATION: {'; '.join(lines)}.")
    return [first, Text(measures.OVER_OPTIMISED_RULE)]


# -- plots -----------------------------------------------------------------------------------------


def win_rates(frame: pd.DataFrame, comparable: Sequence[PaperNumber]) -> Panel:
    """Win rates of all policies over parameters: every seed, the means of the sizes, the references
    at 50 %, and the paper's seeds at the parameters of our run of the same size.
    """
    places = {
        str(preset).removeprefix("pythia-"): parameters_of(rows)
        for preset, rows in frame.groupby("preset")
    }
    there = {policy: frame.dropna(subset=[f"{policy}/win_rate"]) for policy in policies(frame)}
    means = {
        policy: [(parameters_of(seeds), seeds[f"{policy}/win_rate"].mean()) for _, seeds in groups]
        for policy, groups in ((policy, sizes(rows)) for policy, rows in there.items())
    }

    def draw(axes: Axes) -> None:
        axes.axhline(0.5, color=INK, lw=1, ls=(0, (4, 3)), label="references")
        for place, (policy, rows) in enumerate(there.items()):
            color, key = plots.color_of(policy), f"{policy}_win_rate"
            axes.plot(*zip(*means[policy], strict=True), color=color, label=named(policy))
            apart = rows["parameters"] * APART ** (place - (len(there) - 1) / 2)
            axes.plot(apart, rows[f"{policy}/win_rate"], "o", color=color, ms=4.5, alpha=0.75)
            for entry in [entry for entry in comparable if entry.key == key]:
                at = [places[entry.size]] * len(entry.paper_values)
                axes.plot(at, entry.paper_values, "D", mfc="none", mec=color, ms=6.5)
        ticks = sorted(set(frame["parameters"]))
        axes.set_xscale("log")
        axes.set_xticks(ticks, [plots.count(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("parameters")
        axes.margins(x=0.12)
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(plots.PERCENT)
        plots.legend(axes)

    about = " ".join(
        f"{named(policy)} at {plots.count(size)} parameters: {value:.1%}."
        for policy, points in means.items()
        for size, value in points
    )
    return Panel("Win rate against the reference", draw, about)
