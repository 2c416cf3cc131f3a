"""Each algorithm at each of its penalties, and what changes from the largest to the smallest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from reports.algorithm_points import BASE, Point, algorithms_of, named, settings_of
from reports.results import Interval
from reports.verdicts import mean_over_seeds
from stages.config.stages import POLICY_GRADIENT_STAGES


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """An algorithm at one setting, over seeds."""

    title: str
    algorithm: str
    setting: str
    seeds: int
    win_rate: float | Interval | None
    gold: float | Interval | None
    proxy: float | None
    kl: float
    tokens: float | None
    seconds: float | None
    """Of training, the median."""


@dataclass(frozen=True, kw_only=True)
class PenaltyEffect:
    """What changes from an algorithm's largest penalty to its smallest, seed by seed."""

    title: str
    largest: str
    smallest: str
    kl: float | Interval | None
    proxy: float | Interval | None
    gold: float | Interval | None
    win_rate: float | Interval | None

    @property
    def is_over_optimized(self) -> bool:
        """Whether the proxy rose and the gold score fell, by the intervals over seeds."""
        if not isinstance(self.proxy, Interval) or not isinstance(self.gold, Interval):
            return False
        return self.proxy.is_above(0) and self.gold.is_below(0)


def setting_rows(points: Sequence[Point]) -> list[SettingRow]:
    """Return a row for each setting of each algorithm."""
    rows = []
    for algorithm in algorithms_of(points):
        for setting, seeds in settings_of(points, algorithm):
            seconds = [point.seconds for point in seeds if point.seconds is not None]
            rows.append(
                SettingRow(
                    title=named(algorithm),
                    algorithm=algorithm,
                    setting=setting,
                    seeds=len(seeds),
                    win_rate=mean_over_seeds([point.win_rate for point in seeds]),
                    gold=mean_over_seeds([x.gold for x in seeds if x.gold is not None]),
                    proxy=_mean([point.proxy for point in seeds]),
                    kl=fmean(point.kl for point in seeds),
                    tokens=_mean([point.tokens for point in seeds]),
                    seconds=median(seconds) if seconds else None,
                )
            )
    return rows


def penalty_effects(points: Sequence[Point]) -> list[PenaltyEffect]:
    """Return what changes from the largest to the smallest penalty of each trained algorithm."""
    rows = []
    for algorithm in algorithms_of(points):
        if algorithm not in POLICY_GRADIENT_STAGES:
            continue
        by_setting = dict(settings_of(points, algorithm))
        largest = max(by_setting, key=float)
        smallest = min(by_setting, key=float)
        if largest == smallest:
            continue
        start = {point.seed: point for point in by_setting[largest]}
        end = {point.seed: point for point in by_setting[smallest]}
        both = [(start[seed], end[seed]) for seed in start if seed in end]
        rows.append(
            PenaltyEffect(
                title=named(algorithm),
                largest=largest,
                smallest=smallest,
                kl=_mean_change(both, lambda point: point.kl),
                proxy=_mean_change(both, lambda point: point.proxy),
                gold=_mean_change(both, lambda point: point.gold),
                win_rate=_mean_change(both, lambda point: point.win_rate),
            )
        )
    return rows


def differences_at_equal_penalty(
    points: Sequence[Point], algorithm: str
) -> dict[str, float | Interval]:
    """Return an algorithm's difference from PPO in points of win rate, by penalty.

    Both are of the same seed; the mean is over seeds.
    """
    base = {
        (point.seed, point.setting): point.win_rate for point in points if point.algorithm == BASE
    }
    by_penalty: dict[str, list[float]] = {}
    for point in points:
        place = (point.seed, point.setting)
        if point.algorithm == algorithm and place in base:
            gap = 100 * (point.win_rate - base[place])
            by_penalty.setdefault(point.setting, []).append(gap)
    means = {}
    for penalty, gaps in by_penalty.items():
        mean = mean_over_seeds(gaps)
        if mean is not None:
            means[penalty] = mean
    return means


def _mean_change(
    both: Sequence[tuple[Point, Point]], value_of: Callable[[Point], float | None]
) -> float | Interval | None:
    changes = []
    for start, end in both:
        before = value_of(start)
        after = value_of(end)
        if before is None or after is None:
            return None
        changes.append(after - before)
    return mean_over_seeds(changes)


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if measured else None
