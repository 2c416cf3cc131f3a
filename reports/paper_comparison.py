"""Our numbers next to the paper's, one by one: reproduced, higher, lower, or not comparable."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite, sqrt
from statistics import fmean, stdev, variance

from eval.stats.intervals import TAILS
from reports import paper
from reports.results import Interval, PolicyResult, RunResult
from stages.config.presets import preset_config
from stages.config.values import TYPES

SAME = 0.10  # of the paper's number
# The sections of settings that a number of the paper depends on; the judge is compared separately.
SECTIONS = ("base", "data", "optimizer", "sft", "rm", "ppo", "lora", "eval")
TOO_WIDE = "the interval of the difference is too wide"


class PaperVerdict(Enum):
    """What the difference between our mean and the paper's shows."""

    REPRODUCED = "reproduced"
    HIGHER = "higher"
    LOWER = "lower"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that the paper reports, and where a run has it."""

    key: str
    """Its name in paper.json."""
    value: Callable[[RunResult], float | None]
    is_share: bool
    digits: int = 1
    needs_judge: bool = False
    """Whether it only compares if the same judge judged."""


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """One number of the paper at one size, and our values."""

    key: str
    what: str
    is_share: bool
    digits: int
    verdict: PaperVerdict
    why: str
    """Why there is no other verdict; empty if it needs no explanation."""
    difference: Interval | None
    """Our mean minus the paper's; None if it has no bounds, or is not comparable."""
    our_values: tuple[float, ...]
    """By seed."""
    paper_values: tuple[float, ...]
    """By seed, or only the mean."""
    source: str


@dataclass(frozen=True, kw_only=True)
class PaperComparison:
    """One size next to the paper."""

    label: str
    """Our name of the size."""
    size: str
    """The paper's name of the size; empty if it has no such size."""
    why_not: str
    """Why nothing compares; empty if something does."""
    parameters: int
    numbers: tuple[PaperNumber, ...]

    def number(self, key: str) -> PaperNumber | None:
        """Return a number if it compares."""
        for entry in self.numbers:
            if entry.key == key and entry.verdict is not PaperVerdict.NOT_COMPARABLE:
                return entry
        return None


def _of_policy(
    policy: str, value: Callable[[PolicyResult], float | None]
) -> Callable[[RunResult], float | None]:
    """Return a function that reads a number of one policy of a run."""

    def read(run: RunResult) -> float | None:
        return value(run.policies[policy]) if policy in run.policies else None

    return read


def _win_rate(policy: PolicyResult) -> float | None:
    return policy.win_rate.estimate if policy.win_rate else None


def _agreement(policy: PolicyResult) -> float | None:
    return policy.reward_model_agrees.estimate if policy.reward_model_agrees else None


def _reward_accuracy(run: RunResult) -> float | None:
    accuracy = run.training.reward_accuracy if run.training else None
    return accuracy.estimate if accuracy else None


MEASURES = (
    Measure(
        key="sft_rougeL",
        value=_of_policy("sft", lambda policy: policy.rouge_l),
        is_share=False,
        digits=4,
    ),
    Measure(key="rm_accuracy", value=_reward_accuracy, is_share=True),
    Measure(
        key="sft_win_rate", value=_of_policy("sft", _win_rate), is_share=True, needs_judge=True
    ),
    Measure(
        key="ppo_win_rate", value=_of_policy("ppo", _win_rate), is_share=True, needs_judge=True
    ),
    Measure(
        key="sft_tokens", value=_of_policy("sft", lambda policy: policy.tokens), is_share=False
    ),
    Measure(
        key="ppo_tokens", value=_of_policy("ppo", lambda policy: policy.tokens), is_share=False
    ),
    Measure(
        key="rm_gpt_agreement",
        value=_of_policy("ppo", _agreement),
        is_share=True,
        needs_judge=True,
    ),
    Measure(
        key="ppo_kl", value=lambda run: run.training.kl if run.training else None, is_share=False
    ),
    Measure(
        key="ppo_scores",
        value=lambda run: run.training.score if run.training else None,
        is_share=False,
        digits=2,
    ),
)


def compare_with_paper(groups: Mapping[str, Sequence[RunResult]]) -> list[PaperComparison]:
    """Return every number of the paper next to ours; a size without any says why."""
    comparisons = []
    for label, runs in groups.items():
        why_not = why_not_comparable(runs)
        size = paper.size_of(runs[0].preset) or ""
        training = runs[0].training
        assert training is not None
        numbers = [] if why_not else [_number(size, measure, runs) for measure in MEASURES]
        comparison = PaperComparison(
            label=label,
            size=size,
            why_not=why_not,
            parameters=training.parameters,
            numbers=tuple(number for number in numbers if number is not None),
        )
        comparisons.append(comparison)
    return comparisons


