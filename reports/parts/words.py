"""Numbers in plain words: how every page writes a rate, a difference, a name and a setting."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isnan
from statistics import fmean
from typing import Any

from eval.stats.formulas import Interval, mean_of_seeds
from reports.parts.cells import MISSING, Number, PValue
from stages.config.config import public_value
from stages.config.stages import POLICY_STAGES
from stages.rl.algorithms import ALGORITHMS

Row = dict[str, Any]
"""One JSON object: the numbers of a run, the results of a stage, or a line of a file."""
STRENGTH = "strength of the label"  # 1 slightly better, 4 far better


def percent(share: float | None) -> Number:
    """A fraction as a percentage with one digit."""
    return MISSING if share is None or isnan(share) else Number(100 * share, 1, "%")


def number(value: float | None, digits: int = 2) -> Number:
    """A number with so many digits after the point."""
    return MISSING if value is None or isnan(value) else Number(value, digits)


def whole(value: float | None) -> Number:
    """A count."""
    return number(value, 0)


def posts_of(count: float) -> str:
    """A count of posts."""
    return f"{whole(count)} post{'' if count == 1 else 's'}"


def seeds_of(count: int) -> str:
    """A count of seeds."""
    return f"{count} seed{'' if count == 1 else 's'}"


def named(policy: str, others: Iterable[str] = ()) -> str:
    """A policy as a page writes it: one of this pipeline by its title, unless another has it."""
    title = ALGORITHMS[policy].title if policy in ALGORITHMS else policy.upper()
    return title if policy in POLICY_STAGES and title not in others else policy


def listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them."""
    *others, last = names or [""]
    return f"{', '.join(others)} and {last}" if others else last


def share(estimate: float | None, low: float, high: float) -> Number:
    """A fraction with its 95% interval, in percent; None: the interval alone."""
    return Number(None if estimate is None else 100 * estimate, 1, "%", 100 * low, 100 * high)


def estimate(rate: Row | Interval | None) -> Number:
    """A rate with its interval, from its `estimate`, `low` and `high`; a dash for None."""
    row = vars(rate) if isinstance(rate, Interval) else rate
    if row is None or row["estimate"] is None:
        return MISSING
    return share(row["estimate"], row["low"], row["high"])


def accuracy(results: Row) -> Number:
    """The accuracy of a scorer of pairs with its interval; a dash where there were none."""
    if not results["pairs"]:
        return number(None)
    return share(*(results[key] for key in ("accuracy", "accuracy_low", "accuracy_high")))


def rate(row: Row, policy: str) -> Number:
    """A policy's win rate with its interval; a dash if too many posts are unjudged."""
    win_rate, low, high = (row[f"{policy}/{key}"] for key in ("win_rate", "low", "high"))
    if win_rate is None or isnan(win_rate):  # nan: from a table of runs
        return unjudged_share(row[f"{policy}/unjudged"])
    return share(win_rate, low, high)


def unjudged_share(value: float) -> Number:
    """What stands in the place of a rate where too many posts are unjudged."""
    return Number(note=f"({percent(value)} unjudged)")


def at_equal_length(rate_: Row | None) -> Number:
    """`estimate` of a rate at equal length, marked where the model answers and not the data."""
    cell = estimate(rate_)
    marked = rate_ is not None and cell != MISSING and rate_["extrapolated"]
    return replace(cell, note="EXTRAPOLATED") if marked else cell


def points(middle: float | None, low: float | None = None, high: float | None = None) -> Number:
    """A difference of two shares in points, with its bounds."""
    middle, low, high = (None if x is None else 100 * x for x in (middle, low, high))
    return Number(middle, 1, "points", low, high, signed=True)


def bounds_in_points(bounds: tuple[float, float] | None) -> Number:
    """An interval of a difference of two shares, in points; a dash for None."""
    return points(None, *bounds) if bounds else MISSING


def in_points(difference: Row | Interval) -> Number:
    """A difference of two shares with its interval, in points."""
    row = vars(difference) if isinstance(difference, Interval) else difference
    return points(row["estimate"], row["low"], row["high"])


def difference(gap: Row) -> Number:
    """A paired difference of two win rates, in points; a dash if too much is unjudged."""
    return in_points(gap) if gap["headline"] else Number(note="(too many unjudged)")


def above_sft(row: Row) -> Number:
    """By how many points the learned policy's win rate lies above SFT's, with the interval."""
    return difference(row["differences"][f"{row['policy']}-sft"])


def plain(value: Row | None) -> Number:
    """A number that is no share, such as a mean score, with its interval; a dash for None.

    An interval without width is none: that of one post, and of a kappa that is 0 by construction,
    because all answers of one judge are alike.
    """
    if value is None or value["estimate"] is None:
        return MISSING
    if value["low"] == value["high"]:
        return number(value["estimate"])
    return Number(value["estimate"], low=value["low"], high=value["high"])


def seeds_mean(values: Sequence[float], form: Callable[[float], Number]) -> Number:
    """A mean over seeds with its 95% t interval, as `form` writes numbers; one seed has none, and
    no seed is a dash.
    """
    if not values:
        return MISSING
    bounds, mean = mean_of_seeds(values), form(fmean(values))
    low, high = (form(end).value for end in bounds) if bounds else (None, None)
    return replace(mean, low=low, high=high)


def p_value(value: float | None) -> Number:
    """A p-value as papers write it."""
    return MISSING if value is None else PValue(value, 3)


def shown(name: str, value: Any) -> str:
    """A setting as a page may show it: folders by their last name, servers not at all."""
    value = public_value(name, value)
    return value or "(empty)" if isinstance(value, str) else json.dumps(value)


def device_of(manifest: Row) -> str:
    """The device of a stage, with the processor and its instructions where they are known."""
    processor = ", ".join(manifest["processor"].values())
    return f"{manifest['device']} ({processor})" if processor else str(manifest["device"])


def judge(row: Row) -> str:
    """Who judged; says so if that is not a language model."""
    name: str = row["judge"]
    return name if row["is_llm"] or "not an llm" in name.lower() else f"{name} (not an LLM)"


def briefly(name: str) -> str:
    """A judge's name for a sentence that says itself whether it is an LLM."""
    return name.removesuffix(", not an LLM").removesuffix(" (offline rule, not an LLM)")


def side(low: float, high: float, even: float = 0.0) -> int:
    """1 where an interval lies above a number, -1 where it lies below, 0 where it holds it."""
    return (low > even) - (high < even)


def direction(gain: Row | None) -> str:
    """Whether a score rose or fell, by the interval over posts; one post alone shows neither."""
    if gain is None:
        return "is not known"
    moved = side(gain["low"], gain["high"]) if gain["low"] < gain["high"] else 0
    return {1: "rose", -1: "fell", 0: "did not reliably move"}[moved]
