"""What the page about sizes reports: pooled rates, seeds that failed, growth, over-optimization.

A size is a run: one base model, trained with one or several seeds. Every seed is judged on the same
posts, so seeds and posts are two separate sources of uncertainty.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, median, stdev

import numpy as np

from eval.scores import START
from eval.stats.intervals import TAILS, Z, mean_of_seeds
from reports.formats import parameter_count
from reports.provenance import shown
from reports.results import Interval, PolicyResult, RunResult, interval_from, title_of
from reports.scores import ROSE, direction, gold_scores
from stages.config.checks import UserError
from stages.config.config import CUT_BATCHES
from stages.config.stages import POLICY_STAGES

EVEN = 0.5
FAR_BELOW = 0.10  # of the win rate: three half-widths of an interval over 600 posts
FEWEST_SIZES = 4  # three points leave a line one degree of freedom: t is 12.7 there, 4.3 with two

# The settings that may differ between sizes: the base model, and how batches are cut.
FREE_SETTINGS = frozenset(
    {
        "base.checkpoint",
        "base.hidden_size",
        "base.num_layers",
        "base.num_heads",
        *(f"memory.{name}" for name in CUT_BATCHES),
    }
)


class Outcome(Enum):
    """How a policy's pooled win rate compares with 50%, where it equals the references."""

    BEATS = "beats the references"
    LOSES = "does not reach the references"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """A mean over seeds with its 95% interval over seeds and posts."""

    interval: Interval
    seeds: int


@dataclass(frozen=True, kw_only=True)
class PolicyAtSize:
    """One policy at one size, over the seeds that have a win rate."""

    name: str
    title: str
    win_rate: Pooled | None
    """None if too many posts have no verdict in every seed."""
    at_equal_length: Pooled | None
    is_extrapolated: bool
    """Whether in any seed the rate at equal length comes from the model and not from the data."""
    over_seeds: Interval | None
    """The win rate with the t interval of the seeds only; None without any spread."""
    seed_deviation: float | None
    post_half_width: float | None
    """Half of a seed's own 95% interval over posts, on average."""

    @property
    def outcome(self) -> Outcome:
        """Whether the policy beats the references."""
        return outcome_of(self.win_rate)

    @property
    def outcome_at_equal_length(self) -> Outcome:
        """Whether it beats them at equal length."""
        return outcome_of(self.at_equal_length)


@dataclass(frozen=True, kw_only=True)
class FailedSeed:
    """A seed that collapsed below its SFT model, or fell behind the other seeds of its size."""

    seed: int
    has_collapsed: bool
    win_rate: float
    sft_win_rate: float
    median_of_others: float | None


@dataclass(frozen=True, kw_only=True)
class OverOptimizedSeed:
    """A seed whose policy learned the mistakes of its reward model."""

    size: str
    seed: int
    proxy_gain: float
    has_lower_win_rate: bool
    has_lower_gold_score: bool
    kl: float


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """The numbers of one seed, with intervals over posts or pairs."""

    seed: int
    win_rates: Mapping[str, Interval | None]
    """By policy."""
    gain: Interval | None
    """The trained policy's win rate minus SFT's."""
    kl: float
    tokens: float | None
    reward_accuracy: Interval | None


