"""Statistics of a scorer on held-out comparisons: accuracy, groups, calibration, length.

The stages `rm` and `dpo` write one row per pair: `gap`, the score of the chosen summary minus that
of the rejected one; `chosen_tokens` and `rejected_tokens`, with EOS; the post's `id`, and under
`post` the first id with the same text, if that is another one; and the pair's groups.

Labelers prefer longer summaries, so part of any accuracy comes from length. So the statistics
include the accuracy of "the longer one" on the same pairs, the scorer's accuracy on pairs of nearly
equal length, and its accuracy at equal length by a logistic model.
Source: Stiennon et al. 2020, section 3.4 and the appendix on length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from eval.stats.intervals import (
    Floats,
    Posts,
    Z,
    as_plain,
    clustered_share,
    mean_over_posts,
    post_numbers,
)
from eval.stats.length_control import length_terms, sigmoid
from eval.stats.logistic import clustered_logit

GROUPS = ("split", "batch", "strength", "policies")
CALIBRATION_BIN = 0.5  # reward units, as in the figure of Huang et al. 2024
# Lengths are nearly equal if they differ by at most this share of the longer one.
NEARLY_EQUAL = 0.1
FEWEST_PAIRS = 30
ROUNDING = 1e-9


def pair_accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`accuracy_of` rows of held-out pairs; a gap of 0 is wrong."""
    is_right = [float(row["gap"] > 0) for row in rows]
    return accuracy_of(is_right, _posts(rows))


def accuracy_of(right: Sequence[float], posts: Sequence[str]) -> dict[str, float]:
    """`accuracy`, `accuracy_low` and `accuracy_high` (95% over posts), and the number of `pairs`.

    `right` [pairs] is 1 for a pair that is ranked as by the labelers, 1/2 for a tie that counts
    half, otherwise 0. `posts` [pairs] are ids of posts. Neither may be empty.
    """
    share = clustered_share(np.array(right, dtype=float), post_numbers(posts))
    assert share is not None  # not None, because there are pairs
    return {
        "accuracy": share.estimate,
        "accuracy_low": share.low,
        "accuracy_high": share.high,
        "pairs": len(right),
    }


def pair_statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of a scorer on held-out pairs; a gap of 0 is wrong.

    The accuracy with its interval; `by_*`: the same for each group of pairs; `calibration`; and
    `length`, with the accuracy of "the longer one" in each group. Pairs about one post go together,
    so all intervals are over posts.
    """
    posts = _posts(rows)
    gaps = [row["gap"] for row in rows]
    is_right = [float(gap > 0) for gap in gaps]
    chosen_tokens = [row["chosen_tokens"] for row in rows]
    rejected_tokens = [row["rejected_tokens"] for row in rows]
    is_longer = _points(np.array(chosen_tokens, dtype=float) - np.array(rejected_tokens))
    length = compare_with_length(
        gaps=gaps,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        posts=posts,
    )
    return {
        **accuracy_of(is_right, posts),
        **_by_groups(rows, is_right),
        "calibration": calibration(gaps),
        "length": length | _by_groups(rows, is_longer.tolist()),
    }


def _by_groups(rows: Sequence[Mapping[str, Any]], right: Sequence[float]) -> dict[str, Any]:
    """`accuracy_of` the pairs of each group, by its name; pairs without a group are left out."""
    frame = pd.DataFrame({"right": right, "post": _posts(rows)})
    accuracies = {}
    for key in GROUPS:
        groups = [None if row[key] is None else str(row[key]) for row in rows]
        accuracies[f"by_{key}"] = {
            name: accuracy_of(part["right"].tolist(), part["post"].tolist())
            for name, part in frame.groupby(pd.Series(groups, dtype=object))
        }
    return accuracies


def _posts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first id with the text of each row's post."""
    return [row.get("post") or row["id"] for row in rows]


