"""The win rate at equal length, reported next to the raw one and never instead of it.

Judges prefer longer text, and the text that is shown first. A logistic model of "the policy is
preferred", with a length curve for each order, estimates the rate at a length ratio of 1; the rates
of both orders are then averaged. If length has no effect, this agrees with the order-balanced rate.
The model also removes what a summary gains by saying more, which is why pages show both rates.
Length is counted in words.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np

from eval.stats.intervals import Floats, Z, clustered_share, mean_over_posts
from eval.stats.logistic import clustered_logit
from eval.stats.verdict_table import VerdictTable, both_orders

BINS = 5
FEWEST_JUDGEMENTS = 30
# Lengths are nearly equal if neither is longer by more than a quarter.
NEARLY_EQUAL = float(np.log(1.25))
# With fewer posts of nearly equal length, the answer comes from the model rather than the data.
FEWEST_NEARLY_EQUAL = 20
# The log ratios at which the two length terms bend: ratios of about 2.2 and 1.2.
WIDE_SCALE = 0.8
NARROW_SCALE = 0.2
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class ControlledRate:
    """A rate at equal length with its 95% interval, and how it was estimated."""

    estimate: float
    low: float
    high: float
    order_logits: list[float] | None = None
    """Effect of being shown first, with its bounds; None if the model has no order."""
    doubled_length_logits: list[float] | None = None
    """Effect of doubling the length, with its bounds; None if the model has no order."""
    equal_posts: int | None = None
    """If there is no finite fit: the number of posts with equally long texts behind the rate."""


def word_count(text: str) -> int:
    """Words of a summary, at least 1, because 0 has no logarithm."""
    return max(1, len(text.split()))


def mean_words(texts: Iterable[str]) -> float:
    """Mean `word_count` of texts."""
    counts = [word_count(text) for text in texts]
    return sum(counts) / len(counts)


def length_terms(log_ratios: Floats) -> tuple[Floats, Floats]:
    """The bounded length terms `wide` and `narrow`: 0 at equal length, at most 1 in size.

    With both, a difference in length may count immediately or gradually, and has a limit.
    """
    return np.tanh(log_ratios / WIDE_SCALE), np.tanh(log_ratios / NARROW_SCALE)


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return float(1 / (1 + np.exp(-x)))


def length_controlled(table: VerdictTable) -> dict[str, Any]:
    """The win rate at equal length, with its 95% interval over posts, as data for a manifest.

    Identical texts tie by protocol at any length, so the model is fitted without them. If a share s
    of the texts is identical and `rate` is that of the other ones, the estimate is
    `s / 2 + (1 - s) * rate`.

    The rate comes from the first of three methods that has an answer: the model with a length curve
    for each order (`_fit_with_order`); the model of each post's mean over its orders
    (`_fit_of_means`), for judges that nearly always choose by order; and the posts whose texts have
    the same number of words (`_rate_of_equal_length`), for judges that always choose by length.

    `estimate` is None, with the reason under `why`, if none of them has an answer. `near_equal`
    counts the posts of nearly equal length. `extrapolated` says that the data do not answer: too
    few posts are of nearly equal length, a ratio of 1 lies outside the middle 90% of the ratios,
    or no method has an answer although there are enough verdicts.
    Source: standardization (Rothman, Greenland and Lash, Modern Epidemiology, chapter 15); Dubois
    et al. 2024, arXiv 2404.04475, for tanh of length; Papke and Wooldridge 1996 for ties as 1/2.
    """
    judged = table.judged()
    rows = judged.only(judged.differ)
    problem = _why_not(rows)
    if problem:
        return _no_rate(problem, extrapolated=False)

    rate = _fit_with_order(rows)
    if rate is None:
        rate = _fit_of_means(rows)
    if rate is None:
        rate = _rate_of_equal_length(rows)
    if rate is None:
        problem = "length or order decides nearly every verdict, so the model has no answer"
        return _no_rate(problem, extrapolated=True)

    is_near = np.abs(rows.log_ratios) <= NEARLY_EQUAL
    near_equal = len(np.unique(rows.posts[is_near]))
    lowest, highest = np.quantile(rows.log_ratios, [0.05, 0.95])
    has_data_at_equal_length = near_equal >= FEWEST_NEARLY_EQUAL and bool(lowest <= 0 <= highest)
    is_from_model = rate.equal_posts is None

    result = {
        **_with_identical_texts(rate, rows, judged),
        "order_logits": rate.order_logits,
        "doubled_length_logits": rate.doubled_length_logits,
        "near_equal": near_equal,
        "extrapolated": is_from_model and not has_data_at_equal_length,
    }
    if rate.equal_posts is not None:
        result["equal_posts"] = rate.equal_posts
    return result


def _no_rate(why: str, extrapolated: bool) -> dict[str, Any]:
    return {"estimate": None, "low": None, "high": None, "why": why, "extrapolated": extrapolated}


def _why_not(rows: VerdictTable) -> str:
    """Why the model cannot be fitted; empty if it can."""
    fewest_posts = FEWEST_JUDGEMENTS // 2
    if len(rows.outcomes) < FEWEST_JUDGEMENTS or len(np.unique(rows.posts)) < fewest_posts:
        return (
            f"fewer than {FEWEST_JUDGEMENTS} judgements of texts that differ,"
            f" or fewer than {fewest_posts} posts"
        )
    if len(np.unique(rows.shown_first)) < 2:
        return "every summary was shown in the same position"
    if np.linalg.matrix_rank(_length_curve(rows)) < 3:
        return "too few different length ratios for a curve"
    if np.ptp(rows.outcomes) < ROUNDING:
        return "all verdicts are the same"
    return ""


def _with_identical_texts(
    rate: ControlledRate, rows: VerdictTable, judged: VerdictTable
) -> dict[str, float]:
    """The rate of all posts, from the rate of `rows`, whose texts differ; identical texts tie.

    The share of identical texts varies with the posts that are drawn. Its error is independent of
    the rate's error, so the distances from the estimate are added as squares.
    """
    posts = len(np.unique(judged.posts))
    identical = 1 - len(np.unique(rows.ids)) / len(np.unique(judged.ids))
    estimate = identical / 2 + (1 - identical) * rate.estimate

    share_error = float(np.sqrt(identical * (1 - identical) / posts))
    from_share = abs(rate.estimate - 0.5) * Z * share_error
    below = (1 - identical) * abs(rate.estimate - rate.low)
    above = (1 - identical) * abs(rate.estimate - rate.high)
    return {
        "estimate": estimate,
        "low": max(0.0, estimate - hypot(below, from_share)),
        "high": min(1.0, estimate + hypot(above, from_share)),
    }


def _length_curve(rows: VerdictTable) -> Floats:
    """Design [n, 3] of a curve over length, without order."""
    wide, narrow = length_terms(rows.log_ratios)
    return np.column_stack([np.ones(len(wide)), wide, narrow])


def _fit_with_order(rows: VerdictTable) -> ControlledRate | None:
    """The rate of the model with a length curve for each order; None without a finite fit.

    `logit P(policy) = b0 + b1 * order + (c1 + c2 * order) * wide + c3 * narrow`, where order is
    +1/2 if the policy is shown first and -1/2 if second. At equal length the rate is the mean of
    `sigmoid(b0 + b1/2)` and `sigmoid(b0 - b1/2)`: a marginal rate, as the raw one is.
    """
    order = np.where(rows.shown_first, 0.5, -0.5)
    wide, narrow = length_terms(rows.log_ratios)
    design = np.column_stack([np.ones(len(order)), order, wide, narrow, order * wide])
    fit = clustered_logit(rows.outcomes, design, rows.posts)
    if fit is None:
        return None

    b0, b1 = fit.coefficients[:2]
    first = sigmoid(b0 + b1 / 2)
    second = sigmoid(b0 - b1 / 2)
    first_slope = first * (1 - first) / 2
    second_slope = second * (1 - second) / 2
    rate_gradient = np.array(
        [first_slope + second_slope, (first_slope - second_slope) / 2, 0, 0, 0]
    )

    order_gradient = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    doubled_wide, doubled_narrow = length_terms(np.log([2.0]))
    doubled_gradient = np.array([0.0, 0.0, doubled_wide[0], doubled_narrow[0], 0.0])
    doubled_length = float(doubled_gradient @ fit.coefficients)

    rate = (first + second) / 2
    low, high = _bounds_on_logit_scale(rate, fit.error(rate_gradient))
    return ControlledRate(
        estimate=rate,
        low=low,
        high=high,
        order_logits=_with_bounds(b1, fit.error(order_gradient)),
        doubled_length_logits=_with_bounds(doubled_length, fit.error(doubled_gradient)),
    )


def _fit_of_means(rows: VerdictTable) -> ControlledRate | None:
    """The rate of the model without order, on the ids that were judged in both orders.

    The model's equations contain only the mean of an id's two orders. None if most rows lack the
    other order, if all means are alike (the interval would have no width), or without a finite fit.
    """
    both = both_orders(rows)
    if len(both.rows.outcomes) <= len(rows.outcomes) / 2:
        return None
    if np.ptp(both.outcomes.sum(axis=1)) < ROUNDING:
        return None
    fit = clustered_logit(both.rows.outcomes, _length_curve(both.rows), both.rows.posts)
    if fit is None:
        return None

    rate = sigmoid(fit.coefficients[0])
    rate_error = rate * (1 - rate) * fit.error(np.array([1.0, 0.0, 0.0]))
    low, high = _bounds_on_logit_scale(rate, rate_error)
    return ControlledRate(estimate=rate, low=low, high=high)


def _rate_of_equal_length(rows: VerdictTable) -> ControlledRate | None:
    """The rate of the ids whose texts have the same number of words, each the mean of its orders.

    None if they are few, or all alike, so that the interval would have no width.
    """
    equal = both_orders(rows.only(np.abs(rows.log_ratios) < ROUNDING))
    means = equal.outcomes.mean(axis=1)
    if len(np.unique(equal.posts)) < FEWEST_NEARLY_EQUAL or np.ptp(means) < ROUNDING:
        return None
    rate = mean_over_posts(means, limits=(0.0, 1.0), posts=equal.posts)
    return ControlledRate(
        estimate=rate.estimate, low=rate.low, high=rate.high, equal_posts=rate.posts
    )


def _bounds_on_logit_scale(rate: float, error: float) -> tuple[float, float]:
    """95% bounds of a rate with this standard error, symmetric on the logit scale."""
    logit = float(np.log(rate / (1 - rate)))
    half_width = Z * error / (rate * (1 - rate))
    return sigmoid(logit - half_width), sigmoid(logit + half_width)


def _with_bounds(coefficient: float, error: float) -> list[float]:
    """A coefficient and its 95% bounds."""
    return [float(coefficient), float(coefficient - Z * error), float(coefficient + Z * error)]


def rates_by_length(table: VerdictTable) -> list[dict[str, Any]]:
    """The raw rate in bins of the length ratio with about the same number of judgements.

    The bins are ordered from the shortest summaries to the longest. A row has the bin's lowest and
    highest ratio (policy to other), its number of judgements, and its rate with an interval.
    """
    rows = table.judged()
    if len(rows.outcomes) == 0:
        return []
    inner_edges = np.unique(np.quantile(rows.log_ratios, np.arange(1, BINS) / BINS))
    bin_numbers = np.searchsorted(inner_edges, rows.log_ratios, side="left")
    bins = []
    for number in np.unique(bin_numbers):
        part = rows.only(bin_numbers == number)
        rate = clustered_share(part.outcomes, part.posts)
        assert rate is not None  # a bin number that occurs has rows
        ratios = np.exp(part.log_ratios)
        bins.append(
            {
                "from": float(ratios.min()),
                "to": float(ratios.max()),
                "judgements": len(part.outcomes),
                "rate": rate.estimate,
                "low": rate.low,
                "high": rate.high,
            }
        )
    return bins
