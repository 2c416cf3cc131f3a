"""Statistics of a scorer on held-out comparisons: intervals, groups, calibration, length.

Stages `rm` and `dpo` write one row a pair: `gap`, the score of the chosen summary minus that of the
rejected one; `chosen_tokens` and `rejected_tokens`, with EOS; the post's `id`; the pair's groups.
No torch.

Labellers prefer longer summaries, so a part of every accuracy can be had without reading: what the
longer one gets on the same pairs, what the scorer gets where lengths are nearly equal, and what a
logistic model leaves of its accuracy at equal length.
Source: Stiennon et al. 2020, section 3.4 and appendix on length.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import (
    Floats,
    Z,
    clustered_logit,
    length_terms,
    mean_with_error,
    post_numbers,
    sigmoid,
    wilson,
)
from stages.running.files import read_lines
from stages.runs import HELD_OUT_CNNDM, HELD_OUT_PAIRS

GROUPS = ("split", "batch", "strength", "policies")
CALIBRATION_BIN = 0.5  # reward units, as in the figure of Huang et al. 2024
NEAR = 0.1  # lengths are nearly equal if they differ by at most this share of the longer one
LEAST_PAIRS = 30


def with_statistics(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A stage's results with `pair_statistics` of the rows in its folder, if it wrote such rows."""
    if not (folder / HELD_OUT_PAIRS).exists():
        return results
    articles = results["cnndm"]
    if articles is not None:
        articles = articles | pair_statistics(read_lines(folder / HELD_OUT_CNNDM))
    return results | pair_statistics(read_lines(folder / HELD_OUT_PAIRS)) | {"cnndm": articles}


def accuracy_interval(results: dict[str, Any]) -> dict[str, float]:
    """Wilson's interval at 95 % of an `accuracy` on `pairs`."""
    low, high = wilson(round(results["accuracy"] * results["pairs"]), results["pairs"])
    return {"accuracy_low": low, "accuracy_high": high}


def pair_statistics(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of a scorer on held-out pairs; a gap of 0 is wrong.

    `accuracy` and its interval; `by_*`: accuracy in each group of pairs; `calibration`; `length`:
    `beside_length`, with the accuracy of "the longer one" in groups.
    """
    gaps = [row["gap"] for row in rows]
    chosen, rejected = ([row[f"{name}_tokens"] for row in rows] for name in ("chosen", "rejected"))
    right = [gap > 0 for gap in gaps]
    overall = {"accuracy": sum(right) / len(right), "pairs": len(right)}
    beside = beside_length(gaps, chosen, rejected, [row["id"] for row in rows])
    longer = [0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(chosen, rejected, strict=True)]
    return {
        **overall,
        **accuracy_interval(overall),
        **_by_groups(rows, right),
        "calibration": calibration(gaps),
        "length": beside | _by_groups(rows, longer),
    }


def _by_groups(rows: Sequence[dict[str, Any]], right: Sequence[float]) -> dict[str, Any]:
    return {f"by_{key}": accuracy_by([row[key] for row in rows], right) for key in GROUPS}


def accuracy_by(groups: Sequence[Any], right: Sequence[float]) -> dict[str, dict[str, float]]:
    """Accuracy and number of pairs in each group, by name; rows without a value are left out."""
    points: dict[str, list[float]] = {}
    for group, point in zip(groups, right, strict=True):
        if group is not None:
            points.setdefault(str(group), []).append(point)
    return {
        name: {"accuracy": sum(values) / len(values), "pairs": len(values)}
        for name, values in sorted(points.items())
    }


def calibration(gaps: Sequence[float]) -> list[list[float]]:
    """How often the higher score is on the preferred summary, by size of the gap.

    Rows [centre of the bin in reward units, share, pairs].
    Source: Huang et al. 2024, detail 18.
    """
    bins: dict[int, list[bool]] = {}
    for gap in gaps:
        bins.setdefault(int(abs(gap) / CALIBRATION_BIN), []).append(gap > 0)
    return [
        [(index + 0.5) * CALIBRATION_BIN, sum(right) / len(right), len(right)]
        for index, right in sorted(bins.items())
    ]


def beside_length(
    gaps: Sequence[float], chosen: Sequence[int], rejected: Sequence[int], posts: Sequence[str]
) -> dict[str, Any]:
    """What length alone would get on these pairs, and the scorer where length says nothing.

    `gaps`: score of the chosen summary minus that of the rejected one; `chosen`, `rejected`: their
    tokens; `posts`: the post's id, all [pairs]. A gap of 0 and an equal length count half.

    `longer`: accuracy of "the longer one"; `above_longer`: the scorer's accuracy minus that, on the
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
        "at_equal_length": accuracy_at_equal_length(
            right, np.log(ours / theirs), post_numbers(posts)
        ),
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
    return {"estimate": sigmoid(b0), "low": sigmoid(b0 - Z * se), "high": sigmoid(b0 + Z * se)}


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
    interval = asdict(mean_with_error(values))
    return interval | {"pairs": interval.pop("posts")}
