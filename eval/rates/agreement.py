"""Kappas: agreement of judges or tries beyond chance, with intervals over posts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import Floats, Interval, Totals, bootstrap, cohens_kappa


def fleiss(answers: Sequence[Sequence[str]]) -> float | None:
    """Agreement of several judges beyond chance; a row of `answers` is what all say of one thing.

    None where there is nothing to agree on, or all say one thing always.
    Source: Fleiss 1971.
    """
    from statsmodels.stats.inter_rater import aggregate_raters, fleiss_kappa

    if len({answer for row in answers for answer in row}) < 2:
        return None
    counts, _ = aggregate_raters(np.array(answers))
    return float(fleiss_kappa(counts))


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
    return _over_posts(estimate, cells, posts, kappas)


def kappas(totals: Floats) -> Floats:
    """Cohen's kappa [n] of n tables, flat [n, k * k]; 0 where chance alone agrees always."""
    k = int(np.sqrt(totals.shape[1]))
    tables, n = totals.reshape(-1, k, k), totals.sum(axis=1)
    same = np.trace(tables, axis1=1, axis2=2) / n
    return _beyond(same, (tables.sum(axis=2) * tables.sum(axis=1)).sum(axis=1) / n**2)


def fleiss_over_posts(answers: Sequence[Sequence[str]], posts: Sequence[str]) -> Interval | None:
    """`fleiss` with a bootstrap over posts: what is said of one post is drawn together."""
    estimate = fleiss(answers)
    if estimate is None:
        return None
    kinds, codes = np.unique(np.array(answers), return_inverse=True)
    judges = len(answers[0])
    counts = np.eye(len(kinds))[codes.reshape(-1, judges)].sum(axis=1)
    same = (counts * (counts - 1)).sum(axis=1) / (judges * (judges - 1))

    def fleiss_kappas(totals: Floats) -> Floats:
        answered = totals[:, 1:]
        chance = ((answered / answered.sum(axis=1, keepdims=True)) ** 2).sum(axis=1)
        return _beyond(totals[:, 0] / (answered.sum(axis=1) / judges), chance)

    return _over_posts(estimate, np.column_stack([same, counts]), posts, fleiss_kappas)


def _beyond(same: Floats, chance: Floats) -> Floats:
    """Agreement beyond chance; 0 where chance alone agrees always."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(chance < 1, (same - chance) / (1 - chance), 0.0)


def _over_posts(
    estimate: float, rows: Floats, posts: Sequence[str] | NDArray[Any], statistic: Totals
) -> Interval:
    _, codes = np.unique(posts, return_inverse=True)
    sums = np.zeros((int(codes.max()) + 1, rows.shape[1]))
    np.add.at(sums, codes, rows)
    low, high = bootstrap(sums, statistic)
    return Interval(
        estimate=estimate, low=min(low, estimate), high=max(high, estimate), posts=len(sums)
    )
