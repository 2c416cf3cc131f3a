"""The win rate at equal length, beside the raw one: never instead of it.

Judges prefer longer text and the text shown first. A logistic model of "the policy is preferred"
has a term for each; it says which rate would be left at a length ratio of 1 if no text were shown
first. That also takes off what a summary gains by telling more, so both rates are shown. Length is
counted in words, as in the published analysis of these verdicts. `eval.verdict_analysis` counts
characters and tokens too, to show how much the unit matters.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import Floats, clustered_share
from stages.learning.intervals import Z
from stages.learning.logit import clustered_logit, sigmoid

BINS = 5
LEAST_JUDGEMENTS = 30


@dataclass(frozen=True, kw_only=True)
class VerdictTable:
    """One row a judgement of a policy's summary against another one: columns of equal length."""

    posts: NDArray[np.int64]
    """Which post, as a number: rows of one post are one cluster."""
    outcomes: Floats
    """1 where the policy is preferred, 1/2 for a tie, 0 otherwise; nan where unjudged."""
    shown_first: NDArray[np.bool_]
    """Whether the policy's summary was the one shown first (A)."""
    log_ratios: Floats
    """Natural logarithm of the policy's length over the other's."""
    asked: NDArray[np.bool_]
    """False where the two texts are identical: a tie by protocol, which says nothing of a judge."""

    def judged(self) -> "VerdictTable":
        """The rows that have a verdict."""
        return self.only(~np.isnan(self.outcomes))

    def only(self, rows: NDArray[np.bool_]) -> "VerdictTable":
        """Some of the rows."""
        return VerdictTable(**{name: column[rows] for name, column in vars(self).items()})


def word_count(text: str) -> int:
    """Words of a summary, at least 1, because 0 has no logarithm."""
    return max(1, len(text.split()))


def length_controlled(table: VerdictTable) -> dict[str, Any]:
    """The rate at equal length and without order, with its 95% interval.

    `logit P(policy) = b0 + b1 * order + b2 * log ratio`, order +1/2 where the policy is shown
    first and -1/2 where second; the rate is `sigmoid(b0)`, its interval `sigmoid(b0 -+ z se)`
    with the standard error clustered by post (a fractional logit: ties enter as 1/2). `estimate`
    is None, with the reason under `why`, where the model has no answer. `extrapolated`: a ratio
    of 1 lies outside the middle 90% of the ratios seen, so the model, not the data, answers.
    Source: Stiennon et al. 2020, section 3.4 and appendix on length; Huang et al. 2024, appendix;
    for LLM judges Dubois et al. 2404.04475; Papke and Wooldridge 1996 for the fractional logit.
    """
    rows = table.judged()
    why = _no_answer(rows)
    if why:
        return {"estimate": None, "low": None, "high": None, "why": why}
    fitted = _fit(rows)
    if fitted is None:
        why = "length or order alone decides nearly every verdict, so the model has no finite fit"
        return {"estimate": None, "low": None, "high": None, "why": why}
    coefficients, errors = fitted
    b0, se = coefficients[0], errors[0]
    edges = np.quantile(rows.log_ratios, [0.05, 0.95])
    return {
        "estimate": sigmoid(b0),
        "low": sigmoid(b0 - Z * se),
        "high": sigmoid(b0 + Z * se),
        "order_logits": _with_bounds(coefficients[1], errors[1]),
        "log_length_logits": _with_bounds(coefficients[2], errors[2]),
        "extrapolated": not edges[0] <= 0 <= edges[1],
    }


def _no_answer(rows: VerdictTable) -> str:
    """Why the model cannot be fitted; empty where it can."""
    if len(rows.outcomes) < LEAST_JUDGEMENTS:
        return f"fewer than {LEAST_JUDGEMENTS} judgements"
    if len(np.unique(rows.posts)) < LEAST_JUDGEMENTS // 2:
        return f"fewer than {LEAST_JUDGEMENTS // 2} posts"
    if len(np.unique(rows.shown_first)) < 2:
        return "every summary was shown in the same place"
    if np.ptp(rows.log_ratios) < 1e-9:
        return "all length ratios are alike"
    if np.ptp(rows.outcomes) < 1e-9:
        return "all verdicts are alike"
    return ""


def _fit(rows: VerdictTable) -> tuple[Floats, Floats] | None:
    """Coefficients [3] and clustered standard errors [3]; None where there is no finite fit."""
    order = np.where(rows.shown_first, 0.5, -0.5)
    design = np.column_stack([np.ones(len(order)), order, rows.log_ratios])
    return clustered_logit(rows.outcomes, design, rows.posts)


def _with_bounds(coefficient: float, error: float) -> list[float]:
    bounds = (coefficient, coefficient - Z * error, coefficient + Z * error)
    return [float(one) for one in bounds]


def rates_by_length(table: VerdictTable, bins: int = BINS) -> list[dict[str, Any]]:
    """The raw rate in each of about equally filled bins of the length ratio, shortest first.

    A row has the bin's lowest and highest ratio (policy over the other), the number of
    judgements, and the rate with Wilson's interval (clustered by post).
    """
    rows = table.judged()
    if not len(rows.outcomes):
        return []
    inner = np.unique(np.quantile(rows.log_ratios, np.arange(1, bins) / bins))
    places = np.searchsorted(inner, rows.log_ratios, side="left")
    found = []
    for place in np.unique(places):
        part = rows.only(places == place)
        rate = clustered_share(part.outcomes, part.posts)
        assert rate is not None  # a place that occurs has rows
        found.append(
            {
                "from": float(np.exp(part.log_ratios.min())),
                "to": float(np.exp(part.log_ratios.max())),
                "judgements": len(part.outcomes),
                "rate": rate.estimate,
                "low": rate.low,
                "high": rate.high,
            }
        )
    return found
