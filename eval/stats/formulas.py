"""Formulas for verdicts: means over posts and seeds, paired tests, a logistic model.

No torch. Posts are what was sampled, so posts are resampled: both orders of a post, all policies on
it, and its text under other ids stay together (Miller 2411.00640). Outcomes are 1, 1/2 (a tie
counts half) and 0.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.config.checks import UserError

Floats = NDArray[np.float64]
Posts = NDArray[np.int64] | None
Totals = Callable[[Floats], Floats]
CONFIDENCE = 0.95
POWER = 0.8
ONE_SIDED = 0.05  # of each of the two tests of equivalence
TAILS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
# If fewer posts than this differ from the most common score, the bootstrap interval is too narrow.
FEW_POSTS = 10
# Of fewer posts than this, a bootstrap is too narrow.
SMALL_SAMPLE = 50
RESAMPLES = 10_000
ONE_NUMBER = 1e-12  # numbers that are closer than this are one number, rounded
FINEST = 404  # differences of scores are multiples of a part no finer than 1 / 400: 100 seeds
Z = NormalDist().inv_cdf(TAILS[1])
MOST_LOGITS = 15.0  # beyond it a coefficient only says that the data are separated


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95% interval, and the number of posts behind it."""

    estimate: float
    low: float
    high: float
    posts: int


def as_plain(interval: Interval | None) -> dict[str, Any] | None:
    """An interval as plain data; None stays None."""
    return None if interval is None else asdict(interval)


def post_numbers(posts: Sequence[str]) -> NDArray[np.int64]:
    """Each post's id as a number, in the order of their first appearance."""
    numbers = {post: number for number, post in enumerate(dict.fromkeys(posts))}
    return np.array([numbers[post] for post in posts], dtype=np.int64)


def totals_of(values: Floats, posts: Posts) -> tuple[Floats, Floats]:
    """The sum and the number of each post's values, both [posts].

    `posts`: which post each value is about, as a number; None: each is about one of its own.
    """
    codes = np.arange(len(values)) if posts is None else np.unique(posts, return_inverse=True)[1]
    return np.bincount(codes, values).astype(float), np.bincount(codes).astype(float)


def mean_of_posts(values: Floats, limits: tuple[float, float], posts: Posts = None) -> Interval:
    """The mean of values within `limits` with a bootstrap over the posts that they are about.

    Of fewer than `SMALL_SAMPLE` posts, or where fewer than `FEW_POSTS` have another mean than most,
    a bootstrap is too narrow: `clustered_share`'s interval takes its place. Raises UserError
    without a post.
    """
    if not len(values):
        raise UserError(
            "no post is judged, so there is no rate: see the replies in judgements.jsonl"
        )
    sums, sizes = totals_of(values, posts)
    few = len(sums) - np.unique_counts(sums / sizes).counts.max() < FEW_POSTS
    if few or len(sums) < SMALL_SAMPLE:
        low, high = _share_bounds(sums, sizes, limits)
    else:
        rows = np.column_stack([sums, sizes])
        low, high = bootstrap(rows, lambda totals: totals[:, 0] / totals[:, 1])
    mean = float(sums.sum() / sizes.sum())
    # Rounding may put a bound beyond a limit, or the mean beyond a bound.
    low = max(limits[0], min(low, mean))
    high = min(limits[1], max(high, mean))
    return Interval(estimate=mean, low=low, high=high, posts=len(sums))


def _share_bounds(sums: Floats, sizes: Floats, limits: tuple[float, float]) -> tuple[float, float]:
    """95% bounds of `sum(sums) / sum(sizes)`, one row a post; each mean lies within `limits`.

    Where every post lies at a limit, Wilson's, of as many posts as the linearised variance allows.
    Else ties leave less variance than a share of wins can have: one post at each limit is added,
    and the bounds are `mean -+ z * error`. Of one value in {-1, 0, 1} a post these are the bounds
    of a difference of paired proportions of Bonett and Price 2012, with n + 1 for their n + 2.
    Source: Korn and Graubard 1998 for the effective number of posts.
    """
    least, most = limits
    mean = float(sums.sum() / sizes.sum())
    posts = float(len(sums))
    if np.isin(sums / sizes, limits).all():
        share = (mean - least) / (most - least)
        if (sizes != 1).any() and 0 < share < 1:
            error = _error_of_ratio(sums, sizes) / (most - least)
            posts = share * (1 - share) / error**2
        low, high = wilson(share * posts, posts)
        return least + low * (most - least), least + high * (most - least)
    size = float(sizes.mean())
    sums = np.append(sums, [size * least, size * most])
    sizes = np.append(sizes, [size, size])
    middle = float(sums.sum() / sizes.sum())
    half = Z * _error_of_ratio(sums, sizes)
    return max(least, min(middle - half, mean)), min(most, max(middle + half, mean))


