"""A mean over seeds whose interval holds the doubt of seeds and of posts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from eval.rates.formulas import TAILS
from stages.learning.intervals import Z


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
