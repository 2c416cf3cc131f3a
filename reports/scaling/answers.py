"""The blocks of the first screen: one row a size, and the plot of win rate against parameters."""

from collections.abc import Sequence

import pandas as pd

from reports.parts import plots
from reports.parts.collect import Record
from reports.parts.page import Block, Figure, Note, Table, Text
from reports.parts.verdict import MISSING, interval, number, percent
from reports.scaling import curves, verdicts
from reports.scaling.beside_paper import Row
from reports.scaling.fits import Pooled
from reports.scaling.verdicts import BEATS, DOES_NOT, UNKNOWN, SizeVerdict, size_verdicts

WIDE, HIGH = 1.6, 1.2


def blocks(frame: pd.DataFrame, beside: Sequence[Row]) -> list[Block]:
    """What PPO did at each size, which seeds failed, and the plot beside it."""
    verdicts = size_verdicts(frame)
    return [
        Text(answer(verdicts), lead=True),
        answers_table(verdicts),
        *(Note(one) for one in called_out_lines(verdicts)),
        win_rate_figure(frame, beside),
    ]


def answer(verdicts: Sequence[SizeVerdict]) -> str:
    """Whether PPO beats the references, and at which sizes, in one sentence."""
    said = []
    for verdict, verb in ((BEATS, "beats the references at"), (DOES_NOT, "does not beat them at")):
        named = _named([one for one in verdicts if one.verdict == verdict])
        said += [f"{verb} {named}"] if named else []
    unknown = _named([one for one in verdicts if one.verdict == UNKNOWN])
    text = " and ".join(said)
    if unknown and text:
        text += f"; at {unknown} it cannot be told"
    single = [one for one in verdicts if one.seeds == 1]
    more = f" One seed only at {_named(single)}, which says nothing of seeds." if single else ""
    return f"PPO {text or f'cannot be told from the references at {unknown}'}.{more}"


def _named(verdicts: Sequence[SizeVerdict]) -> str:
    names = [f"{one.name} ({plots.count(one.parameters)})" for one in verdicts]
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)


def answers_table(verdicts: Sequence[SizeVerdict]) -> Table:
    """One row a size: the answer, the win rate, at equal length, tokens, the seeds called out."""
    rows = [
        [
            f"{one.name}, {plots.count(one.parameters)}",
            one.verdict,
            pooled(one.win_rate),
            pooled(one.controlled) + (" EXTRAPOLATED" if one.extrapolated else ""),
            number(one.tokens, 1),
            number(one.reference_tokens, 1),
            _seeds(one),
        ]
        for one in verdicts
    ]
    header = ("size", "PPO", "win rate", "at equal length", "PPO tokens", "reference", "seeds")
    caption = (
        "Win rate against the reference: the mean over seeds, with a 95% interval that holds the"
        " doubt of seeds and of posts (of one seed: of posts alone). Beats, does not beat: the"
        f" whole interval lies above, below 50%.{_of_fewer_seeds(verdicts)}"
    )
    return Table(header, rows, caption, strong=True, name="sizes")


def pooled(found: Pooled | None) -> str:
    """A share with its interval, in percent; a dash for None."""
    if found is None:
        return MISSING
    return f"{percent(found.estimate)} {interval(found.low, found.high)}"


def _of_fewer_seeds(verdicts: Sequence[SizeVerdict]) -> str:
    """At which sizes a mean at equal length is of fewer seeds than the win rate beside it."""
    fewer = [
        f"{one.controlled.seeds} of {one.seeds} seeds of {one.name}"
        for one in verdicts
        if one.controlled is not None and one.controlled.seeds < one.seeds
    ]
    return f" At equal length: {', '.join(fewer)} have a rate." if fewer else ""


def _seeds(one: SizeVerdict) -> str:
    collapsed = [str(bad.seed) for bad in one.called_out if bad.collapsed]
    behind = [str(bad.seed) for bad in one.called_out if not bad.collapsed]
    named = [f"COLLAPSED: {', '.join(collapsed)}"] if collapsed else []
    named += [f"fell behind: {', '.join(behind)}"] if behind else []
    return f"{'; '.join(named)} (of {one.seeds})" if named else f"none of {one.seeds} failed"


def called_out_lines(verdicts: Sequence[SizeVerdict]) -> list[str]:
    """One line that names every seed that collapsed or fell behind; no line if none did."""
    said = [
        f"{one.name} seed {bad.seed} {'COLLAPSED' if bad.collapsed else 'fell behind'} ({bad.why})"
        for one in verdicts
        for bad in one.called_out
    ]
    return (
        [f"{'; '.join(said)}. The rule stands below, under Seeds and posts apart."] if said else []
    )


def win_rate_figure(frame: pd.DataFrame, beside: Sequence[Row]) -> Figure:
    """Win rate against parameters."""
    panel = curves.win_rates(frame, beside)
    drawn = [one for one in beside if one.key == "ppo_win_rate" and one.difference is not None]
    source = (
        f" Diamonds: the seeds of Huang et al. 2024, {drawn[0].source}, at our parameters."
        if drawn
        else ""
    )
    caption = (
        "A dot is a seed, a line goes through the means of the seeds. Dashed: even with the"
        f" references. The axis of parameters is logarithmic.{source}"
    )
    alone = plots.alone(panel, "win-rates", WIDE, HIGH)
    return Figure("sizes", caption, plots.together([panel], WIDE, HIGH), [alone])


def frontier_blocks(records: Sequence[Record], frame: pd.DataFrame) -> list[Block]:
    """Over-optimisation: the seeds where it was found, and the frontier that shows it."""
    found = verdicts.over_optimised(frame)
    said = [
        f"{one.name} seed {one.seed}: the proxy rose by {number(one.proxy_gain)} and"
        f" {_fell(one)} fell, at a KL of {number(one.kl, 1)} nats"
        for one in found
    ]
    panels = curves.frontier(records, frame)
    parts = [plots.alone(panel, f"frontier{n}", 1.2, 1.2) for n, panel in enumerate(panels)]
    caption = "Left: each seed's path, ten means; darker is larger. Right: every seed at its end."
    figure = Figure("frontier", caption, plots.together(panels, 1.2, 1.2), parts)
    first: Block = Text("No seed is over-optimised by this rule.")
    if said:
        first = Note(f"OVER-OPTIMISATION: {'; '.join(said)}.")
    return [first, Text(verdicts.OVER_OPTIMISED_RULE), figure]


def _fell(one: verdicts.OverOptimised) -> str:
    both = [("the win rate", one.win_rate_fell), ("the gold score", one.gold_fell)]
    return " and ".join(what for what, fell in both if fell)