@dataclass(frozen=True, kw_only=True)
class SeedRange:
    """A mean over the seeds that have a number, with the lowest and the highest seed."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True, kw_only=True)
class TextMeasures:
    """What a policy of one size wrote."""

    title: str
    at_equal_length: SeedRange | None
    reward_model_agrees: SeedRange | None
    rouge_l: SeedRange | None
    tokens: SeedRange | None
    eos_rate: SeedRange | None
    score: SeedRange | None


@dataclass(frozen=True, kw_only=True)
class TrainingMeasures:
    """How training went at one size."""

    sft_loss: SeedRange | None
    """On held-out references, nats per token."""
    reward_accuracy: SeedRange | None
    longest_accuracy: SeedRange | None
    """How often the longer summary is the preferred one, on the same pairs."""
    kl: SeedRange | None
    score: SeedRange | None
    """The mean score of the samples at the end of training."""
    reference_tokens: SeedRange | None


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """One size: a run with all its finished seeds."""

    label: str
    """How the page names it: by its number of parameters."""
    name: str
    preset: str
    parameters: int
    policies: Mapping[str, PolicyAtSize]
    gain: Pooled | None
    """The trained policy's win rate minus SFT's, on the same posts."""
    failed: tuple[FailedSeed, ...]
    checked_seeds: int
    """The seeds for which it can be said whether they failed."""
    seeds: tuple[SeedResult, ...]
    training: TrainingMeasures
    texts: tuple[TextMeasures, ...]


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


# -- statistics ------------------------------------------------------------------------------------


def pool(seeds: Sequence[Interval], low: float = 0.0, high: float = 1.0) -> Pooled | None:
    """Return the mean over seeds with a 95% interval over seeds and posts; None without a seed.

    `seeds` are the seeds' own estimates with their 95% intervals over posts; the result is cut at
    `low` and `high`.

        error^2 = s^2 / k + p^2

    with s the standard deviation of the k seeds and p the mean of their standard errors over posts.
    All seeds are judged on the same posts, so averaging over seeds does not average the posts away,
    and p is not divided by k. As s contains a part of p, the sum is rather too wide. The interval
    is Student's, with error^4 / ((s^2 / k)^2 / (k - 1)) degrees of freedom, because the posts are
    many. It is never narrower than that of the seeds alone, which has k - 1 degrees of freedom. A
    single seed has the interval of its posts.

    Source: Satterthwaite 1946 for the degrees of freedom; adding the variances of two crossed
    factors is the conservative choice of Owen 2007 (the pigeonhole bootstrap).
    """
    from scipy.stats import t

    count = len(seeds)
    if not count:
        return None
    if count == 1:
        return Pooled(interval=seeds[0], seeds=1)
    estimates = [seed.estimate for seed in seeds]
    mean = fmean(estimates)
    post_error = fmean((seed.high - seed.low) / (2 * Z) for seed in seeds)
    seed_error = stdev(estimates) / sqrt(count)
    error = sqrt(seed_error**2 + post_error**2)
    freedom = error**4 * (count - 1) / seed_error**4 if seed_error > 0 else inf
    half_of_seeds = float(t.ppf(TAILS[1], count - 1)) * seed_error
    half = max(float(t.ppf(TAILS[1], freedom)) * error, half_of_seeds)
    interval = Interval(estimate=mean, low=max(low, mean - half), high=min(high, mean + half))
    return Pooled(interval=interval, seeds=count)


def outcome_of(rate: Pooled | None) -> Outcome:
    """Return what a win rate says: its whole interval has to be on one side of 50%."""
    if rate is None:
        return Outcome.INCONCLUSIVE
    if rate.interval.is_above(EVEN):
        return Outcome.BEATS
    return Outcome.LOSES if rate.interval.is_below(EVEN) else Outcome.INCONCLUSIVE


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


def failed_seeds(runs: Sequence[RunResult]) -> list[FailedSeed]:
    """Return the seeds of one size that collapsed or fell behind. A seed without a rate is not.

    Collapsed: the win rate is below SFT's, and the 95% interval of the difference, paired by post,
    excludes 0. Fell behind: not collapsed, and the win rate is FAR_BELOW or more below the median
    of the other seeds.

    Source: Huang et al. 2024 call two of four 1B seeds over-optimized, which end at 20 and 22%
    where SFT has 33%; the rule finds those two.
    """
    rates = {run.seed: _win_rate(run, run.trained) for run in runs}
    failed = []
    for run in runs:
        rate = rates[run.seed]
        sft = _win_rate(run, START)
        gain = gain_of(run)
        if rate is None or sft is None or gain is None:
            continue
        others = [
            other.estimate
            for seed, other in rates.items()
            if seed != run.seed and other is not None
        ]
        median_of_others = median(others) if others else None
        has_collapsed = gain.is_below(0)
        is_behind = median_of_others is not None and median_of_others - rate.estimate >= FAR_BELOW
        if has_collapsed or is_behind:
            failed.append(
                FailedSeed(
                    seed=run.seed,
                    has_collapsed=has_collapsed,
                    win_rate=rate.estimate,
                    sft_win_rate=sft.estimate,
                    median_of_others=median_of_others,
                )
            )
    return failed


def over_optimized_seed(run: RunResult, size: str) -> OverOptimizedSeed | None:
    """Return a seed whose proxy score rose while its win rate or gold score fell; else None.

    Each has to be shown by its 95% interval over posts, compared with SFT.
    Source: Gao et al. 2022 (2210.10760).
    """
    judged = run.stages["win_rate"].results["policies"][run.trained]
    proxy_gain = interval_from(judged["score_gain"])
    if proxy_gain is None or direction(proxy_gain) != ROSE:
        return None
    gain = gain_of(run)
    has_lower_win_rate = gain is not None and gain.is_below(0)
    has_lower_gold_score = False
    scores = gold_scores(run)
    for row in scores.rows if scores else ():
        if row.name == run.trained and row.gold_gain is not None:
            has_lower_gold_score = row.gold_gain.is_below(0)
    if not (has_lower_win_rate or has_lower_gold_score):
        return None
    assert run.training is not None
    return OverOptimizedSeed(
        size=size,
        seed=run.seed,
        proxy_gain=proxy_gain.estimate,
        has_lower_win_rate=has_lower_win_rate,
        has_lower_gold_score=has_lower_gold_score,
        kl=run.training.kl,
    )


# -- sizes -----------------------------------------------------------------------------------------


def runs_by_label(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return the seeds of each size under its label, from the smallest model to the largest.

    The label is the number of parameters, and the run's name if two sizes have the same number.
    Raises UserError for a run that trained nothing, and for runs of different algorithms.
    """
    for run in runs:
        if run.training is None:
            raise UserError(f"{run.name} judges what others made: only its own page shows it")
    trained = {run.trained: run.name for run in runs}
    if len(trained) > 1:
        names = ", ".join(f"{name} trained {title_of(policy)}" for policy, name in trained.items())
        raise UserError(f"sizes are compared for one algorithm, but {names}: change NAMES")

    by_name: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=lambda run: (parameters_of(run), run.name, run.seed)):
        by_name.setdefault(run.name, []).append(run)
    labels = {name: parameter_count(parameters_of(seeds[0])) for name, seeds in by_name.items()}
    groups = {}
    for name, seeds in by_name.items():
        label = labels[name]
        if list(labels.values()).count(label) > 1:
            label = f"{label} ({name})"
        groups[label] = seeds
    return groups