def _error_of_ratio(sums: Floats, sizes: Floats) -> float:
    """Standard error of `sum(sums) / sum(sizes)` over posts (linearised)."""
    residuals = sums - sizes * sums.sum() / sizes.sum()
    posts = len(sums)
    return float(np.sqrt(posts / (posts - 1) * (residuals**2).sum()) / sizes.sum())


def mean_with_error(values: Floats, posts: Posts = None) -> Interval:
    """The mean of unbounded values with its t interval over the posts that they are about.

    Of several values a post the error is that of a ratio of means. No width for one post.
    """
    from scipy.stats import t

    sums, sizes = totals_of(values, posts)
    mean = float(values.mean())
    count = len(sums)
    low, high = mean, mean
    if count == len(values):
        low, high = mean_of_seeds(values.tolist()) or (mean, mean)
    elif count > 1:
        half = float(t.ppf(TAILS[1], count - 1)) * _error_of_ratio(sums, sizes)
        low, high = mean - half, mean + half
    return Interval(estimate=mean, low=low, high=high, posts=count)


def bootstrap(rows: Floats, statistic: Totals) -> tuple[float, float]:
    """Percentile bootstrap of a statistic of column sums; `rows` [posts, K] are drawn anew.

    `statistic` takes the sums [RESAMPLES, K] and gives [RESAMPLES]. Drawing n posts with
    replacement is a multinomial draw of how many fall on each distinct row.
    """
    low, high = np.nanquantile(statistic(resampled_totals(rows)), TAILS)
    return float(low), float(high)


def resampled_totals(rows: Floats, seed: int = 0) -> Floats:
    """Column sums [RESAMPLES, K] of posts drawn with replacement from `rows` [posts, K]."""
    levels, counts = np.unique(rows, axis=0, return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(rows), counts / len(rows), size=RESAMPLES)
    return draws @ levels


def clustered_share(values: Floats, posts: NDArray[np.int64]) -> Interval | None:
    """The mean of judgements in [0, 1] with its 95% interval over posts; None where there is none.

    It is Wilson's where every post says one thing, all won or all lost; where posts tie, or their
    judgements differ, it is as narrow as the spread of the posts allows.
    """
    if not len(values):
        return None
    sums, sizes = totals_of(values, posts)
    low, high = _share_bounds(sums, sizes, (0.0, 1.0))
    return Interval(estimate=float(values.mean()), low=low, high=high, posts=len(sums))


def sign_flip_p_value(differences: Floats) -> float:
    """Two-sided p-value of "the mean difference is 0", when each post's may have either sign.

    All signs are counted: differences of scores are multiples of 1/4 (of 1/12 over three seeds),
    posts of one size have a binomial sum, and the sizes are convolved. So it is exact to about
    1e-16, and never too coarse for a correction for many tests. Raises ValueError for values on no
    such grid.
    Source: Fisher's paired randomisation test.
    """
    from scipy.signal import fftconvolve
    from scipy.stats import binom

    sizes = np.abs(differences)
    grid = (n for n in range(4, FINEST, 4) if np.allclose(n * sizes, np.rint(n * sizes), 0, 1e-6))
    parts = next(grid, None)
    if parts is None:
        raise ValueError("the differences are no multiples of a common part")
    steps = np.rint(parts * sizes).astype(int)
    chances = np.ones(1)  # of each sum of posts, in steps of 2, from the least
    for size, count in zip(*np.unique_counts(steps[steps > 0]), strict=True):
        of_size = np.zeros(size * count + 1)
        of_size[::size] = binom.pmf(np.arange(count + 1), count, 0.5)
        chances = fftconvolve(chances, of_size)
    sums = 2 * np.arange(len(chances)) - steps.sum()
    seen = abs(round(parts * float(differences.sum())))
    # Both extremes are possible, so it is never 0; rounding can bring the sum below that.
    least = 2.0 ** (1 - np.count_nonzero(steps))
    return float(min(1.0, max(least, chances[np.abs(sums) >= seen].sum())))


