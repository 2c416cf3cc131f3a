"""The law of over-optimisation: the gold score over KL, fitted seed by seed, and whether it holds.

R(d) = d (alpha - beta log d), with d the square root of the KL from SFT in nats and R the gold
score less that at KL 0. R rises to its peak, beta d* at d* = exp(alpha / beta - 1), and falls
beyond. The law is linear in alpha and beta, so least squares fits it.

A seed is what was drawn at random, so every seed is fitted by itself and intervals are Student's
over the seeds. Source: Gao et al. 2022 (2210.10760), section 3.1, the form for RL.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from eval.rates.formulas import TAILS, Floats, mean_of_seeds

LEFT_OUT = 1 / 3  # share of a seed's KLs, the largest, that the law must predict
FEWEST = 4  # KLs above 0 of a seed: three to fit, one to predict
EXACT = 1e-9  # share of the largest gold score below which an error is rounding
MOST_LOG = 300.0  # of a peak's KL, so that exp does not overflow where beta is nearly 0


@dataclass(frozen=True, kw_only=True)
class KlPoint:
    """A policy of one seed, or a stretch of its training."""

    seed: str
    kl: float
    """From SFT, nats a summary; at least 0."""
    gold: float
    """Mean score of the gold scorer, in its unit."""
    strength: str = ""
    """How strong the proxy is, such as the pairs that it learned; one curve each."""
    proxy: float | None = None
    """Mean score of the proxy, reward units."""
    accuracy: float | None = None
    """How often the proxy ranks the policy's own samples as the gold scorer does, in [0, 1]."""

    @property
    def root(self) -> float:
        """The d of the law."""
        return sqrt(self.kl)


@dataclass(frozen=True, kw_only=True)
class SeedLaw:
    """The law in one seed."""

    alpha: float
    beta: float
    start: float
    """The gold score at KL 0; 0 where no point lies there, so that the scores are relative."""

    def at(self, roots: Floats) -> Floats:
        """The gold score less that at KL 0, for roots of KL [n]."""
        return _terms(roots) @ np.array([self.alpha, self.beta])

    @property
    def peak(self) -> float | None:
        """KL of the highest gold score, nats; None where the law has no peak (beta <= 0)."""
        if self.beta <= 0:
            return None
        return float(np.exp(min(2 * (self.alpha / self.beta - 1), MOST_LOG)))

    @property
    def top(self) -> float | None:
        """The gold score at the peak less that at KL 0; None without a peak."""
        return None if self.peak is None else self.beta * sqrt(self.peak)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A point that was left out, and what the law says of it."""

    point: KlPoint
    error: float
    """Gold score less prediction."""
    half: float
    """Half the width of the 95 % prediction interval."""

    @property
    def inside(self) -> bool:
        """Whether the point lies in its prediction interval."""
        return abs(self.error) <= self.half


@dataclass(frozen=True, kw_only=True)
class SeedMean:
    """A mean over seeds with its 95 % t interval, None for one seed."""

    mean: float
    bounds: tuple[float, float] | None

    @property
    def leaves_out_0(self) -> bool:
        """Whether the interval lies above or below 0."""
        return self.bounds is not None and (self.bounds[0] > 0 or self.bounds[1] < 0)


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law at one strength of the proxy."""

    strength: str
    points: Sequence[KlPoint]
    fits: dict[str, SeedLaw]
    """Seed -> the law fitted to all of its points."""
    kept: dict[str, SeedLaw]
    """Seed -> the law fitted without the points of the largest KL."""
    forecasts: Sequence[Forecast]
    p_value: float
    """Of "the law holds", from all points left out together (Chow's test of prediction)."""

    def over_seeds(self, value: Callable[[SeedLaw], float]) -> SeedMean:
        """The mean over seeds of something of a fit."""
        return over_seeds([value(fit) for fit in self.fits.values()])

    @property
    def without_peak(self) -> list[str]:
        """The seeds whose law only rises."""
        return [seed for seed, fit in self.fits.items() if fit.peak is None]

    @property
    def shows_peak(self) -> bool:
        """Whether every seed has a peak, and the interval of beta over seeds leaves out 0.

        One seed has no such interval, so it shows none.
        """
        bounds = self.over_seeds(lambda fit: fit.beta).bounds
        return not self.without_peak and bounds is not None and bounds[0] > 0

    @property
    def peak(self) -> SeedMean | None:
        """KL of the peak, nats: the geometric mean over seeds; None where none is shown."""
        peaks = [fit.peak for fit in self.fits.values() if fit.peak is not None]
        if not self.shows_peak:
            return None
        logs = over_seeds([float(np.log(peak)) for peak in peaks])
        low, high = (float(np.exp(min(bound, MOST_LOG))) for bound in logs.bounds or (0.0, 0.0))
        return SeedMean(mean=float(np.exp(logs.mean)), bounds=(low, high) if logs.bounds else None)

    @property
    def bias(self) -> SeedMean:
        """Gold score less prediction, the mean over the points left out.

        Its interval over seeds stays right where the points of one seed share noise.
        """
        return over_seeds(
            [
                float(np.mean([x.error for x in self.forecasts if x.point.seed == seed]))
                for seed in self.fits
            ]
        )

    @property
    def reach(self) -> float:
        """The largest KL, nats: the mean over seeds."""
        largest = [max(x.kl for x in of(self.points, seed=seed)) for seed in self.fits]
        return float(np.mean(largest))

    def gained(self, score: Callable[[KlPoint], float | None]) -> list[float]:
        """Of each seed a score at its largest KL less that at KL 0, without any law.

        Empty where a seed's points do not say the score.
        """
        return [
            value
            for seed in self.fits
            if (value := _gained(of(self.points, seed=seed), score)) is not None
        ]

    @property
    def over_optimised(self) -> dict[str, float]:
        """Seeds whose gold score ends below its start and whose proxy's ends above: the KL in nats
        from which on no point's gold score is above the start.
        """
        places = {}
        for seed in self.fits:
            own = of(self.points, seed=seed)
            gold, proxy = _gained(own, lambda x: x.gold), _gained(own, lambda x: x.proxy)
            if gold is None or proxy is None or not gold < 0 < proxy:
                continue
            start = float(np.mean([x.gold for x in own if x.kl == 0]))
            above = max(x.kl for x in own if x.kl == 0 or x.gold > start)
            places[seed] = min((x.kl for x in own if x.kl > above), default=above)
        return places

    @property
    def reaches_beyond(self) -> bool:
        """Whether a peak is shown and points lie beyond it: elsewhere little is tested."""
        return self.peak is not None and self.reach > self.peak.mean

    @property
    def top(self) -> SeedMean | None:
        """The gold score at the peak less that at KL 0; None where no peak is shown."""
        tops = [fit.top for fit in self.fits.values() if fit.top is not None]
        return over_seeds(tops) if self.shows_peak else None


