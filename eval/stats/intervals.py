"""Means and shares with 95% intervals, over posts and over seeds.

Posts are the sample, so intervals are over posts: both orders of a post, all judgements of it, and
its text under other ids are one cluster (Miller 2024, arXiv 2411.00640). A win scores 1, a tie 1/2
and a loss 0.

Importing scipy.stats or statsmodels takes a second, so the functions import them when they run.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import floor, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.config.errors import UserError

Floats = NDArray[np.float64]
Posts = NDArray[np.int64]
"""The post of each value, as a number."""

CONFIDENCE = 0.95
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
Z = NormalDist().inv_cdf(TAILS[1])
RESAMPLES = 10_000
# With fewer posts than this, a bootstrap interval is too narrow.
SMALL_SAMPLE = 50
# If fewer posts than this differ from the most common value, a bootstrap interval is too narrow.
FEW_POSTS = 10
# Values that differ by less than this are equal up to rounding.
ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95% interval, and the number of posts behind it."""

    estimate: float
    low: float
    high: float
    posts: int


def as_plain(interval: Interval | None) -> dict[str, Any] | None:
    """An interval as a dictionary for a manifest; None stays None."""
    if interval is None:
        return None
    return asdict(interval)


# -- posts -----------------------------------------------------------------------------------------


def post_numbers(ids: Sequence[str]) -> Posts:
    """A number for each id, in the order in which ids first appear; equal ids share a number."""
    numbers = {post_id: number for number, post_id in enumerate(dict.fromkeys(ids))}
    return np.array([numbers[post_id] for post_id in ids], dtype=np.int64)


def sums_by_post(values: Floats, posts: Posts | None) -> tuple[Floats, Floats]:
    """The sum and the number of the values of each post, both [posts].

    Without `posts`, each value is about another post.
    """
    if posts is None:
        codes = np.arange(len(values))
    else:
        _, codes = np.unique(posts, return_inverse=True)
    sums = np.bincount(codes, values).astype(float)
    sizes = np.bincount(codes).astype(float)
    return sums, sizes


def mean_over_posts(
    values: Floats, limits: tuple[float, float], posts: Posts | None = None
) -> Interval:
    """The mean of values that lie within `limits`, with a bootstrap interval over posts.

    Where a bootstrap would be too narrow (see `SMALL_SAMPLE` and `FEW_POSTS`), the interval is that
    of `clustered_share`. Raises UserError if there are no values.
    """
    if len(values) == 0:
        raise UserError(
            "no post has a verdict, so there is no rate: see the replies in judgements.jsonl"
        )
    sums, sizes = sums_by_post(values, posts)
    mean = float(sums.sum() / sizes.sum())

    posts_with_most_common_mean = np.unique_counts(sums / sizes).counts.max()
    posts_with_another_mean = len(sums) - posts_with_most_common_mean
    if len(sums) < SMALL_SAMPLE or posts_with_another_mean < FEW_POSTS:
        low, high = _share_bounds(sums, sizes, limits)
    else:
        rows = np.column_stack([sums, sizes])
        low, high = bootstrap(rows, lambda totals: totals[:, 0] / totals[:, 1])

    # Rounding can put a bound beyond a limit, or the mean beyond a bound.
    least, most = limits
    return Interval(
        estimate=mean,
        low=max(least, min(low, mean)),
        high=min(most, max(high, mean)),
        posts=len(sums),
    )


def clustered_share(values: Floats, posts: Posts) -> Interval | None:
    """The mean of values in [0, 1] with its 95% interval over posts; None without values.

    The interval is Wilson's if the values of each post are all 1 or all 0. With ties, or values
    that differ within a post, it is as narrow as the spread between posts allows.
    """
    if len(values) == 0:
        return None
    sums, sizes = sums_by_post(values, posts)
    low, high = _share_bounds(sums, sizes, limits=(0.0, 1.0))
    return Interval(estimate=float(values.mean()), low=low, high=high, posts=len(sums))


def _share_bounds(sums: Floats, sizes: Floats, limits: tuple[float, float]) -> tuple[float, float]:
    """95% bounds of `sum(sums) / sum(sizes)`, where each post's mean lies within `limits`."""
    if np.isin(sums / sizes, limits).all():
        return _bounds_without_ties(sums, sizes, limits)
    return _bounds_with_ties(sums, sizes, limits)


def _bounds_without_ties(
    sums: Floats, sizes: Floats, limits: tuple[float, float]
) -> tuple[float, float]:
    """Wilson's bounds for posts whose means all lie at a limit.

    If posts have different numbers of values, they count as the effective number of posts that
    the linearized variance implies.
    Source: Korn and Graubard 1998 for the effective number.
    """
    least, most = limits
    span = most - least
    mean = float(sums.sum() / sizes.sum())
    share = (mean - least) / span
    posts = float(len(sums))
    if (sizes != 1).any() and 0 < share < 1:
        error = _error_of_ratio(sums, sizes) / span
        posts = share * (1 - share) / error**2
    low, high = wilson(share * posts, posts)
    return least + low * span, least + high * span


