"""Statistics of the held-out pairs that the stages `rm` and `dpo` ranked."""

from pathlib import Path
from typing import Any

from eval.rates.reward_pairs import pair_accuracy, pair_statistics
from stages.running.files import read_lines
from stages.runs import HELD_OUT_CNNDM, HELD_OUT_PAIRS


def with_statistics(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A stage's results with `pair_statistics` of the rows in its folder, if it wrote such rows."""
    if not (folder / HELD_OUT_PAIRS).exists():
        return results
    articles = results["cnndm"]
    if articles is not None:
        articles = articles | pair_statistics(read_lines(folder / HELD_OUT_CNNDM))
    return results | pair_statistics(read_lines(folder / HELD_OUT_PAIRS)) | {"cnndm": articles}


def held_out_accuracy(folder: Path) -> dict[str, float]:
    """`pair_accuracy` of a stage's folder; empty if it wrote no such rows."""
    path = folder / HELD_OUT_PAIRS
    return pair_accuracy(read_lines(path)) if path.exists() else {}
