"""Formulas for numbers that seeds give: equivalence, seeds needed, failures counted. No torch."""

from collections.abc import Sequence
from math import comb, floor, sqrt

import numpy as np

from eval.rates.formulas import TAILS, Z, mean_of_seeds

ONE_SIDED = 0.05  # of each of the two tests


def within_margin(values: Sequence[float], margin: float) -> bool:
    """Whether the mean over seeds is shown to lie within -margin and +margin.

    Two one-sided t tests at 5% each: the 90% t interval lies inside. One seed shows nothing.
    Source: Schuirmann 1987.
    """
    bounds = mean_of_seeds(values, 1 - 2 * ONE_SIDED)
    return bounds is not None and -margin < bounds[0] and bounds[1] < margin


def seeds_needed(values: Sequence[float], half_width: float) -> int:
    """The fewest seeds, at least 2, whose 95% t interval would reach no further than `half_width`.

    The smallest n with `t(n - 1) s / sqrt(n) <= half_width`, s the standard deviation of `values`.
    """
    from scipy.stats import t

    spread = float(np.std(values, ddof=1))
    seeds = max(2, floor((Z * spread / half_width) ** 2))  # t is never below its limit Z
    while float(t.ppf(TAILS[1], seeds - 1)) * spread / sqrt(seeds) > half_width:
        seeds += 1
    return seeds


def fisher_exact(failed: tuple[int, int], tried: tuple[int, int]) -> float:
    """Two-sided p-value of two groups having one rate of failure, given their numbers together.

    All tables with these margins that are no likelier than the one seen, counted in whole numbers.
    Source: Fisher's exact test (Fisher 1934).
    """
    total = sum(failed)
    ways = {
        first: comb(tried[0], first) * comb(tried[1], total - first) for first in range(total + 1)
    }
    rare = sum(count for count in ways.values() if count <= ways[failed[0]])
    return rare / comb(sum(tried), total)
