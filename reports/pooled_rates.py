"""Win rates pooled over the seeds of a size, and how they compare with 50%.

Every seed is judged on the same posts, so seeds and posts are two separate sources of uncertainty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, sqrt
from statistics import fmean, stdev

from eval.scores import START
from eval.stats.intervals import TAILS, Z
from reports.results import Interval, RunResult

EVEN = 0.5


class Outcome(Enum):
    """How a policy's pooled win rate compares with 50%, where it equals the references."""

    BEATS = "beats the references"
    LOSES = "does not reach the references"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """A mean over seeds with its 95% interval over seeds and posts."""

    interval: Interval
    seeds: int


def pool(seeds: Sequence[Interval], low: float = 0.0, high: float = 1.0) -> Pooled | None:
    """Return the mean over seeds with a 95% interval over seeds and posts; None without a seed.

    `seeds` are the seeds' own estimates with their 95% intervals over posts; the result is cut at
    `low` and `high`.

        error^2 = s^2 / k + p^2

    with s the standard deviation of the k seeds and p the mean of their standard errors over posts.
    All seeds are judged on the same posts, so averaging over seeds does not average the posts away,
    and p is not divided by k. As s contains a part of p, the sum is rather too wide. The interval
    is Student's, with error^4 / ((s^2 / k)^2 / (k - 1)) degrees of freedom, because the posts are
    many. It is never narrower than that of the seeds alone, which has k - 1 degrees of freedom. A
    single seed has the interval of its posts.

    Source: Satterthwaite 1946 for the degrees of freedom; adding the variances of two crossed
    factors is the conservative choice of Owen 2007 (the pigeonhole bootstrap).
    """
    from scipy.stats import t

    count = len(seeds)
    if not count:
        return None
    if count == 1:
        return Pooled(interval=seeds[0], seeds=1)
    estimates = [seed.estimate for seed in seeds]
    mean = fmean(estimates)
    post_error = fmean((seed.high - seed.low) / (2 * Z) for seed in seeds)
    seed_error = stdev(estimates) / sqrt(count)
    error = sqrt(seed_error**2 + post_error**2)
    freedom = error**4 * (count - 1) / seed_error**4 if seed_error > 0 else inf
    half_of_seeds = float(t.ppf(TAILS[1], count - 1)) * seed_error
    half = max(float(t.ppf(TAILS[1], freedom)) * error, half_of_seeds)
    interval = Interval(estimate=mean, low=max(low, mean - half), high=min(high, mean + half))
    return Pooled(interval=interval, seeds=count)


def outcome_of(rate: Pooled | None) -> Outcome:
    """Return what a win rate says: its whole interval has to be on one side of 50%."""
    if rate is None:
        return Outcome.INCONCLUSIVE
    if rate.interval.is_above(EVEN):
        return Outcome.BEATS
    return Outcome.LOSES if rate.interval.is_below(EVEN) else Outcome.INCONCLUSIVE


def gain_of(run: RunResult) -> Interval | None:
    """Return the trained policy's win rate minus SFT's; None if either has no rate."""
    difference = run.difference(run.trained, START)
    return difference.interval if difference else None


def win_rate_of(run: RunResult, policy: str) -> Interval | None:
    """Return a policy's win rate; None if the run has no such policy, or if it has no rate."""
    return run.policies[policy].win_rate if policy in run.policies else None