def _bounds_with_ties(
    sums: Floats, sizes: Floats, limits: tuple[float, float]
) -> tuple[float, float]:
    """`mean -+ z * error` after adding one post at each limit.

    The two added posts keep the interval from collapsing when nearly all posts tie. For one value
    in {-1, 0, 1} per post, these are the bounds of Bonett and Price 2012 for a difference of paired
    proportions, with n + 1 in place of their n + 2.
    """
    least, most = limits
    mean = float(sums.sum() / sizes.sum())
    size = float(sizes.mean())
    sums = np.append(sums, [size * least, size * most])
    sizes = np.append(sizes, [size, size])
    center = float(sums.sum() / sizes.sum())
    half_width = Z * _error_of_ratio(sums, sizes)
    low = max(least, min(center - half_width, mean))
    high = min(most, max(center + half_width, mean))
    return low, high


def _error_of_ratio(sums: Floats, sizes: Floats) -> float:
    """Standard error over posts of `sum(sums) / sum(sizes)`, by linearization."""
    residuals = sums - sizes * sums.sum() / sizes.sum()
    posts = len(sums)
    return float(np.sqrt(posts / (posts - 1) * (residuals**2).sum()) / sizes.sum())


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion.

    `n` may be an effective number of observations, so neither argument has to be whole.
    Source: Wilson 1927, equation for the score interval.
    """
    from statsmodels.stats.proportion import proportion_confint

    share = successes / n
    low, high = proportion_confint(successes, n, method="wilson")
    # Rounding can put a bound beyond the share at 0 and at n.
    return max(0.0, min(float(low), share)), min(1.0, max(float(high), share))


def mean_with_t_interval(values: Floats, posts: Posts | None = None) -> Interval:
    """The mean of unbounded values with its 95% t interval over posts.

    With several values per post, the error is that of a ratio of means. If there is one post, or
    no spread, the interval has no width.
    """
    from scipy.stats import t

    sums, sizes = sums_by_post(values, posts)
    count = len(sums)
    mean = float(values.mean())
    low, high = mean, mean
    if count == len(values):
        bounds = mean_of_seeds(values.tolist())
        if bounds is not None:
            low, high = bounds
    elif count > 1:
        half_width = float(t.ppf(TAILS[1], df=count - 1)) * _error_of_ratio(sums, sizes)
        low = mean - half_width
        high = mean + half_width
    return Interval(estimate=mean, low=low, high=high, posts=count)


# -- bootstrap -------------------------------------------------------------------------------------


def bootstrap(rows: Floats, statistic: Callable[[Floats], Floats]) -> tuple[float, float]:
    """Percentile bootstrap bounds of a statistic of column sums; posts are resampled.

    `rows` is [posts, K]; `statistic` maps column sums [RESAMPLES, K] to [RESAMPLES].
    """
    low, high = np.nanquantile(statistic(resampled_totals(rows)), TAILS)
    return float(low), float(high)


def resampled_totals(rows: Floats, seed: int = 0) -> Floats:
    """Column sums [RESAMPLES, K] of posts that are drawn with replacement from `rows` [posts, K].

    Drawing n posts with replacement is a multinomial draw of the number of times that each
    distinct row occurs, which is much faster than drawing the posts one by one.
    """
    levels, counts = np.unique(rows, axis=0, return_counts=True)
    random = np.random.default_rng(seed)
    draws = random.multinomial(len(rows), counts / len(rows), size=RESAMPLES)
    return draws @ levels


# -- seeds -----------------------------------------------------------------------------------------


def mean_of_seeds(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Bounds of the t interval of a mean over seeds.

    None for fewer than two seeds, and for equal values: they show no spread, but more seeds might.
    """
    from scipy.stats import sem, t

    if len(values) < 2 or np.ptp(values) < ROUNDING:
        return None
    low, high = t.interval(confidence, df=len(values) - 1, loc=np.mean(values), scale=sem(values))
    return float(low), float(high)


def seeds_needed(values: Sequence[float], half_width: float) -> int:
    """The smallest number of seeds, at least 2, whose 95% t interval is as narrow as `half_width`.

    That is the smallest n with `t(n - 1) s / sqrt(n) <= half_width`, where s is the standard
    deviation of `values`.
    """
    from scipy.stats import t

    deviation = float(np.std(values, ddof=1))
    # t quantiles are never below the normal quantile, so fewer seeds cannot be enough.
    seeds = max(2, floor((Z * deviation / half_width) ** 2))
    while float(t.ppf(TAILS[1], df=seeds - 1)) * deviation / sqrt(seeds) > half_width:
        seeds += 1
    return seeds
