"""How win rates and the reward model's accuracy change from the smallest size to the largest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from eval.scores import START
from reports.pooled_rates import gain_of, win_rate_of
from reports.results import Interval, RunResult
from reports.sizes import parameters_of

FEWEST_SIZES = 4  # three points leave a line one degree of freedom: t is 12.7 there, 4.3 with two


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How a number changes from the smallest size to the largest."""

    title: str
    is_difference: bool
    is_of_trained_rate: bool
    """Whether it is the win rate of the trained policy, which the page is about."""
    smallest: Interval | None
    """The mean, and the lowest and highest end of the seeds' own intervals."""
    largest: Interval | None
    rising_steps: int
    steps: int
    per_tenfold: Interval | None
    """The change for ten times the parameters, by a straight line; None for too few sizes."""
    r_squared: float | None

    @property
    def are_apart(self) -> bool | None:
        """Whether the ranges of the two sizes do not overlap; None if one is missing."""
        if self.smallest is None or self.largest is None:
            return None
        return self.is_higher or self.is_lower

    @property
    def is_higher(self) -> bool:
        """Whether the largest size lies above the smallest, beyond both ranges."""
        if self.smallest is None or self.largest is None:
            return False
        return self.largest.low > self.smallest.high

    @property
    def is_lower(self) -> bool:
        """Whether the largest size lies below the smallest, beyond both ranges."""
        if self.smallest is None or self.largest is None:
            return False
        return self.largest.high < self.smallest.low


def fit(parameters: Sequence[float], means: Sequence[float]) -> tuple[Interval, float] | None:
    """Return the slope of `y = a + b log10(parameters)` through the sizes' means, and R².

    b has Student's 95% interval with (sizes - 2) degrees of freedom: a size is one point, however
    many seeds it has, because seeds of one size say nothing about the form over sizes. None for
    fewer than FEWEST_SIZES different sizes, and for equal means. Ordinary least squares by
    statsmodels.
    """
    import statsmodels.api

    x = np.log10(np.array(parameters, dtype=float))
    if len(set(x)) < FEWEST_SIZES or len(set(means)) == 1:
        return None
    line = statsmodels.api.OLS(np.array(means), statsmodels.api.add_constant(x)).fit()
    low, high = line.conf_int()[1]
    slope = Interval(estimate=float(line.params[1]), low=float(low), high=float(high))
    return slope, float(line.rsquared)


def growth(groups: Mapping[str, Sequence[RunResult]]) -> list[Growth]:
    """Return how rates and the reward model's accuracy change with size; none for one size."""
    if len(groups) < 2:
        return []
    first = next(iter(groups.values()))[0]
    trained = first.policies[first.trained].title
    rows = [
        _growth_row(
            groups,
            title=f"{trained} win rate",
            value=lambda run: win_rate_of(run, run.trained),
            is_of_trained_rate=True,
        ),
        _growth_row(groups, title="SFT win rate", value=lambda run: win_rate_of(run, START)),
        _growth_row(groups, title=f"{trained} minus SFT", value=gain_of, is_difference=True),
        _growth_row(groups, title="Reward model accuracy", value=_reward_accuracy),
    ]
    return [row for row in rows if row is not None]


def _reward_accuracy(run: RunResult) -> Interval | None:
    return run.training.reward_accuracy if run.training else None


def _growth_row(
    groups: Mapping[str, Sequence[RunResult]],
    title: str,
    value: Callable[[RunResult], Interval | None],
    is_difference: bool = False,
    is_of_trained_rate: bool = False,
) -> Growth | None:
    """Return a row; None if a size has no seed with the number."""
    intervals = [[value(run) for run in runs] for runs in groups.values()]
    means = []
    for seeds in intervals:
        estimates = [seed.estimate for seed in seeds if seed is not None]
        if not estimates:
            return None
        means.append(fmean(estimates))
    parameters = [parameters_of(runs[0]) for runs in groups.values()]
    rounded = [round(mean, 3) for mean in means]
    steps = [later - earlier for earlier, later in pairwise(rounded)]
    line = fit(parameters, means)
    return Growth(
        title=title,
        is_difference=is_difference,
        is_of_trained_rate=is_of_trained_rate,
        smallest=_range_of_intervals(intervals[0]),
        largest=_range_of_intervals(intervals[-1]),
        rising_steps=sum(step > 0 for step in steps),
        steps=len(steps),
        per_tenfold=line[0] if line else None,
        r_squared=line[1] if line else None,
    )


def _range_of_intervals(seeds: Sequence[Interval | None]) -> Interval | None:
    """Return the mean and the ends of all intervals; None if a seed has no number."""
    intervals = [seed for seed in seeds if seed is not None]
    if len(intervals) < len(seeds):
        return None
    return Interval(
        estimate=fmean(seed.estimate for seed in intervals),
        low=min(seed.low for seed in intervals),
        high=max(seed.high for seed in intervals),
    )