def parameters_of(run: RunResult) -> int:
    """Return the number of parameters of a run's model."""
    assert run.training is not None
    return run.training.parameters


def size_result(label: str, runs: Sequence[RunResult]) -> SizeResult:
    """Return what is known of one size from its seeds."""
    names = {name: None for run in runs for name in run.policies}
    ours = [name for name in POLICY_STAGES if name in names]
    policies = [*ours, *sorted(set(names) - set(ours))]
    gains = [gain for run in runs if (gain := gain_of(run)) is not None]
    return SizeResult(
        label=label,
        name=runs[0].name,
        preset=runs[0].preset,
        parameters=parameters_of(runs[0]),
        policies={policy: _policy_at_size(policy, runs) for policy in policies},
        gain=pool(gains, low=-1.0, high=1.0),
        failed=tuple(failed_seeds(runs)),
        checked_seeds=len(gains),
        seeds=tuple(_seed_result(run) for run in runs),
        training=_training_measures(runs),
        texts=tuple(_text_measures(policy, runs) for policy in policies),
    )


def gain_of(run: RunResult) -> Interval | None:
    """Return the trained policy's win rate minus SFT's; None if either has no rate."""
    difference = run.difference(run.trained, START)
    return difference.interval if difference else None


def _win_rate(run: RunResult, policy: str) -> Interval | None:
    return run.policies[policy].win_rate if policy in run.policies else None


