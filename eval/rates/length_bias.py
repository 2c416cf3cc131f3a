"""A scorer of comparisons beside the rule "the longer summary is better". No torch.

Labellers prefer longer summaries, so a part of every accuracy can be had without reading: what the
longer one gets on the same pairs, what the scorer gets where lengths are nearly equal, and what a
logistic model leaves of its accuracy at equal length. Length is in tokens, with EOS.
Source: Stiennon et al. 2020, section 3.4 and appendix on length.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import Z, wilson
from eval.rates.logit import Floats, clustered_logit, length_terms, sigmoid

NEAR = 0.1  # lengths are nearly equal if they differ by at most this share of the longer one
LEAST_PAIRS = 30


def beside_length(
    gaps: Sequence[float], chosen: Sequence[int], rejected: Sequence[int], posts: Sequence[str]
) -> dict[str, Any]:
    """What length alone would get on these pairs, and the scorer where length says nothing.

    `gaps`: score of the chosen summary less that of the rejected one; `chosen`, `rejected`: their
    tokens; `posts`: the post's id, all [pairs]. A gap of 0 and an equal length count half.

    `longer`: accuracy of "the longer one"; `above_longer`: the scorer's accuracy less that, on the
    same pairs; `near_equal`, `longer_near_equal`: both where lengths differ by at most 10 %;
    `at_equal_length`: see `accuracy_at_equal_length`. Rates lie in [0, 1], with 95% intervals.
    """
    right = _points(np.array(gaps, dtype=float))
    ours, theirs = np.array(chosen, dtype=float), np.array(rejected, dtype=float)
    longer = _points(ours - theirs)
    near = np.abs(ours - theirs) <= NEAR * np.maximum(ours, theirs)
    return {
        "longer": _share(longer),
        "above_longer": _mean(right - longer),
        "near_equal": _share(right[near]),
        "longer_near_equal": _share(longer[near]),
        "at_equal_length": accuracy_at_equal_length(right, np.log(ours / theirs), _numbers(posts)),
    }


def accuracy_at_equal_length(
    right: Floats, log_ratios: Floats, posts: NDArray[np.int64]
) -> dict[str, Any]:
    """The accuracy at a length ratio of 1: sigmoid(b0) of `logit P(right) = b0 + bounded length`.

    The ratio is the chosen summary's length over the rejected one's; its two bounded terms are
    `length_terms`. Standard errors are clustered by post. So what the scorer gets right only
    because the better summary is longer is taken off. `estimate` is None, with the reason under
    `why`, where the model has no answer.
    """
    nothing = {"estimate": None, "low": None, "high": None}
    if len(right) < LEAST_PAIRS or len(np.unique(posts)) < LEAST_PAIRS // 2:
        return nothing | {"why": f"fewer than {LEAST_PAIRS} pairs on {LEAST_PAIRS // 2} posts"}
    if np.ptp(right) < 1e-9 or np.ptp(log_ratios) < 1e-9:
        return nothing | {"why": "all pairs are ranked alike, or all length ratios are alike"}
    design = np.column_stack([np.ones(len(right)), *length_terms(log_ratios)])
    fitted = clustered_logit(right, design, posts)
    if fitted is None:
        return nothing | {"why": "length alone decides nearly every pair: there is no finite fit"}
    b0, se = fitted[0][0], np.sqrt(fitted[1][0, 0])
    return {
        "estimate": sigmoid(b0),
        "low": sigmoid(b0 - Z * se),
        "high": sigmoid(b0 + Z * se),
    }


def _points(differences: Floats) -> Floats:
    """1 where a difference is above 0, 1/2 where it is 0, else 0."""
    return 0.5 + 0.5 * np.sign(differences)


def _share(values: Floats) -> dict[str, Any] | None:
    """A share with Wilson's interval; None where there is no pair."""
    if not len(values):
        return None
    low, high = wilson(float(values.sum()), len(values))
    return {"estimate": float(values.mean()), "low": low, "high": high, "pairs": len(values)}


def _mean(values: Floats) -> dict[str, Any]:
    """A mean of differences with its normal interval."""
    mean, spread = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
    half = Z * spread / float(np.sqrt(len(values)))
    return {"estimate": mean, "low": mean - half, "high": mean + half, "pairs": len(values)}


def _numbers(posts: Sequence[str]) -> NDArray[np.int64]:
    """Each post as a number."""
    known = {post: number for number, post in enumerate(dict.fromkeys(posts))}
    return np.array([known[post] for post in posts], dtype=np.int64)
