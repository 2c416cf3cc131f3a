"""Two algorithms at equal KL: where their lines overlap, and which one is better.

Between its points an algorithm is a straight line over the square root of KL. Two algorithms are
compared where both lines are, seed by seed; nothing is extrapolated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

import numpy as np

from eval.stats.hypothesis_tests import p_of_interval
from eval.stats.intervals import Floats, mean_over_posts, post_numbers
from reports.algorithm_points import BASE, BEST_OF_N, Point, lines_of, named
from reports.results import Interval
from reports.verdicts import Comparison, Verdict, Word, mean_over_seeds, verdicts

PLACES = 21  # at which two lines are compared


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Where the lines of two algorithms overlap in one seed."""

    kl_from: float
    kl_to: float
    first: tuple[tuple[Point, float], ...]
    """The first line's points, with their weights in its mean over the overlap."""
    second: tuple[tuple[Point, float], ...]

    def difference(self, value_of: Callable[[Point], float]) -> float:
        """Return the mean difference of a value over the overlap."""
        first = sum(weight * value_of(point) for point, weight in self.first)
        return first - sum(weight * value_of(point) for point, weight in self.second)

    def difference_on(self, post: str) -> float:
        """Return the mean difference of a post's scores over the overlap."""
        return self.difference(lambda point: point.post_scores[post])


@dataclass(frozen=True, kw_only=True)
class AlgorithmPair:
    """Two algorithms at equal KL; every difference is the first's number minus the second's.

    PPO is the second of its pairs. Of other pairs the first has the higher win rate.
    """

    first: str
    second: str
    comparison: Comparison | None
    """Of the win rates; None if no seed has a KL that both cover."""
    verdict: Verdict | None
    """None for fewer than two seeds: one says nothing about other seeds."""
    gold: float | Interval | None
    """The difference in gold score: the mean over seeds."""
    kl_from: float
    kl_to: float
    """Lowest and highest KL at which they were compared, over the seeds."""
    compared_seeds: int
    all_seeds: int
    """Seeds of the page that have both."""

    @property
    def first_title(self) -> str:
        """How the page calls the first one."""
        return named(self.first)

    @property
    def second_title(self) -> str:
        """How the page calls the second one."""
        return named(self.second)

    @property
    def is_of_trained(self) -> bool:
        """Whether both were trained; the KL of best-of-n is only an upper bound."""
        return BEST_OF_N not in (self.first, self.second)

    @property
    def name(self) -> str:
        """Both, as a difference."""
        return f"{self.first_title} minus {self.second_title}"

    @property
    def mean(self) -> float:
        """The mean difference in win rate over seeds."""
        assert self.comparison is not None
        return fmean(self.comparison.by_seed)


def overlaps_of(points: Sequence[Point], first: str, second: str) -> tuple[list[Overlap], int]:
    """Return where two lines overlap in each seed, and the number of seeds that have both lines."""
    overlaps = []
    seeds_with_both = 0
    for seed in dict.fromkeys(point.seed for point in points):
        line = _line(points, first, seed)
        other = _line(points, second, seed)
        if not line or not other:
            continue
        seeds_with_both += 1
        low = max(line[0].root, other[0].root)
        high = min(line[-1].root, other[-1].root)
        if low > high:
            continue
        roots = np.linspace(low, high, PLACES)
        overlaps.append(
            Overlap(
                kl_from=low**2,
                kl_to=high**2,
                first=_weighted(line, roots),
                second=_weighted(other, roots),
            )
        )
    return overlaps, seeds_with_both


def _line(points: Sequence[Point], algorithm: str, seed: int) -> list[Point]:
    line = [point for point in points if (point.algorithm, point.seed) == (algorithm, seed)]
    return sorted(line, key=lambda point: (point.root, point.win_rate))


def _weighted(line: Sequence[Point], roots: Floats) -> tuple[tuple[Point, float], ...]:
    """Return each point with its weight in the mean of the line over these places.

    Interpolation is linear in the values, so the weight is the mean of the line that is 1 at this
    point and 0 at the others.
    """
    own_roots = [point.root for point in line]
    weighted = []
    for point, indicator in zip(line, np.eye(len(line)), strict=True):
        weighted.append((point, float(np.interp(roots, own_roots, indicator).mean())))
    return tuple(weighted)


