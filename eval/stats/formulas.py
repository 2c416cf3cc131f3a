"""The names that `reports` imports from here, until it imports them from their modules."""

from eval.stats.hypothesis_tests import fisher_exact, holm, p_of_seeds, within_margin
from eval.stats.intervals import CONFIDENCE, TAILS, Interval, Z, mean_of_seeds, seeds_needed

__all__ = [
    "CONFIDENCE",
    "TAILS",
    "Interval",
    "Z",
    "fisher_exact",
    "holm",
    "mean_of_seeds",
    "p_of_seeds",
    "seeds_needed",
    "within_margin",
]
