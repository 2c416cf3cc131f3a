"""Straight lines over the logarithm of parameters, by statsmodels, where points can carry one."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np
import pandas as pd

from eval.rates.formulas import TAILS, Z
from reports.parts.collect import Record, policies_of, row
from reports.parts.words import Row
from stages.settings.checks import UserError
from stages.settings.stages import POLICY_STAGES

LEAST_SIZES = 4  # three points leave a line one degree of freedom: t is 12.7 there, and 4.3 here


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How a number changes with ten times the parameters."""

    per_tenfold: float
    low: float
    high: float
    r_squared: float
    sizes: int
    power: bool
    """Whether it is an exponent: the number is multiplied by 10 to this power."""


def fit(parameters: Sequence[float], means: Sequence[float], power: bool = False) -> Fit | str:
    """`y = a + b log10(parameters)` through the means of the sizes; a sentence if there is no fit.

    b with Student's 95% interval, sizes - 2 degrees of freedom: a size is one point, however many
    seeds it has, because seeds of one size say nothing about the form over sizes. With `power`,
    log10 of y is fitted, so b is the exponent of a power law.
    Source: ordinary least squares by statsmodels; Kaplan et al. 2020 for the power law of a loss.
    """
    import statsmodels.api

    x, y = np.log10(np.array(parameters, dtype=float)), np.array(means, dtype=float)
    if len(set(x)) < LEAST_SIZES:
        points = {1: "one size", 2: "two sizes", 3: "three sizes"}.get(len(set(x)), "no size")
        return f"no fit: {points} cannot carry a line with an interval; it takes {LEAST_SIZES}"
    if not np.isfinite(y).all() or (power and (y <= 0).any()):
        return "no fit: a size has no such number"
    fitted = statsmodels.api.OLS(np.log10(y) if power else y, statsmodels.api.add_constant(x)).fit()
    low, high = fitted.conf_int()[1]
    return Fit(
        per_tenfold=float(fitted.params[1]),
        low=float(low),
        high=float(high),
        r_squared=float(fitted.rsquared),
        sizes=len(x),
        power=power,
    )


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """A mean over seeds with its 95% interval, and the two kinds of doubt behind it."""

    estimate: float
    low: float
    high: float
    seeds: int
    seed_error: float | None
    """Standard error from the spread of seeds; None for one seed, which has none."""
    post_error: float
    """Standard error over posts or pairs: the mean of the seeds' own."""


def pool(
    values: Sequence[float],
    intervals: Sequence[tuple[float, float]],
    limits: tuple[float, float] = (-inf, inf),
) -> Pooled | None:
    """The mean over seeds; `intervals` are the seeds' own 95% intervals over posts. None for none.

    `error^2 = s^2 / k + p^2`: s the standard deviation of the k seeds, p the mean of their standard
    errors over posts. All seeds are judged on the same posts, so averaging seeds does not average
    the posts away, and p is not divided by k. s holds a part of p, so the sum is rather too wide.
    The interval is Student's with `error^4 / ((s^2 / k)^2 / (k - 1))` degrees of freedom, because
    posts are many; it is never narrower than that of the seeds alone, which has k - 1. With one
    seed it is the posts' alone. It is cut at `limits`.
    Source: Satterthwaite 1946 for the degrees of freedom; variances of two crossed factors are
    added as in Owen 2007 (the pigeonhole bootstrap), which is conservative too.
    """
    from scipy.stats import t

    count = len(values)
    if not count:
        return None
    mean = float(np.mean(values))
    post_error = float(np.mean([(high - low) / (2 * Z) for low, high in intervals]))
    if count == 1:
        ((low, high),) = intervals
        return Pooled(
            estimate=mean, low=low, high=high, seeds=1, seed_error=None, post_error=post_error
        )
    seed_error = float(np.std(values, ddof=1)) / sqrt(count)
    error = sqrt(seed_error**2 + post_error**2)
    freedom = error**4 * (count - 1) / seed_error**4 if seed_error > 0 else inf
    of_seeds = float(t.ppf(TAILS[1], count - 1)) * seed_error
    half = max(float(t.ppf(TAILS[1], freedom)) * error, of_seeds)
    return Pooled(
        estimate=mean,
        low=max(limits[0], mean - half),
        high=min(limits[1], mean + half),
        seeds=count,
        seed_error=seed_error,
        post_error=post_error,
    )


RATES = ("/win_rate", "/low", "/high", "/controlled", "/rm_agrees")


def frame_of(records: Sequence[Record]) -> pd.DataFrame:
    """One row of numbers a run, with what only this page compares; a missing rate is nan.

    Raises UserError for a run without PPO.
    """
    without = [record.name for record in records if record.policy != "ppo"]
    if without:
        raise UserError(f"{without[0]} has no PPO: only its own page shows it")
    rows = [row(record) for record in records]
    frame = pd.DataFrame([{**numbers, **_as_numbers(numbers)} for numbers in rows])
    extra = pd.DataFrame([_more(record) for record in records], index=frame.index)
    return frame.join(extra.astype(float))


def _as_numbers(values: Row) -> dict[str, float]:
    lacking = (key for key, value in values.items() if value is None)
    return {key: nan for key in lacking if key.endswith(RATES) or "difference" in key}


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame by the names of its columns."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _more(record: Record) -> Row:
    written = record.results("summaries")["policies"]
    judged = record.results("win_rate")
    gains = judged.get("scores", {}).get("gains", {}).get("ppo", {})
    numbers: Row = {"sft_loss": record.results("sft")["loss/validation"]}
    for policy in policies_of(record):
        numbers[f"{policy}/copied"] = written[policy]["copied_title_words"]
        at_length = judged["policies"][policy]["statistics"]["length_controlled"]
        for end in ("low", "high"):
            numbers[f"{policy}/controlled_{end}"] = at_length[end]
        numbers[f"{policy}/extrapolated"] = at_length["extrapolated"]
    for scorer in ("proxy", "gold"):
        for key in ("estimate", "low", "high"):
            numbers[f"{scorer}_gain/{key}"] = (gains.get(scorer) or {}).get(key)
    return numbers


def sizes(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs and their seeds, from the smallest model to the largest."""
    groups = [(str(name), seeds) for name, seeds in frame.groupby("name", sort=False)]
    return sorted(groups, key=lambda group: float(group[1]["parameters"].iloc[0]))


def policies(frame: pd.DataFrame) -> list[str]:
    """The policies that any seed has, in the order in which they are shown."""
    there = {policy for policies_of_seed in frame["policies"] for policy in policies_of_seed}
    ours = [policy for policy in POLICY_STAGES if policy in there]
    return ours + sorted(there - set(ours))


def given(seeds: pd.DataFrame, key: str) -> list[float]:
    """The numbers of the seeds that have one, in the order of the seeds."""
    if key not in seeds:
        return []
    return [
        float(value)
        for value in seeds.sort_values("seed")[key]
        if value is not None and value == value
    ]
