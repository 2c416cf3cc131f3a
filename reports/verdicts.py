"""One verdict for every comparison of two policies: on pages, in the terminal and in documents.

A difference of win rates is tested over posts and, with several seeds, over seeds. Both have to
show it, because another seed trains another policy, and other posts are other questions. The
p-values of all comparisons of a page are corrected together (Holm 1979). No difference is shown
where the 90% interval lies within 3 percentage points (two one-sided tests; Schuirmann 1987).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist, fmean

from eval.stats.hypothesis_tests import EQUIVALENCE_LEVEL, holm, p_of_seeds, within_margin
from eval.stats.intervals import CONFIDENCE, mean_of_seeds
from reports.results import Interval

MARGIN = 0.03
SIGNIFICANCE = 1 - CONFIDENCE


class Word(Enum):
    """What a comparison shows."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference of 3 points"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is known of the difference between two policies' win rates."""

    over_posts: Interval | None
    """On the same posts, averaged over seeds; None if too many posts have no verdict."""
    p_over_posts: float
    by_seed: tuple[float, ...]
    """The difference of each seed; of a single run its one difference."""

    @property
    def over_seeds(self) -> Interval | None:
        """The mean over seeds with its t interval; None for one seed, or without any spread."""
        mean = mean_over_seeds(self.by_seed)
        return mean if isinstance(mean, Interval) else None

    @property
    def every_seed_agrees(self) -> bool:
        """Whether the posts show a difference, and each of several seeds has its sign."""
        if self.over_posts is None or len(self.by_seed) < 2:
            return False
        if self.over_posts.is_above(0):
            return min(self.by_seed) > 0
        return self.over_posts.is_below(0) and max(self.by_seed) < 0

    @property
    def p_value(self) -> float:
        """The p-value of no difference, before correction: the larger of posts and seeds."""
        if self.over_posts is None:
            return 1.0
        if len(self.by_seed) < 2:
            return self.p_over_posts
        return max(self.p_over_posts, p_of_seeds(self.by_seed))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A word, and the numbers that decide it."""

    word: Word
    interval: Interval | None
    """The interval that decides: over seeds or over posts. None without a win rate."""
    interval_is_over: str
    """`seeds` or `posts`."""
    interval_of_90: Interval | None
    """Of no difference, the 90% interval that decides. It lies within the margin."""
    p_value: float
    """After correction for all comparisons that were judged together."""
    comparisons: int
    """The number of comparisons that it was corrected for."""

    @property
    def is_inconclusive_by_p_value(self) -> bool:
        """Whether the interval leaves out 0, but the corrected p-value is not small enough."""
        if self.word is not Word.INCONCLUSIVE or self.interval is None:
            return False
        return self.interval.is_above(0) or self.interval.is_below(0)


def mean_over_seeds(values: Sequence[float]) -> float | Interval | None:
    """Return the mean over seeds with its 95% t interval.

    Only the mean for one seed, or if the seeds have no spread; None without any seed.
    """
    if not values:
        return None
    bounds = mean_of_seeds(values)
    if bounds is None:
        return fmean(values)
    return Interval(estimate=fmean(values), low=bounds[0], high=bounds[1])


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return the verdict on each of the comparisons that a page makes."""
    corrected = holm([comparison.p_value for comparison in comparisons])
    return [
        _verdict(comparison, p_value, len(comparisons))
        for comparison, p_value in zip(comparisons, corrected, strict=True)
    ]


def verdict(comparison: Comparison) -> Verdict:
    """Return the verdict on a comparison that is the only one of its page."""
    return verdicts([comparison])[0]


def _verdict(comparison: Comparison, p_value: float, comparisons: int) -> Verdict:
    interval, is_over = _deciding_interval(comparison)
    word = Word.INCONCLUSIVE
    interval_of_90 = None
    if interval is not None:
        if interval.is_above(0) and p_value < SIGNIFICANCE:
            word = Word.BETTER
        elif interval.is_below(0) and p_value < SIGNIFICANCE:
            word = Word.WORSE
        elif _is_within_margin(comparison):
            word = Word.NO_DIFFERENCE
            interval_of_90 = _interval_within_margin(comparison)
    return Verdict(
        word=word,
        interval=interval,
        interval_is_over=is_over,
        interval_of_90=interval_of_90,
        p_value=p_value,
        comparisons=comparisons,
    )


def _deciding_interval(comparison: Comparison) -> tuple[Interval | None, str]:
    """Return the interval that has to leave out 0, and what it is over.

    With several seeds both intervals have to leave out 0, so the one that reaches further toward 0
    decides.
    """
    posts = comparison.over_posts
    seeds = comparison.over_seeds
    if posts is None or seeds is None:
        return posts, "posts"
    is_positive = seeds.estimate > 0
    posts_reach_further = posts.low < seeds.low if is_positive else posts.high > seeds.high
    if posts_reach_further:
        return posts, "posts"
    return seeds, "seeds"


def _is_within_margin(comparison: Comparison) -> bool:
    """Whether the difference is shown to be smaller than the margin, over seeds and over posts."""
    if comparison.over_posts is None:
        return False
    posts = _at_90_percent(comparison.over_posts)
    if not (posts.is_above(-MARGIN) and posts.is_below(MARGIN)):
        return False
    # With one seed, or if every seed has the same difference, seeds have no spread to test.
    if comparison.over_seeds is None:
        return True
    return within_margin(comparison.by_seed, MARGIN)


def _interval_within_margin(comparison: Comparison) -> Interval:
    """Return the 90% interval, over posts or over seeds, that reaches further from 0."""
    assert comparison.over_posts is not None
    intervals = [_at_90_percent(comparison.over_posts)]
    bounds = mean_of_seeds(comparison.by_seed, confidence=1 - 2 * EQUIVALENCE_LEVEL)
    if bounds is not None:
        estimate = fmean(comparison.by_seed)
        intervals.append(Interval(estimate=estimate, low=bounds[0], high=bounds[1]))
    return max(intervals, key=lambda interval: max(-interval.low, interval.high))


def _at_90_percent(posts: Interval) -> Interval:
    """Return the 90% interval over posts: the 95% one in the ratio of the normal quantiles."""
    ratio = NormalDist().inv_cdf(0.95) / NormalDist().inv_cdf(0.975)
    return Interval(
        estimate=posts.estimate,
        low=posts.estimate - ratio * (posts.estimate - posts.low),
        high=posts.estimate + ratio * (posts.high - posts.estimate),
    )