def _gained(points: Sequence[KlPoint], score: Callable[[KlPoint], float | None]) -> float | None:
    last = score(max(points, key=lambda point: point.kl))
    known = [value for point in points if point.kl == 0 and (value := score(point)) is not None]
    return last - float(np.mean(known)) if known and last is not None else None


def over_seeds(values: Sequence[float]) -> SeedMean:
    """The mean of a value of each seed, with its t interval."""
    return SeedMean(mean=float(np.mean(values)), bounds=mean_of_seeds(values))


def fit_curves(points: Sequence[KlPoint]) -> list[Law]:
    """The law at each strength, in the order in which strengths first appear.

    Each seed of each strength needs points at FEWEST different KLs above 0, else ValueError.
    """
    return [_curve(strength, of(points, strength=strength)) for strength in strengths_of(points)]


def strengths_of(points: Sequence[KlPoint]) -> list[str]:
    """The strengths of the proxy, in the order of their first points."""
    return list(dict.fromkeys(point.strength for point in points))


def seeds_of(points: Sequence[KlPoint]) -> list[str]:
    """The seeds, in the order of their first points."""
    return list(dict.fromkeys(point.seed for point in points))


def of(points: Sequence[KlPoint], **wanted: str) -> list[KlPoint]:
    """The points of a strength or of a seed."""
    return [p for p in points if all(getattr(p, name) == value for name, value in wanted.items())]


def _curve(strength: str, points: Sequence[KlPoint]) -> Law:
    by_seed = {seed: of(points, seed=seed) for seed in seeds_of(points)}
    forecasts, p_value = predicted(list(by_seed.values()))
    return Law(
        strength=strength,
        points=points,
        fits={seed: fit_law(own) for seed, own in by_seed.items()},
        kept={seed: fit_law(held_out(own)[0]) for seed, own in by_seed.items()},
        forecasts=forecasts,
        p_value=p_value,
    )


def fit_law(points: Sequence[KlPoint]) -> SeedLaw:
    """The law through the points of one seed, by ordinary least squares.

    Points at KL 0 are observations like the others: they say what `start` is. Without them the
    scores are relative already. Raises ValueError for fewer than two KLs above 0.
    """
    if len({point.kl for point in points} - {0.0}) < 2:
        raise ValueError("alpha and beta need two KLs above 0")
    rows, gold = _design(points, starts(points)), _gold(points)
    alpha, beta, *start = np.linalg.lstsq(rows, gold, rcond=None)[0].tolist()
    return SeedLaw(alpha=alpha, beta=beta, start=start[0] if start else 0.0)