def mean_of_seeds(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """95% t interval of a mean over seeds, or posts; None for one, and where all are one number:
    they show no spread, but others might.
    """
    from scipy.stats import t

    if len(values) < 2 or np.ptp(values) < ONE_NUMBER:
        return None
    spread = float(np.std(values, ddof=1)) / sqrt(len(values))
    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * spread
    mean = float(np.mean(values))
    return mean - half, mean + half


def p_of_seeds(values: Sequence[float]) -> float:
    """Two-sided p-value of a mean over seeds being 0, of the t interval of `mean_of_seeds`.

    1 where there is no such interval.
    """
    from scipy.stats import ttest_1samp

    if mean_of_seeds(values) is None:
        return 1.0
    return float(ttest_1samp(values, 0.0).pvalue)


def within_margin(values: Sequence[float], margin: float) -> bool:
    """Whether the mean over seeds is shown to lie within -margin and +margin.

    Two one-sided t tests at 5% each: the 90% t interval lies inside. Without one nothing is shown.
    Source: Schuirmann 1987.
    """
    bounds = mean_of_seeds(values, 1 - 2 * ONE_SIDED)
    return bounds is not None and -margin < bounds[0] and bounds[1] < margin


def seeds_needed(values: Sequence[float], half_width: float) -> int:
    """The fewest seeds, at least 2, whose 95% t interval would reach no further than `half_width`.

    The smallest n with `t(n - 1) s / sqrt(n) <= half_width`, s the standard deviation of `values`.
    """
    from scipy.stats import t

    spread = float(np.std(values, ddof=1))
    seeds = max(2, floor((Z * spread / half_width) ** 2))  # t is never below its limit Z
    while float(t.ppf(TAILS[1], seeds - 1)) * spread / sqrt(seeds) > half_width:
        seeds += 1
    return seeds


def two_sided(interval: Mapping[str, Any], value: float) -> float:
    """The p-value of a true `value`, from an `estimate` and its bound on the side of the value."""
    estimate = interval["estimate"]
    side = "low" if estimate > value else "high"
    error = abs(interval[side] - estimate) / Z
    if not error:
        return float(estimate == value)
    return 2 * NormalDist().cdf(-abs(estimate - value) / error)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number: the chance of even one false difference is kept.

    Source: Holm 1979.
    """
    order = np.argsort(p_values, kind="stable")
    count = len(p_values)
    corrected = np.empty(count)
    corrected[order] = np.maximum.accumulate(
        np.minimum(1.0, np.asarray(p_values)[order] * (count - np.arange(count)))
    )
    return [float(p) for p in corrected]


def needed_to_show(rate: float, bound: float) -> int:
    """Observations with which a true rate is shown to lie beyond a bound, at 80% power.

    Two-sided at 5%: `((z * sqrt(b (1 - b)) + z80 * sqrt(r (1 - r))) / (r - b))^2`, rounded up.
    """
    spreads = sqrt(bound * (1 - bound)), sqrt(rate * (1 - rate))
    power = NormalDist().inv_cdf(POWER)
    return ceil(((Z * spreads[0] + power * spreads[1]) / (rate - bound)) ** 2)


def fisher_exact(failed: tuple[int, int], tried: tuple[int, int]) -> float:
    """Two-sided p-value of two groups having one rate of failure, given their numbers together.

    By scipy: all tables with these margins that are no likelier than the one seen.
    Source: Fisher's exact test (Fisher 1934).
    """
    from scipy.stats import fisher_exact as exact_test

    table = [[bad, count - bad] for bad, count in zip(failed, tried, strict=True)]
    return float(exact_test(table).pvalue)


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval for a proportion, in [0, 1], by statsmodels.

    n may be an effective number of observations, so neither need be whole.
    Source: Wilson 1927, equation for the score interval.
    """
    # Imported late: it takes seconds, and modules that only look or plan name this one.
    from statsmodels.stats.proportion import proportion_confint

    p = successes / n
    low, high = proportion_confint(successes, n, method="wilson")
    return max(0.0, min(float(low), p)), min(1.0, max(float(high), p))  # rounding at 0 and n


def clustered_logit(
    outcomes: Floats, design: Floats, groups: NDArray[np.int64]
) -> tuple[Floats, Floats] | None:
    """Coefficients [K] and their clustered covariance [K, K]; None without one finite fit.

    `logit P(outcome) = design @ coefficients`. Shapes: outcomes [n] in [0, 1] (fractional: a tie
    enters as 1/2), design [n, K], groups [n] (rows of one group are one cluster).
    Source: Papke and Wooldridge 1996.
    """
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM
    from statsmodels.tools.sm_exceptions import PerfectSeparationWarning

    if np.linalg.matrix_rank(design) < design.shape[1]:  # any of many fits would do as well
        return None
    if len(np.unique(groups)) < 2:  # one cluster shows no spread
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerfectSeparationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow on the way to no fit
        try:
            fit = GLM(outcomes, design, family=Binomial()).fit(
                cov_type="cluster", cov_kwds={"groups": groups}
            )
        except (PerfectSeparationWarning, np.linalg.LinAlgError):
            return None
    coefficients = np.asarray(fit.params)
    covariance = np.asarray(fit.cov_params())
    finite = np.isfinite(coefficients).all() and np.isfinite(covariance).all()
    if not (fit.converged and finite) or np.abs(coefficients).max() > MOST_LOGITS:
        return None
    return coefficients, covariance