def calibration(gaps: Sequence[float]) -> list[list[float]]:
    """How often the higher score is on the preferred summary, by the size of the gap.

    Rows [center of the bin in reward units, share, pairs].
    Source: Huang et al. 2024, detail 18.
    """
    is_right = np.array(gaps) > 0
    bins = np.abs(gaps) // CALIBRATION_BIN
    rows = []
    for number in np.unique(bins):
        is_right_in_bin = is_right[bins == number]
        center = float((number + 0.5) * CALIBRATION_BIN)
        rows.append([center, float(is_right_in_bin.mean()), len(is_right_in_bin)])
    return rows


def compare_with_length(
    *,
    gaps: Sequence[float],
    chosen_tokens: Sequence[int],
    rejected_tokens: Sequence[int],
    posts: Sequence[str],
) -> dict[str, Any]:
    """The accuracy of length alone, and the scorer's accuracy without the help of length.

    All arguments are [pairs]; `posts` are ids. A gap of 0 and an equal length count half.

    `longer`: the accuracy of "the longer one"; `above_longer`: the scorer's accuracy minus that,
    paired; `near_equal` and `longer_near_equal`: both for lengths that differ by at most 10%;
    `at_equal_length`: see `accuracy_at_equal_length`. Rates lie in [0, 1], with 95% intervals over
    posts.
    """
    numbers = post_numbers(posts)
    chosen = np.array(chosen_tokens, dtype=float)
    rejected = np.array(rejected_tokens, dtype=float)
    is_right = _points(np.array(gaps, dtype=float))
    is_longer = _points(chosen - rejected)
    is_near = np.abs(chosen - rejected) <= NEARLY_EQUAL * np.maximum(chosen, rejected)
    above_longer = mean_over_posts(is_right - is_longer, limits=(-1.0, 1.0), posts=numbers)
    return {
        "longer": _share(is_longer, numbers),
        "above_longer": as_plain(above_longer),
        "near_equal": _share(is_right[is_near], numbers[is_near]),
        "longer_near_equal": _share(is_longer[is_near], numbers[is_near]),
        "at_equal_length": accuracy_at_equal_length(
            is_right, log_ratios=np.log(chosen / rejected), posts=numbers
        ),
    }


def accuracy_at_equal_length(right: Floats, log_ratios: Floats, posts: Posts) -> dict[str, Any]:
    """The accuracy at a length ratio of 1, without the pairs that are right because of length.

    `sigmoid(b0)` of `logit P(right) = b0 + c1 * wide + c2 * narrow`, where the ratio is the chosen
    summary's length divided by the rejected one's (`length_terms`). Standard errors are clustered
    by post. `estimate` is None, with the reason under `why`, if the model has no answer.
    """
    if len(right) < FEWEST_PAIRS or len(np.unique(posts)) < FEWEST_PAIRS // 2:
        return _no_accuracy(f"fewer than {FEWEST_PAIRS} pairs on {FEWEST_PAIRS // 2} posts")
    if np.ptp(right) < ROUNDING or np.ptp(log_ratios) < ROUNDING:
        return _no_accuracy("all pairs are ranked the same way, or all length ratios are the same")

    wide, narrow = length_terms(log_ratios)
    design = np.column_stack([np.ones(len(right)), wide, narrow])
    fit = clustered_logit(right, design, posts)
    if fit is None:
        return _no_accuracy("length decides nearly every pair, so there is no finite fit")
    intercept = float(fit.coefficients[0])
    error = fit.error(np.array([1.0, 0.0, 0.0]))
    return {
        "estimate": sigmoid(intercept),
        "low": sigmoid(intercept - Z * error),
        "high": sigmoid(intercept + Z * error),
    }


def _no_accuracy(why: str) -> dict[str, Any]:
    return {"estimate": None, "low": None, "high": None, "why": why}


def _points(differences: Floats) -> Floats:
    """1 if a difference is above 0, 1/2 if it is 0, otherwise 0."""
    return 0.5 + 0.5 * np.sign(differences)


def _share(values: Floats, posts: Posts) -> dict[str, Any] | None:
    """A share with its interval over posts, and the number of pairs; None without pairs."""
    share = as_plain(clustered_share(values, posts))
    if share is None:
        return None
    return share | {"pairs": len(values)}
