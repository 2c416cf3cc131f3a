"""Statistics of the held-out pairs that the stages `rm` and `dpo` ranked."""

from pathlib import Path
from typing import Any

from eval.rates.reward_pairs import LEAST_PAIRS, pair_accuracy, pair_statistics
from stages.running.files import read_lines
from stages.runs import HELD_OUT_CNNDM, HELD_OUT_PAIRS

NO_ACCURACY = {  # at equal length, by what `accuracy_at_equal_length` says
    "few pairs": f"fewer than {LEAST_PAIRS} pairs on {LEAST_PAIRS // 2} posts",
    "all alike": "all pairs are ranked alike, or all length ratios are alike",
    "no fit": "length alone decides nearly every pair: there is no finite fit",
}


def with_statistics(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A stage's results with `pair_statistics` of the rows in its folder, if it wrote such rows."""
    if not (folder / HELD_OUT_PAIRS).exists():
        return results
    articles = results["cnndm"]
    if articles is not None:
        articles = articles | _statistics(folder / HELD_OUT_CNNDM)
    return results | _statistics(folder / HELD_OUT_PAIRS) | {"cnndm": articles}


def _statistics(path: Path) -> dict[str, Any]:
    statistics = pair_statistics(read_lines(path))
    at_equal_length = statistics["length"]["at_equal_length"]
    if "why" in at_equal_length:
        at_equal_length["why"] = NO_ACCURACY[at_equal_length["why"]]
    return statistics


def held_out_accuracy(folder: Path) -> dict[str, float]:
    """`pair_accuracy` of a stage's folder; empty if it wrote no such rows."""
    path = folder / HELD_OUT_PAIRS
    return pair_accuracy(read_lines(path)) if path.exists() else {}