def _policy_at_size(policy: str, runs: Sequence[RunResult]) -> PolicyAtSize:
    results = [run.policies[policy] for run in runs if policy in run.policies]
    rates = [result.win_rate for result in results if result.win_rate is not None]
    length_models = [
        result.at_equal_length
        for result in results
        if result.at_equal_length is not None and result.at_equal_length.rate is not None
    ]
    estimates = [rate.estimate for rate in rates]
    bounds = mean_of_seeds(estimates)
    over_seeds = None
    if bounds is not None:
        low = max(0.0, bounds[0])
        over_seeds = Interval(estimate=fmean(estimates), low=low, high=min(1.0, bounds[1]))
    return PolicyAtSize(
        name=policy,
        title=results[0].title,
        win_rate=pool(rates),
        at_equal_length=pool([model.rate for model in length_models if model.rate is not None]),
        is_extrapolated=any(model.is_extrapolated for model in length_models),
        over_seeds=over_seeds,
        seed_deviation=stdev(estimates) if len(estimates) > 1 else None,
        post_half_width=fmean((rate.high - rate.low) / 2 for rate in rates) if rates else None,
    )


def _seed_result(run: RunResult) -> SeedResult:
    assert run.training is not None
    assert run.main is not None
    return SeedResult(
        seed=run.seed,
        win_rates={name: policy.win_rate for name, policy in run.policies.items()},
        gain=gain_of(run),
        kl=run.training.kl,
        tokens=run.main.tokens,
        reward_accuracy=run.training.reward_accuracy,
    )


def seed_range(values: Sequence[float | None]) -> SeedRange | None:
    """Return the mean and the range of the seeds that have a number; None if no seed has one."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return SeedRange(mean=fmean(numbers), low=min(numbers), high=max(numbers), seeds=len(numbers))


def _training_measures(runs: Sequence[RunResult]) -> TrainingMeasures:
    trainings = [run.training for run in runs if run.training is not None]
    accuracies = [training.reward_accuracy for training in trainings]
    lengths = [run.stages["rm"].results.get("length") for run in runs]
    return TrainingMeasures(
        sft_loss=seed_range([run.stages["sft"].results["loss/validation"] for run in runs]),
        reward_accuracy=seed_range([_estimate(accuracy) for accuracy in accuracies]),
        longest_accuracy=seed_range(
            [length["longer"]["estimate"] if length else None for length in lengths]
        ),
        kl=seed_range([training.kl for training in trainings]),
        score=seed_range([training.score for training in trainings]),
        reference_tokens=seed_range([run.reference_tokens for run in runs]),
    )


def _text_measures(policy: str, runs: Sequence[RunResult]) -> TextMeasures:
    results = [run.policies[policy] for run in runs if policy in run.policies]
    at_length = [result.at_equal_length for result in results]
    return TextMeasures(
        title=results[0].title,
        at_equal_length=seed_range(
            [_estimate(model.rate) if model else None for model in at_length]
        ),
        reward_model_agrees=seed_range([_estimate(row.reward_model_agrees) for row in results]),
        rouge_l=seed_range([row.rouge_l for row in results]),
        tokens=seed_range([row.tokens for row in results]),
        eos_rate=seed_range([row.eos_rate for row in results]),
        score=seed_range([row.score for row in results]),
    )


def _estimate(interval: Interval | None) -> float | None:
    return None if interval is None else interval.estimate


# -- growth ----------------------------------------------------------------------------------------


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
            value=lambda run: _win_rate(run, run.trained),
            is_of_trained_rate=True,
        ),
        _growth_row(groups, title="SFT win rate", value=lambda run: _win_rate(run, START)),
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


# -- whether the sizes are alike -------------------------------------------------------------------


def differing_settings(runs: Sequence[RunResult]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, but should not, with their values.

    A section is compared between the runs that have it: an optional stage may be missing.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for section, fields in run.settings.items():
            for key, value in fields.items():
                name = f"{section}.{key}"
                if name not in FREE_SETTINGS:
                    values.setdefault(name, set()).add(shown(name, value))
    return {name: sorted(texts) for name, texts in values.items() if len(texts) > 1}


def have_same_seeds(groups: Mapping[str, Sequence[RunResult]]) -> bool:
    """Whether all sizes were run with the same seeds."""
    return len({frozenset(run.seed for run in runs) for runs in groups.values()}) == 1


def unjudged_policies(run: RunResult) -> list[PolicyResult]:
    """Return the policies of a run that have posts without a verdict."""
    return [policy for policy in run.policies.values() if policy.unjudged]
