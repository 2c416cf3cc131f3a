"""The win rate at equal length, beside the raw one: never instead of it.

Judges prefer longer text and the text shown first. A model of "the policy is preferred" in each
order says which rate would be left at a length ratio of 1; the rates of both orders are then
averaged. Where length has no effect, it agrees with the order-balanced one. It also takes off what
a summary gains by telling more, so both are shown. Length is counted in words.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import hypot
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.stats.formulas import Floats, Z, clustered_logit, clustered_share, mean_of_posts

BINS = 5
LEAST_JUDGEMENTS = 30
NEAR = float(np.log(1.25))  # lengths are nearly equal if neither is longer by more than a quarter
LEAST_NEAR = 20  # with fewer such posts, the model answers and not the data
# Log ratios at which the two terms of length bend: ratios of about 2.2 and 1.2.
SCALES = (0.8, 0.2)


@dataclass(frozen=True, kw_only=True)
class VerdictTable:
    """One row a judgement of a policy's summary against another one: columns of equal length."""

    posts: NDArray[np.int64]
    """Which post, as a number: rows of one post, under whatever ids, are one cluster."""
    outcomes: Floats
    """1 where the policy is preferred, 1/2 for a tie, 0 otherwise; nan where unjudged."""
    shown_first: NDArray[np.bool_]
    """Whether the policy's summary was the one shown first (A)."""
    log_ratios: Floats
    """Natural logarithm of the policy's length over the other's."""
    differ: NDArray[np.bool_]
    """False where the two texts are identical: a tie by protocol, which says nothing of a judge."""
    ids: NDArray[np.int64]
    """Which id of a post, as a number: its two orders belong together."""

    def judged(self) -> "VerdictTable":
        """The rows that have a verdict."""
        return self.only(~np.isnan(self.outcomes))

    def only(self, rows: NDArray[np.bool_ | np.int64]) -> "VerdictTable":
        """Some of the rows, by a mask or by their numbers."""
        return VerdictTable(**{name: column[rows] for name, column in vars(self).items()})


def word_count(text: str) -> int:
    """Words of a summary, at least 1, because 0 has no logarithm."""
    return max(1, len(text.split()))


def mean_words(texts: Iterable[str]) -> float:
    """Mean `word_count` of some summaries."""
    counts = [word_count(text) for text in texts]
    return sum(counts) / len(counts)


def length_terms(log_ratios: Floats) -> tuple[Floats, Floats]:
    """The bounded terms of length, `wide` and `narrow`: 0 at equal length, at most 1 in size.

    With both, length may count at once or slowly, and has its end.
    """
    wide, narrow = (np.tanh(log_ratios / scale) for scale in SCALES)
    return wide, narrow


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return float(1 / (1 + np.exp(-x)))


