"""Reproduced, higher, lower or not comparable: our numbers beside the paper's, one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
import pandas as pd

from eval.stats.formulas import TAILS
from reports.parts import paper
from reports.parts.collect import Record
from reports.scaling.measures import Interval, given, sizes
from stages.config.config import TYPES, Config
from stages.config.presets import PRESETS

SAME = 0.10  # of the paper's number
REPRODUCED, HIGHER, LOWER, UNKNOWN = "reproduced", "higher", "lower", "inconclusive"
NOT_COMPARABLE = "not comparable"
RULE = (
    "Reproduced: the 95% interval of our mean - the paper's lies within 10% of the paper's"
    " number. Higher, lower: it does not, and it leaves out 0. Inconclusive: the rest."
)
# The sections that a number of the paper depends on; the judge is looked at apart.
SECTIONS = ("base", "data", "optimizer", "sft", "rm", "ppo", "lora", "eval")
JUDGED = ("sft_win_rate", "ppo_win_rate", "rm_gpt_agreement")


@dataclass(frozen=True)
class PaperNumber:
    """One number of the paper at one size, and what ours says of it."""

    size: str
    """As the paper names it, or the run's name where the paper has no such size."""
    what: str
    verdict: str
    why: str
    key: str = ""
    own_values: tuple[float, ...] = ()
    paper_values: tuple[float, ...] = ()
    """The paper's seeds, or its mean alone."""
    source: str = ""


def welch(
    own_values: Sequence[float], mean: float, deviation: float | None, count: int
) -> Interval:
    """Our mean - theirs, with Welch's 95% interval.

    `mean`, `deviation` (None: not known, taken as 0) and `count`: theirs. One seed of ours is one
    more draw from their spread: `mean -+ t(count - 1) s sqrt(1 + 1 / count)`; without a spread on
    either side the interval is without bounds.
    Source: Welch 1947; the prediction interval of one further observation of a normal sample.
    """
    from scipy.stats import t

    middle = float(np.mean(own_values)) - mean
    squares = [(deviation or 0.0) ** 2 / count, 0.0]
    freedoms = [count - 1, len(own_values) - 1]
    if len(own_values) > 1:
        squares[1] = float(np.var(own_values, ddof=1)) / len(own_values)
    elif deviation is None or count < 2:
        return middle, -inf, inf
    else:
        squares[1], freedoms[1] = deviation**2, count - 1
    error = sqrt(sum(squares))
    parts = sum(square**2 / free for square, free in zip(squares, freedoms, strict=True) if square)
    freedom = error**4 / parts if parts else inf
    if len(own_values) == 1:
        freedom = count - 1
    half = float(t.ppf(TAILS[1], freedom)) * error
    return middle, middle - half, middle + half


def verdict_of(difference: Interval, paper_mean: float) -> str:
    """What an interval of a difference says, beside the size of the paper's number.

    Source: equivalence by an interval within bounds, Schuirmann 1987, here with 95 %.
    """
    _, low, high = difference
    margin = SAME * abs(paper_mean)
    if -margin <= low and high <= margin:
        return REPRODUCED
    if low > 0:
        return HIGHER
    return LOWER if high < 0 else UNKNOWN


def rows(records: Sequence[Record], frame: pd.DataFrame) -> list[PaperNumber]:
    """A row for each size and number of the paper; one row says why for a size without any."""
    rows_made = []
    for name, seeds in sizes(frame):
        own = [record for record in records if record.name == name]
        size = paper.size_of(own[0].preset)
        reason = not_comparable(own)
        if size is None or reason:
            why = reason or "the paper has no such size"
            entry = PaperNumber(size or name, "everything", NOT_COMPARABLE, why)
            rows_made.append(entry)
            continue
        for key, column, _ in paper.COMPARED:
            if values := given(seeds, column):
                why = other_judge(own) if key in JUDGED else ""
                rows_made.append(_row(size, key, values, why))
    return rows_made


def _row(size: str, key: str, own_values: list[float], why: str) -> PaperNumber:
    entry = paper.load()["sizes"][key]
    count = len(paper.load()["seeds"])
    paper_values = tuple(entry.get("seeds", {}).get(size, ()))
    mean = entry["mean"][size]
    deviation = entry.get("sd", {}).get(size)
    if paper_values:
        mean, deviation = float(np.mean(paper_values)), float(np.std(paper_values, ddof=1))
    verdict = NOT_COMPARABLE if why else verdict_of(welch(own_values, mean, deviation, count), mean)
    if not why and verdict == UNKNOWN:
        why = "the interval of the difference is too wide"
    return PaperNumber(
        size=size,
        key=key,
        what=entry["what"],
        own_values=tuple(own_values),
        paper_values=paper_values or (mean,),
        verdict=verdict,
        why=why,
        source=paper.source(entry),
    )


def not_comparable(records: Sequence[Record]) -> str:
    """Why the seeds of one size cannot be compared with the paper at all; empty if they can."""
    preset = records[0].preset
    if not paper.is_comparable(preset):
        return "another model on other data"
    if paper.size_of(preset) is None:
        return "the paper has no such size or method"
    changed = sorted({setting for record in records for setting in departures(record)})
    return f"other settings than the paper's: {', '.join(changed)}" if changed else ""


def departures(record: Record) -> list[str]:
    """The recorded settings that differ from those of the run's preset, which is the paper's."""
    config: Config = PRESETS[record.preset]()
    return [
        f"{section}.{key}"
        for section in SECTIONS
        for key, value in record.settings.get(section, {}).items()
        if f"{section}.{key}" in TYPES and value != getattr(getattr(config, section), key)
    ]


def other_judge(records: Sequence[Record]) -> str:
    """Why win rates do not compare with the paper's; empty if its judge judged."""
    wanted = paper.load()["judge"]
    names = {
        name
        for record in records
        for judge in (record.results("judge"),)
        for name in judge["models"] or [judge["judge"]["name"]]
    }
    others = sorted(name for name in names if name != wanted)
    return f"judged by {', '.join(others)}, the paper's judge was {wanted}" if others else ""
