"""Several systems and several judges: strengths, a correction for many tests, majority, agreement.

The Bradley-Terry model is statsmodels' logistic one, and Fleiss' kappa is statsmodels' too.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import (
    Floats,
    Interval,
    Totals,
    Z,
    bootstrap,
    clustered_logit,
    cohens_kappa,
    post_numbers,
)

NO_BOUND = "it won, or lost, every comparison with those that can be placed"
NO_FIT = "the model has no finite fit"
NO_SPREAD = 1e-12  # a variance that is rounding alone
ALIKE = "its verdicts are alike on every post, so there is no interval"


class Game(NamedTuple):
    """What one post says of two systems."""

    first: str
    second: str
    post: str
    score: float
    """How far the first is preferred, in [0, 1]: the mean of both orders."""


def strengths(games: Sequence[Game], base: str) -> dict[str, dict[str, Any]]:
    """Each system's Bradley-Terry strength in logits above `base`, with its 95% interval.

    `logit P(first is preferred) = strength(first) - strength(second)`, a fractional logistic model:
    both orders of a post are averaged before, so a strength from comparisons with `base` alone is
    the logit of the raw rate. Errors are clustered by post. `estimate` is None, with the reason
    under `why`, for a system that no finite strength fits: it lost, or won, all that ties it to
    `base`; or whose verdicts are alike on every post. `beyond`: the same with each other system in
    the place of `base`, for those that the model places.
    Source: Bradley and Terry 1952; Ford 1957 for when there is a fit.
    """
    systems = list(dict.fromkeys(name for game in games for name in game[:2]))
    placed = _connected(games, base)
    free = [name for name in systems if name in placed and name != base]
    results: dict[str, dict[str, Any]] = {name: _none(NO_BOUND) for name in systems}
    results[base] = {"estimate": 0.0, "low": 0.0, "high": 0.0}
    rows = [game for game in games if {game.first, game.second} <= placed]
    if not free:
        return results
    columns = dict(zip(free, np.eye(len(free)), strict=True)) | {base: np.zeros(len(free))}
    design = np.array([columns[game.first] - columns[game.second] for game in rows])
    scores = np.array([game.score for game in rows])
    fitted = clustered_logit(scores, design, post_numbers([game.post for game in rows]))
    if fitted is None:
        return results | dict.fromkeys(free, _none(ALIKE if np.ptp(scores) == 0 else NO_FIT))
    for name in free:
        beyond = {
            other: _bounds(fitted, columns[name] - columns[other])
            for other in free
            if other != name
        }
        results[name] = _bounds(fitted, columns[name]) | {"beyond": beyond}
    return results


def _connected(games: Sequence[Game], base: str) -> set[str]:
    """The systems that are tied to `base` by wins and by losses: only these have a strength."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    names = list(dict.fromkeys([base, *(name for game in games for name in game[:2])]))
    places = {name: place for place, name in enumerate(names)}
    won = np.zeros((len(names), len(names)))
    for game in games:
        won[places[game.first], places[game.second]] += game.score
        won[places[game.second], places[game.first]] += 1 - game.score
    _, labels = connected_components(csr_array(won), directed=True, connection="strong")
    return {name for name in names if labels[places[name]] == labels[0]}


def _none(why: str) -> dict[str, Any]:
    return {"estimate": None, "low": None, "high": None, "why": why}


def _bounds(fitted: tuple[Floats, Floats], contrast: Floats) -> dict[str, Any]:
    coefficients, covariance = fitted
    variance = float(contrast @ covariance @ contrast)
    if variance < NO_SPREAD:
        return _none(ALIKE)
    strength, error = float(contrast @ coefficients), variance**0.5
    return {"estimate": strength, "low": strength - Z * error, "high": strength + Z * error}


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number: the chance of even one false difference is kept.

    Source: Holm 1979.
    """
    order, count = np.argsort(p_values, kind="stable"), len(p_values)
    corrected = np.empty(count)
    corrected[order] = np.maximum.accumulate(
        np.minimum(1.0, np.asarray(p_values)[order] * (count - np.arange(count)))
    )
    return [float(p) for p in corrected]


def majority(verdicts: Sequence[str]) -> str:
    """What more than half of the judges say; a tie where no verdict has so many.

    `unjudged` where half of the judges or more have no verdict.
    """
    votes = Counter(verdict for verdict in verdicts if verdict != "unjudged")
    if 2 * votes.total() <= len(verdicts):
        return "unjudged"
    verdict, count = votes.most_common(1)[0]
    return verdict if 2 * count > len(verdicts) else "tie"


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
        given = totals[:, 1:]
        chance = ((given / given.sum(axis=1, keepdims=True)) ** 2).sum(axis=1)
        return _beyond(totals[:, 0] / (given.sum(axis=1) / judges), chance)

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