def _number(size: str, measure: Measure, runs: Sequence[RunResult]) -> PaperNumber | None:
    """Return one number of the paper next to ours; None if no seed has it."""
    ours = [value for run in runs if (value := measure.value(run)) is not None]
    if not ours:
        return None
    numbers = paper.load()
    entry = numbers["sizes"][measure.key]
    paper_values = tuple(entry.get("seeds", {}).get(size, ()))
    mean = entry["mean"][size]
    deviation = entry.get("sd", {}).get(size)
    if paper_values:
        mean = fmean(paper_values)
        deviation = stdev(paper_values)

    why = other_judge(runs) if measure.needs_judge else ""
    difference = None
    verdict = PaperVerdict.NOT_COMPARABLE
    if not why:
        difference = welch(ours, mean=mean, deviation=deviation, count=len(numbers["seeds"]))
        verdict = verdict_on(difference, paper_mean=mean)
        why = TOO_WIDE if verdict is PaperVerdict.INCONCLUSIVE else ""
    return PaperNumber(
        key=measure.key,
        what=entry["what"],
        is_share=measure.is_share,
        digits=measure.digits,
        verdict=verdict,
        why=why,
        difference=difference if difference and isfinite(difference.low) else None,
        our_values=tuple(ours),
        paper_values=paper_values or (mean,),
        source=paper.source(entry),
    )


def welch(ours: Sequence[float], mean: float, deviation: float | None, count: int) -> Interval:
    """Return our mean minus the paper's, with Welch's 95% interval.

    `mean`, `deviation` (None: unknown, taken as 0) and `count` are the paper's. A single seed of
    ours is one more draw from the paper's spread: `mean -+ t(count - 1) s sqrt(1 + 1 / count)`.
    Without a spread on either side the interval has no bounds.

    Source: Welch 1947; the prediction interval of one further observation of a normal sample.
    """
    from scipy.stats import t

    middle = fmean(ours) - mean
    has_one_seed = len(ours) == 1
    if has_one_seed and (deviation is None or count < 2):
        return Interval(estimate=middle, low=-inf, high=inf)

    paper_variance = (deviation or 0.0) ** 2
    our_variance = paper_variance if has_one_seed else variance(ours)
    paper_square = paper_variance / count
    our_square = our_variance / len(ours)
    error = sqrt(paper_square + our_square)
    if has_one_seed:
        freedom: float = count - 1
    else:
        parts = our_square**2 / (len(ours) - 1)
        if paper_square:
            parts += paper_square**2 / (count - 1)
        freedom = error**4 / parts if parts else inf
    half = float(t.ppf(TAILS[1], freedom)) * error
    return Interval(estimate=middle, low=middle - half, high=middle + half)


def verdict_on(difference: Interval, paper_mean: float) -> PaperVerdict:
    """Return what an interval of a difference says, relative to the size of the paper's number.

    Source: equivalence by an interval within bounds, Schuirmann 1987, here with 95%.
    """
    margin = SAME * abs(paper_mean)
    if -margin <= difference.low and difference.high <= margin:
        return PaperVerdict.REPRODUCED
    if difference.is_above(0):
        return PaperVerdict.HIGHER
    if difference.is_below(0):
        return PaperVerdict.LOWER
    return PaperVerdict.INCONCLUSIVE


def why_not_comparable(runs: Sequence[RunResult]) -> str:
    """Return why the seeds of one size cannot be compared with the paper; empty if they can."""
    preset = runs[0].preset
    if not paper.is_comparable(preset):
        return "another model on other data"
    if paper.size_of(preset) is None:
        return "the paper has no such size or method"
    changed = sorted({setting for run in runs for setting in changed_settings(run)})
    return f"other settings than the paper's: {', '.join(changed)}" if changed else ""


def changed_settings(run: RunResult) -> list[str]:
    """Return the settings of a run that differ from its preset's, which are the paper's."""
    preset = preset_config(run.preset)
    changed = []
    for section in SECTIONS:
        for key, value in run.settings.get(section, {}).items():
            name = f"{section}.{key}"
            if name in TYPES and value != getattr(getattr(preset, section), key):
                changed.append(name)
    return changed


def other_judge(runs: Sequence[RunResult]) -> str:
    """Return why win rates do not compare with the paper's; empty if its judge judged."""
    wanted = paper.load()["judge"]
    names = {name for run in runs for name in run.judge.models or (run.judge.name,)}
    others = sorted(names - {wanted})
    return f"judged by {', '.join(others)}, the paper's judge was {wanted}" if others else ""
