"""Statistics of a scorer on held-out comparisons: intervals, groups, calibration, length.

Stages `rm` and `dpo` write one row a pair: `gap`, the score of the chosen summary minus that of the
rejected one; `chosen_tokens` and `rejected_tokens`, with EOS; the post's `id`, and as `post` the
first id with its text if that is another one; the pair's groups. No torch.

Labellers prefer longer summaries, so a part of every accuracy can be had without reading: what the
longer one gets on the same pairs, what the scorer gets where lengths are nearly equal, and what a
logistic model leaves of its accuracy at equal length.
Source: Stiennon et al. 2020, section 3.4 and appendix on length.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from eval.stats.formulas import (
    Floats,
    Z,
    as_plain,
    clustered_logit,
    clustered_share,
    mean_of_posts,
    post_numbers,
)
from eval.stats.length_control import length_terms, sigmoid

GROUPS = ("split", "batch", "strength", "policies")
CALIBRATION_BIN = 0.5  # reward units, as in the figure of Huang et al. 2024
NEAR = 0.1  # lengths are nearly equal if they differ by at most this share of the longer one
LEAST_PAIRS = 30


def pair_accuracy(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`accuracy_of` the rows of some held-out pairs."""
    return accuracy_of([row["gap"] > 0 for row in rows], _posts(rows))


def accuracy_of(right: Sequence[float], posts: Sequence[str]) -> dict[str, float]:
    """`accuracy` on so many `pairs`, with its 95% interval over posts.

    `right`: 1 for a pair that is ranked as by the labellers, 1/2 for a tie that counts half, else
    0; `posts`: the post's id, both [pairs] and not empty.
    """
    share = clustered_share(np.array(right, dtype=float), post_numbers(posts))
    assert share is not None  # there are pairs
    bounds = {"accuracy_low": share.low, "accuracy_high": share.high}
    return {"accuracy": share.estimate, **bounds, "pairs": len(right)}


def pair_statistics(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of a scorer on held-out pairs; a gap of 0 is wrong.

    `accuracy` and its interval; `by_*`: the same in each group of pairs; `calibration`; `length`:
    `beside_length`, with the accuracy of "the longer one" in groups. Several pairs are about one
    post, and labels and scores of them go together, so all intervals are over posts.
    """
    gaps, posts = [row["gap"] for row in rows], _posts(rows)
    chosen, rejected = ([row[f"{name}_tokens"] for row in rows] for name in ("chosen", "rejected"))
    right = [float(gap > 0) for gap in gaps]
    longer = [0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(chosen, rejected, strict=True)]
    return {
        **accuracy_of(right, posts),
        **_by_groups(rows, right),
        "calibration": calibration(gaps),
        "length": beside_length(gaps, chosen, rejected, posts) | _by_groups(rows, longer),
    }


def _by_groups(rows: Sequence[dict[str, Any]], right: Sequence[float]) -> dict[str, Any]:
    """`accuracy_of` the pairs of each group, by its name; pairs without one are left out."""
    frame = pd.DataFrame({"right": right, "post": _posts(rows)})
    accuracies = {}
    for key in GROUPS:
        groups = [None if row[key] is None else str(row[key]) for row in rows]
        accuracies[f"by_{key}"] = {
            name: accuracy_of(part["right"].tolist(), part["post"].tolist())
            for name, part in frame.groupby(pd.Series(groups, dtype=object))
        }
    return accuracies


def _posts(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row.get("post") or row["id"] for row in rows]


def calibration(gaps: Sequence[float]) -> list[list[float]]:
    """How often the higher score is on the preferred summary, by size of the gap.

    Rows [centre of the bin in reward units, share, pairs].
    Source: Huang et al. 2024, detail 18.
    """
    frame = pd.DataFrame({"right": np.array(gaps) > 0})
    shares = frame["right"].groupby(np.abs(gaps) // CALIBRATION_BIN).agg(["mean", "size"])
    centres = (shares.index + 0.5) * CALIBRATION_BIN
    return list(map(list, zip(centres, shares["mean"], shares["size"], strict=True)))


def beside_length(
    gaps: Sequence[float], chosen: Sequence[int], rejected: Sequence[int], posts: Sequence[str]
) -> dict[str, Any]:
    """What length alone would get on these pairs, and the scorer where length says nothing.

    `gaps`: score of the chosen summary minus that of the rejected one; `chosen`, `rejected`: their
    tokens; `posts`: the post's id, all [pairs]. A gap of 0 and an equal length count half.

    `longer`: accuracy of "the longer one"; `above_longer`: the scorer's accuracy minus that, on the
    same pairs; `near_equal`, `longer_near_equal`: both where lengths differ by at most 10 %;
    `at_equal_length`: see `accuracy_at_equal_length`. Rates lie in [0, 1], with 95% intervals over
    posts.
    """
    right = _points(np.array(gaps, dtype=float))
    lengths, others = np.array(chosen, dtype=float), np.array(rejected, dtype=float)
    longer, numbers = _points(lengths - others), post_numbers(posts)
    near = np.abs(lengths - others) <= NEAR * np.maximum(lengths, others)
    return {
        "longer": _share(longer, numbers),
        "above_longer": as_plain(mean_of_posts(right - longer, (-1.0, 1.0), numbers)),
        "near_equal": _share(right[near], numbers[near]),
        "longer_near_equal": _share(longer[near], numbers[near]),
        "at_equal_length": accuracy_at_equal_length(right, np.log(lengths / others), numbers),
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
        why = "all pairs are ranked alike, or all length ratios are alike"
        return nothing | {"why": why}
    design = np.column_stack([np.ones(len(right)), *length_terms(log_ratios)])
    fitted = clustered_logit(right, design, posts)
    if fitted is None:
        why = "length alone decides nearly every pair: there is no finite fit"
        return nothing | {"why": why}
    b0, se = fitted[0][0], np.sqrt(fitted[1][0, 0])
    return {"estimate": sigmoid(b0), "low": sigmoid(b0 - Z * se), "high": sigmoid(b0 + Z * se)}


def _points(differences: Floats) -> Floats:
    """1 where a difference is above 0, 1/2 where it is 0, else 0."""
    return 0.5 + 0.5 * np.sign(differences)


def _share(values: Floats, posts: NDArray[np.int64]) -> dict[str, Any] | None:
    """A share with its interval over posts; None where there is no pair."""
    share = clustered_share(values, posts)
    return None if share is None else asdict(share) | {"pairs": len(values)}
