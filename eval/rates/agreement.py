"""Cohen's kappa: agreement of two judges beyond chance, with its interval over posts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import Floats, Interval, bootstrap, cohens_kappa


def cohen_over_posts(
    a: Sequence[str], b: Sequence[str], posts: Sequence[str] | NDArray[Any]
) -> Interval | None:
    """Cohen's kappa of two judges' answers with a bootstrap over posts; None as `cohens_kappa`.

    Several answers about one post are drawn together.
    """
    estimate = cohens_kappa(a, b) if a else None
    if estimate is None:
        return None
    kinds, codes = np.unique([*a, *b], return_inverse=True)
    k = len(kinds)
    cells = np.eye(k * k)[codes[: len(a)] * k + codes[len(a) :]]
    _, of_posts = np.unique(posts, return_inverse=True)
    sums = np.zeros((int(of_posts.max()) + 1, k * k))
    np.add.at(sums, of_posts, cells)
    low, high = bootstrap(sums, kappas)
    return Interval(
        estimate=estimate, low=min(low, estimate), high=max(high, estimate), posts=len(sums)
    )


def kappas(totals: Floats) -> Floats:
    """Cohen's kappa [n] of n tables, flat [n, k * k]; 0 where chance alone agrees always."""
    k = int(np.sqrt(totals.shape[1]))
    tables, n = totals.reshape(-1, k, k), totals.sum(axis=1)
    same = np.trace(tables, axis1=1, axis2=2) / n
    chance = (tables.sum(axis=2) * tables.sum(axis=1)).sum(axis=1) / n**2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(chance < 1, (same - chance) / (1 - chance), 0.0)
