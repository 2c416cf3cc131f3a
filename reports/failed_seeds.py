"""Seeds that went wrong: they collapsed, fell behind the others, or over-optimized their reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from eval.scores import START
from reports.pooled_rates import gain_of, win_rate_of
from reports.results import RunResult, interval_from
from reports.scores import ROSE, direction, gold_scores

FAR_BELOW = 0.10  # of the win rate: three half-widths of an interval over 600 posts


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


def failed_seeds(runs: Sequence[RunResult]) -> list[FailedSeed]:
    """Return the seeds of one size that collapsed or fell behind. A seed without a rate is not.

    Collapsed: the win rate is below SFT's, and the 95% interval of the difference, paired by post,
    excludes 0. Fell behind: not collapsed, and the win rate is FAR_BELOW or more below the median
    of the other seeds.

    Source: Huang et al. 2024 call two of four 1B seeds over-optimized, which end at 20 and 22%
    where SFT has 33%; the rule finds those two.
    """
    rates = {run.seed: win_rate_of(run, run.trained) for run in runs}
    failed = []
    for run in runs:
        rate = rates[run.seed]
        sft = win_rate_of(run, START)
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