def pairs_of(points: Sequence[Point]) -> list[AlgorithmPair]:
    """Return all pairs of algorithms.

    Pairs that were compared on all seeds come first, and of these the pairs with PPO, the largest
    difference first. Pairs that share no KL come last.
    """
    pairs = [_pair(points, first, second) for first, second in combinations(lines_of(points), 2)]

    # One seed says nothing about other seeds, so such a pair has no verdict.
    tested = [pair for pair in pairs if pair.compared_seeds > 1]
    found = verdicts([pair.comparison for pair in tested if pair.comparison is not None])
    verdict_of = dict(zip([pair.name for pair in tested], found, strict=True))
    pairs = [replace(pair, verdict=verdict_of.get(pair.name)) for pair in pairs]

    def place(pair: AlgorithmPair) -> tuple[bool, int, bool, float]:
        has_no_comparison = pair.comparison is None
        missing_seeds = pair.all_seeds - pair.compared_seeds
        difference = 0.0 if pair.comparison is None else pair.mean
        return has_no_comparison, missing_seeds, pair.second != BASE, -difference

    return sorted(pairs, key=place)


def _pair(points: Sequence[Point], first: str, second: str) -> AlgorithmPair:
    overlaps, all_seeds = overlaps_of(points, first, second)
    by_seed = [overlap.difference(lambda point: point.win_rate) for overlap in overlaps]
    is_second_better = bool(by_seed) and fmean(by_seed) < 0
    if first == BASE or (is_second_better and second != BASE):
        # The other way round: PPO is the second of its pairs, and else the better one is the first.
        return _pair(points, second, first)
    return AlgorithmPair(
        first=first,
        second=second,
        comparison=_comparison(overlaps, by_seed) if by_seed else None,
        verdict=None,
        gold=_gold_difference(points, first, second),
        kl_from=min((overlap.kl_from for overlap in overlaps), default=0.0),
        kl_to=max((overlap.kl_to for overlap in overlaps), default=0.0),
        compared_seeds=len(overlaps),
        all_seeds=all_seeds,
    )


def _comparison(overlaps: Sequence[Overlap], by_seed: Sequence[float]) -> Comparison:
    """Return the difference of the win rates, over posts and by seed."""
    over_posts = difference_over_posts(overlaps)
    p_over_posts = 1.0
    if over_posts is not None:
        p_over_posts = p_of_interval(
            estimate=over_posts.estimate, low=over_posts.low, high=over_posts.high, value=0.0
        )
    return Comparison(over_posts=over_posts, p_over_posts=p_over_posts, by_seed=tuple(by_seed))


def difference_over_posts(overlaps: Sequence[Overlap]) -> Interval | None:
    """Return the mean difference with a bootstrap over posts; None without a post in all seeds.

    A line is linear in its points, so each post has a line, too: the same weights, on its scores.
    """
    by_seed = []
    for overlap in overlaps:
        judged = [set(point.post_scores) for point, _ in (*overlap.first, *overlap.second)]
        shared = set.intersection(*judged)
        by_seed.append({post: overlap.difference_on(post) for post in shared})
    # In the order of the first seed's posts, so that the bootstrap draws the same every time.
    first_point, _ = overlaps[0].first[0]
    posts = [post for post in first_point.post_scores if all(post in gaps for gaps in by_seed)]
    if not posts:
        return None
    means = np.array([fmean(gaps[post] for gaps in by_seed) for post in posts])
    texts = [first_point.texts[post] for post in posts]
    found = mean_over_posts(means, (-1.0, 1.0), post_numbers(texts))
    return Interval(estimate=found.estimate, low=found.low, high=found.high)


def _gold_difference(points: Sequence[Point], first: str, second: str) -> float | Interval | None:
    with_gold = [point for point in points if point.gold is not None]
    overlaps, _ = overlaps_of(with_gold, first, second)
    return mean_over_seeds([overlap.difference(_gold_of) for overlap in overlaps])


def _gold_of(point: Point) -> float:
    assert point.gold is not None
    return point.gold


def pairs_with_base(pairs: Sequence[AlgorithmPair]) -> list[AlgorithmPair]:
    """Return the pairs of PPO with another algorithm."""
    return [pair for pair in pairs if pair.second == BASE]


def other_pairs(pairs: Sequence[AlgorithmPair]) -> list[AlgorithmPair]:
    """Return the pairs without PPO."""
    return [pair for pair in pairs if pair.second != BASE]


def by_verdict(pairs: Sequence[AlgorithmPair]) -> dict[str, list[AlgorithmPair]]:
    """Return the pairs with each verdict, by the name of its word."""
    groups: dict[str, list[AlgorithmPair]] = {word.name.lower(): [] for word in Word}
    for pair in pairs:
        if pair.verdict is not None:
            groups[pair.verdict.word.name.lower()].append(pair)
    return groups
