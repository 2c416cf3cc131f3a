"""The verdicts about one policy as columns of numbers, ready for statistics."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.stats.intervals import Floats, Posts


@dataclass(frozen=True, kw_only=True)
class VerdictTable:
    """One row per judgement of a policy's summary against another text; columns of equal length."""

    posts: Posts
    """The post, as a number. Rows about one post are a cluster, even if its ids differ."""
    ids: NDArray[np.int64]
    """The id of the post, as a number. The two orders of an id belong together."""
    outcomes: Floats
    """1 if the policy is preferred, 1/2 for a tie, 0 otherwise; NaN if unjudged."""
    shown_first: NDArray[np.bool_]
    """Whether the policy's summary was shown first (A)."""
    log_ratios: Floats
    """Natural logarithm of the policy's length divided by the other text's."""
    differ: NDArray[np.bool_]
    """False if the two texts are identical, because such a tie says nothing about a judge."""

    def judged(self) -> "VerdictTable":
        """The rows that have a verdict."""
        return self.only(~np.isnan(self.outcomes))

    def only(self, rows: NDArray[np.bool_ | np.int64]) -> "VerdictTable":
        """The rows that a mask, or a list of row numbers, selects."""
        return VerdictTable(
            posts=self.posts[rows],
            ids=self.ids[rows],
            outcomes=self.outcomes[rows],
            shown_first=self.shown_first[rows],
            log_ratios=self.log_ratios[rows],
            differ=self.differ[rows],
        )


@dataclass(frozen=True, kw_only=True)
class BothOrders:
    """The ids that were judged once in each order."""

    rows: VerdictTable
    """Their rows; the two orders of an id follow each other, the policy shown first comes first."""
    outcomes: Floats
    """[ids, 2]: with the policy shown first, and shown second."""
    posts: Posts
    """[ids]: the post of each id."""


def both_orders(table: VerdictTable) -> BothOrders:
    """The rows of ids that occur once in each order."""
    _, codes, counts = np.unique(table.ids, return_inverse=True, return_counts=True)
    paired = table.only(counts[codes] == 2)
    rows = paired.only(np.lexsort((~paired.shown_first, paired.ids)))
    return BothOrders(
        rows=rows,
        outcomes=rows.outcomes.reshape(-1, 2),
        posts=rows.posts[::2],
    )