def starts(points: Sequence[KlPoint]) -> bool:
    """Whether some point lies at KL 0."""
    return any(point.kl == 0 for point in points)


def held_out(points: Sequence[KlPoint]) -> tuple[list[KlPoint], list[KlPoint]]:
    """The points of one seed that are fitted, and those of its largest KLs, a third of them."""
    kls = sorted({point.kl for point in points} - {0.0})
    if len(kls) < FEWEST:
        raise ValueError(f"a seed needs {FEWEST} KLs above 0, not {len(kls)}")
    least = kls[-int(LEFT_OUT * len(kls))]
    kept = [point for point in points if point.kl < least]
    return kept, [point for point in points if point.kl >= least]


def predicted(seeds: Sequence[Sequence[KlPoint]]) -> tuple[list[Forecast], float]:
    """What the law, fitted to smaller KLs, says of the largest, and how likely such errors are.

    `seeds`: the points of each seed, which is fitted by itself; the variance of a point is one for
    all of them. The p-value is that of all errors together, `(sum Q / m) / s^2` under F(m, n - k)
    with Q the quadratic form of a seed's errors in the inverse of their covariance.
    Source: Chow 1960, the test for additional observations fewer than the parameters.
    """
    from scipy.stats import f, t

    parts = [_errors(*held_out(points)) for points in seeds]
    freedom = sum(part["freedom"] for part in parts)
    largest = max(abs(_gold(points)).max() for points in seeds)
    # Of exact points all errors are rounding, which no ratio of them should betray.
    variance = max(sum(part["squares"] for part in parts) / freedom, (EXACT * largest) ** 2, 1e-300)
    reach = float(t.ppf(TAILS[1], freedom)) * sqrt(variance)
    forecasts = [
        Forecast(point=point, error=float(error), half=reach * sqrt(spread))
        for part in parts
        for point, error, spread in zip(
            part["points"], part["errors"], part["covariance"].diagonal(), strict=True
        )
    ]
    quadratic = sum(
        part["errors"] @ np.linalg.solve(part["covariance"], part["errors"]) for part in parts
    )
    ratio = quadratic / len(forecasts) / variance
    return forecasts, float(f.sf(ratio, len(forecasts), freedom))


def _errors(kept: Sequence[KlPoint], out: Sequence[KlPoint]) -> dict[str, Any]:
    """Errors of prediction in one seed, and their covariance over the variance of a point."""
    begins = starts(kept)
    rows, new = _design(kept, begins), _design(out, begins)
    solution = np.linalg.lstsq(rows, _gold(kept), rcond=None)[0]
    return {
        "points": out,
        "errors": _gold(out) - new @ solution,
        "covariance": np.eye(len(out)) + new @ np.linalg.inv(rows.T @ rows) @ new.T,
        "squares": float(((_gold(kept) - rows @ solution) ** 2).sum()),
        "freedom": len(kept) - rows.shape[1],
    }


def _design(points: Sequence[KlPoint], begins: bool) -> Floats:
    """A row a point [n, 2]; with a third column for the gold score at KL 0 where it is fitted."""
    terms = _terms(np.array([point.root for point in points]))
    return np.column_stack([terms, np.ones(len(points))]) if begins else terms


def _terms(roots: Floats) -> Floats:
    """What alpha and beta multiply, [n, 2]: d and -d log d, both 0 at d = 0."""
    return np.column_stack([roots, -roots * np.log(np.where(roots > 0, roots, 1.0))])


def _gold(points: Sequence[KlPoint]) -> Floats:
    return np.array([point.gold for point in points])


# -- the proxy -------------------------------------------------------------------------------------


def ranked_alike(proxy: Sequence[float], gold: Sequence[float]) -> float | None:
    """The share of pairs that both scorers rank alike, in [0, 1]; both are [n].

    Pairs with equal gold scores do not count, equal proxy scores count half; None without a pair.
    """
    ours, theirs = (np.sign(np.subtract.outer(x, x)) for x in (np.array(proxy), np.array(gold)))
    agreement = (ours * theirs)[theirs > 0]  # each pair once
    return float(0.5 + 0.5 * agreement.mean()) if len(agreement) else None


def accuracies(points: Sequence[KlPoint]) -> list[tuple[float, float]]:
    """The proxy's mean accuracy at the KLs that are fitted and at the largest, of each seed.

    Seeds without an accuracy on either side are left out.
    """
    pairs = []
    for seed in seeds_of(points):
        sides = [
            [point.accuracy for point in side if point.accuracy is not None]
            for side in held_out(of(points, seed=seed))
        ]
        if all(sides):
            before, after = (float(np.mean(side)) for side in sides)
            pairs.append((before, after))
    return pairs
