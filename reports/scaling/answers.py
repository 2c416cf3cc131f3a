"""The blocks of the first screen: one row a size, and the plot of win rate against parameters."""

from collections.abc import Sequence

import pandas as pd

from reports.parts import plots
from reports.parts.collect import Record
from reports.parts.page import Block, Figure, Note, Table, Text
from reports.parts.words import MISSING, interval, number, percent
from reports.scaling import curves, verdicts
from reports.scaling.beside_paper import PaperNumber
from reports.scaling.fits import Pooled
from reports.scaling.verdicts import BEATS, DOES_NOT, UNKNOWN, SizeVerdict, size_verdicts

WIDE, HIGH = 1.6, 1.2


def blocks(frame: pd.DataFrame, beside: Sequence[PaperNumber]) -> list[Block]:
    """What PPO did at each size, which seeds failed, and the plot beside it."""
    verdicts = size_verdicts(frame)
    return [
        Text(answer(verdicts), lead=True),
        answers_table(verdicts),
        *(Note(line) for line in called_out_lines(verdicts)),
        win_rate_figure(frame, beside),
    ]


def answer(verdicts: Sequence[SizeVerdict]) -> str:
    """Whether PPO beats the references, and at which sizes, in one sentence."""
    parts = []
    for verdict, verb in ((BEATS, "beats the references at"), (DOES_NOT, "does not beat them at")):
        named = _named([size for size in verdicts if size.verdict == verdict])
        parts += [f"{verb} {named}"] if named else []
    unknown = _named([size for size in verdicts if size.verdict == UNKNOWN])
    text = " and ".join(parts)
    if unknown and text:
        text += f"; at {unknown} it is inconclusive"
    single = [size for size in verdicts if size.seeds == 1]
    more = f" One seed only at {_named(single)}, which says nothing of seeds." if single else ""
    return f"PPO {text or f'against the references is inconclusive at {unknown}'}.{more}"


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
            pooled(size.controlled) + (" EXTRAPOLATED" if size.extrapolated else ""),
            number(size.tokens, 1),
            number(size.reference_tokens, 1),
            _seeds(size),
        ]
        for size in verdicts
    ]
    header = ("size", "PPO", "win rate", "at equal length", "PPO tokens", "reference", "seeds")
    caption = (
        "Win rate against the reference: the mean over seeds, with a 95% interval that holds the"
        " doubt of seeds and of posts (of one seed: of posts alone). Beats, does not beat: the"
        f" whole interval lies above, below 50%.{_of_fewer_seeds(verdicts)}"
    )
    return Table(header, rows, caption, strong=True, name="sizes")


def pooled(mean: Pooled | None) -> str:
    """A share with its interval, in percent; a dash for None."""
    if mean is None:
        return MISSING
    return f"{percent(mean.estimate)} {interval(mean.low, mean.high)}"


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
    return f"{'; '.join(named)} (of {size.seeds})" if named else f"none of {size.seeds} failed"


def called_out_lines(verdicts: Sequence[SizeVerdict]) -> list[str]:
    """One line that names every seed that collapsed or fell behind; no line if none did."""
    lines = [
        f"{size.name} seed {bad.seed} {'COLLAPSED' if bad.collapsed else 'fell behind'} ({bad.why})"
        for size in verdicts
        for bad in size.called_out
    ]
    return (
        [f"{'; '.join(lines)}. The rule stands below, under Seeds and posts apart."]
        if lines
        else []
    )


def win_rate_figure(frame: pd.DataFrame, beside: Sequence[PaperNumber]) -> Figure:
    """Win rate against parameters."""
    panel = curves.win_rates(frame, beside)
    drawn = [
        entry for entry in beside if entry.key == "ppo_win_rate" and entry.difference is not None
    ]
    source = (
        f" Diamonds: the seeds of Huang et al. 2024, {drawn[0].source}, at our parameters."
        if drawn
        else ""
    )
    caption = (
        "A dot is a seed, a line goes through the means of the seeds. Dashed: even with the"
        f" references. The axis of parameters is logarithmic.{source}"
    )
    return plots.figure("sizes", caption, [panel], WIDE, HIGH)


def frontier_blocks(records: Sequence[Record], frame: pd.DataFrame) -> list[Block]:
    """Over-optimisation: the seeds where it was found, and the frontier that shows it."""
    bad_seeds = verdicts.over_optimised(frame)
    lines = [
        f"{seed.name} seed {seed.seed}: the proxy rose by {number(seed.proxy_gain)} and"
        f" {_fell(seed)} fell, at a KL of {number(seed.kl, 1)} nats"
        for seed in bad_seeds
    ]
    panels = curves.frontier(records, frame)
    caption = "Left: each seed's path, ten means; darker is larger. Right: every seed at its end."
    figure = plots.figure("frontier", caption, panels, 1.2, 1.2)
    first: Block = Text("No seed is over-optimised by this rule.")
    if lines:
        first = Note(f"OVER-OPTIMISATION: {'; '.join(lines)}.")
    return [first, Text(verdicts.OVER_OPTIMISED_RULE), figure]


def _fell(seed: verdicts.OverOptimised) -> str:
    both = [("the win rate", seed.win_rate_fell), ("the gold score", seed.gold_fell)]
    return " and ".join(what for what, fell in both if fell)