def length_controlled(table: VerdictTable) -> dict[str, Any]:
    """The rate at equal length, both orders weighed alike, with its 95% interval.

    Identical texts are a tie by protocol, at any length, so the model is fitted without them: with
    a share s of such posts, and `rate` of the others, the estimate is `s / 2 + (1 - s) * rate`.
    `logit P(policy) = b0 + b1 * order + (c1 + c2 * order) * wide + c3 * narrow`, order +1/2 where
    the policy is shown first and -1/2 where second; `wide` and `narrow` are `tanh(log ratio / s)`
    for the two `SCALES`. So the effect of length is bounded, may come at once or slowly, and may
    differ between the orders. The rate is the mean of `sigmoid(b0 + b1/2)` and
    `sigmoid(b0 - b1/2)`, a marginal rate as the raw one is. Ties enter as 1/2 (a fractional logit),
    standard errors are clustered by post, and the interval is made on the logit scale of the rate.
    Where order alone decides nearly every verdict, each post's two orders are averaged first.
    Where there is no finite fit even so (every longer text wins, say), the rate is read off the
    posts whose texts have equally many words, if they are `LEAST_NEAR` or more (`equal_posts`).
    `near_equal`: the posts within `NEAR` of equal length. Both are counted without identical texts.

    `estimate` is None, with the reason under `why`, where the model has no answer.
    `extrapolated`: the data do not answer, because fewer than `LEAST_NEAR` posts are within
    `NEAR` of equal length, or a ratio of 1 lies outside the middle 90% of the ratios seen, or there
    is no finite fit.
    `order_logits` and `doubled_length_logits`: what a first place and a doubled length are worth,
    with their bounds; None where the orders were averaged first or the rate was read off.
    Source: standardisation (Rothman, Greenland and Lash, Modern Epidemiology, chapter 15); tanh for
    length Dubois et al. 2404.04475; Papke and Wooldridge 1996 for the fractional logit.
    """
    judged = table.judged()
    rows = judged.only(judged.differ)
    nothing = {"estimate": None, "low": None, "high": None}
    why = _no_answer(rows)
    if why:
        return nothing | {"why": why, "extrapolated": False}
    fitted = _by_order(rows) or _averaged_first(rows) or _read_off(rows)
    if fitted is None:
        why = "length or order alone decides nearly every verdict, so the model has no answer"
        return nothing | {"why": why, "extrapolated": True}
    near = len(np.unique(rows.posts[np.abs(rows.log_ratios) <= NEAR]))
    edges = np.quantile(rows.log_ratios, [0.05, 0.95])
    inside = bool(edges[0] <= 0 <= edges[1])
    modelled = "equal_posts" not in fitted
    extrapolated = modelled and (near < LEAST_NEAR or not inside)
    no_effects = {"order_logits": None, "doubled_length_logits": None}
    counted = {"near_equal": near, "extrapolated": extrapolated}
    return no_effects | _with_identical(fitted, rows, judged) | counted


def _with_identical(
    fitted: dict[str, Any], rows: VerdictTable, judged: VerdictTable
) -> dict[str, Any]:
    """A rate of posts whose texts differ, as that of all posts: identical texts are ties.

    Their share s varies with the posts that are drawn. The rate's error and that of s are
    independent: their distances from the estimate are added as squares.
    """
    posts = len(np.unique(judged.posts))
    same = 1 - len(np.unique(rows.ids)) / len(np.unique(judged.ids))
    rate = fitted["estimate"]
    of_share = abs(rate - 0.5) * Z * float(np.sqrt(same * (1 - same) / posts))
    estimate = same / 2 + (1 - same) * rate
    down, up = ((1 - same) * abs(rate - fitted[side]) for side in ("low", "high"))
    return fitted | {
        "estimate": estimate,
        "low": max(0.0, estimate - hypot(down, of_share)),
        "high": min(1.0, estimate + hypot(up, of_share)),
    }


def _no_answer(rows: VerdictTable) -> str:
    """Why the model cannot be fitted; empty where it can."""
    few = len(rows.outcomes) < LEAST_JUDGEMENTS
    if few or len(np.unique(rows.posts)) < LEAST_JUDGEMENTS // 2:
        least = f"fewer than {LEAST_JUDGEMENTS} judgements of texts that differ"
        return f"{least}, or half as many posts"
    if len(np.unique(rows.shown_first)) < 2:
        return "every summary was shown in the same place"
    if np.linalg.matrix_rank(_curve(rows)) < 3:
        return "too few different length ratios for a curve"
    return "all verdicts are alike" if np.ptp(rows.outcomes) < 1e-9 else ""


def _curve(rows: VerdictTable) -> Floats:
    """Design [n, 3] of the verdicts over length, without order."""
    return np.column_stack([np.ones(len(rows.outcomes)), *length_terms(rows.log_ratios)])


def _by_order(rows: VerdictTable) -> dict[str, Any] | None:
    """The model with a curve for each order; None where it has no finite fit."""
    order = np.where(rows.shown_first, 0.5, -0.5)
    wide, narrow = length_terms(rows.log_ratios)
    design = np.column_stack([np.ones(len(order)), order, wide, narrow, order * wide])
    fitted = clustered_logit(rows.outcomes, design, rows.posts)
    if fitted is None:
        return None
    b, covariance = fitted
    first, second = sigmoid(b[0] + b[1] / 2), sigmoid(b[0] - b[1] / 2)
    slopes = first * (1 - first) / 2, second * (1 - second) / 2
    gradient = np.array([sum(slopes), (slopes[0] - slopes[1]) / 2, 0, 0, 0])
    doubled = np.array([0, 0, *(float(term[0]) for term in length_terms(np.log([2.0]))), 0])
    return _rate((first + second) / 2, _error(gradient, covariance)) | {
        "order_logits": _with_bounds(b[1], _error(np.eye(5)[1], covariance)),
        "doubled_length_logits": _with_bounds(float(doubled @ b), _error(doubled, covariance)),
    }


