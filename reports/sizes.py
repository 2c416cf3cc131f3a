"""What is measured at each size. A size is a run: one base model, one or several seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from eval.stats.hypothesis_tests import p_of_seeds
from reports.failed_seeds import FailedSeed, failed_seeds
from reports.formats import parameter_count
from reports.pooled_rates import Outcome, Pooled, gain_of, outcome_of, pool
from reports.provenance import shown
from reports.results import Interval, PolicyResult, RunResult, title_of
from stages.config.errors import UserError
from stages.config.identity import NEUTRAL_MEMORY_FIELDS
from stages.config.stages import POLICY_STAGES

# The settings that may differ between sizes: the base model, and how batches are cut.
FREE_SETTINGS = frozenset(
    {
        "base.checkpoint",
        "base.hidden_size",
        "base.num_layers",
        "base.num_heads",
        *(f"memory.{name}" for name in NEUTRAL_MEMORY_FIELDS),
    }
)


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
    seeds: int
    """The seeds that have the policy."""
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
    gain_p_value: float | None
    """Of the gain, by a t test over seeds without correction; None for one seed."""
    failed: tuple[FailedSeed, ...]
    checked_seeds: int
    """The seeds for which it can be said whether they failed."""
    seeds: tuple[SeedResult, ...]
    training: TrainingMeasures
    texts: tuple[TextMeasures, ...]

    def rates_of(self, policy: str) -> list[float]:
        """Return the win rate of each seed that has one."""
        rates = [seed.win_rates.get(policy) for seed in self.seeds]
        return [rate.estimate for rate in rates if rate is not None]


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
    trained = [name for name in POLICY_STAGES if name in names]
    policies = [*trained, *sorted(set(names) - set(trained))]
    gains = [gain for run in runs if (gain := gain_of(run)) is not None]
    return SizeResult(
        label=label,
        name=runs[0].name,
        preset=runs[0].preset,
        parameters=parameters_of(runs[0]),
        policies={policy: _policy_at_size(policy, runs) for policy in policies},
        gain=pool(gains, low=-1.0, high=1.0),
        gain_p_value=p_of_seeds([gain.estimate for gain in gains]) if len(gains) > 1 else None,
        failed=tuple(failed_seeds(runs)),
        checked_seeds=len(gains),
        seeds=tuple(_seed_result(run) for run in runs),
        training=_training_measures(runs),
        texts=tuple(_text_measures(policy, runs) for policy in policies),
    )


def _policy_at_size(policy: str, runs: Sequence[RunResult]) -> PolicyAtSize:
    results = [run.policies[policy] for run in runs if policy in run.policies]
    rates = [result.win_rate for result in results if result.win_rate is not None]
    length_models = [
        result.at_equal_length
        for result in results
        if result.at_equal_length is not None and result.at_equal_length.rate is not None
    ]
    estimates = [rate.estimate for rate in rates]
    return PolicyAtSize(
        name=policy,
        title=results[0].title,
        win_rate=pool(rates),
        at_equal_length=pool([model.rate for model in length_models if model.rate is not None]),
        is_extrapolated=any(model.is_extrapolated for model in length_models),
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
        seeds=len(results),
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