def _averaged_first(rows: VerdictTable) -> dict[str, Any] | None:
    """The model without order, on the posts that were judged in both; None without a finite fit.

    Of a post with both orders, the model's equations hold the mean of the two only.
    """
    both = in_both_orders(rows)
    if len(both.outcomes) <= len(rows.outcomes) / 2:
        return None
    if np.ptp(of_orders(both).sum(axis=1)) < 1e-9:  # an interval would have no width
        return None
    fitted = clustered_logit(both.outcomes, _curve(both), both.posts)
    if fitted is None:
        return None
    b, covariance = fitted
    rate = sigmoid(b[0])
    error = rate * (1 - rate) * _error(np.eye(3)[0], covariance)
    return _rate(rate, error)


def in_both_orders(rows: VerdictTable) -> VerdictTable:
    """The verdicts on the posts that were judged once in each order, sorted by id and order."""
    _, codes, counts = np.unique(rows.ids, return_inverse=True, return_counts=True)
    both = rows.only(counts[codes] == 2)
    return both.only(np.lexsort((~both.shown_first, both.ids)))


def of_orders(both: VerdictTable) -> Floats:
    """[ids, 2]: the outcomes of `in_both_orders`, shown first and second."""
    return both.outcomes.reshape(-1, 2)


def _read_off(rows: VerdictTable) -> dict[str, Any] | None:
    """The rate of the posts whose texts have equally many words, each the mean of its two orders.

    None where they are few, or alike, so that an interval would have no width.
    """
    equal = in_both_orders(rows.only(np.abs(rows.log_ratios) < 1e-9))
    means, posts = of_orders(equal).mean(axis=1), equal.posts[::2]
    if len(np.unique(posts)) < LEAST_NEAR or np.ptp(means) < 1e-9:
        return None
    rate = asdict(mean_of_posts(means, (0.0, 1.0), posts))
    rate["equal_posts"] = rate.pop("posts")
    return rate


def _error(gradient: Floats, covariance: Floats) -> float:
    """Standard error of a function of the coefficients, by its gradient (delta method)."""
    return float(np.sqrt(gradient @ covariance @ gradient))


def _rate(rate: float, error: float) -> dict[str, Any]:
    """A rate with the interval that its error makes on the logit scale."""
    logit, half = float(np.log(rate / (1 - rate))), Z * error / (rate * (1 - rate))
    return {"estimate": rate, "low": sigmoid(logit - half), "high": sigmoid(logit + half)}


def _with_bounds(coefficient: float, error: float) -> list[float]:
    return [float(coefficient + k * error) for k in (0, -Z, Z)]


def rates_by_length(table: VerdictTable) -> list[dict[str, Any]]:
    """The raw rate in each of about equally filled bins of the length ratio, shortest first.

    A row has the bin's lowest and highest ratio (policy over the other), the number of
    judgements, and the rate with the interval of `clustered_share`.
    """
    rows = table.judged()
    if not len(rows.outcomes):
        return []
    inner = np.unique(np.quantile(rows.log_ratios, np.arange(1, BINS) / BINS))
    places = np.searchsorted(inner, rows.log_ratios, side="left")
    bins_of_rows = []
    for part in (rows.only(places == place) for place in np.unique(places)):
        rate = clustered_share(part.outcomes, part.posts)
        assert rate is not None  # a place that occurs has rows
        ratios = np.exp(part.log_ratios)
        edges = {"from": float(ratios.min()), "to": float(ratios.max())}
        bounds = {"rate": rate.estimate, "low": rate.low, "high": rate.high}
        bins_of_rows.append(edges | {"judgements": len(part.outcomes)} | bounds)
    return bins_of_rows
