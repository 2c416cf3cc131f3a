"""The numbers of the page about sizes: rows by seed, means over seeds, fits, verdicts.

A fit is a straight line over the logarithm of parameters, where points can carry one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np
import pandas as pd

from eval.stats.formulas import TAILS, Z
from reports.parts.collect import Record, numbers_of, policies_of
from reports.parts.sentences import NO_GUESS
from reports.parts.words import Row, direction, side
from stages.config.checks import UserError
from stages.config.stages import POLICY_STAGES

Interval = tuple[float, float, float]
"""An estimate with its lower and upper bound."""
LEAST_SIZES = 4  # three points leave a line one degree of freedom: t is 12.7 there, and 4.3 here


def fit(parameters: Sequence[float], means: Sequence[float]) -> tuple[Interval, float] | None:
    """`y = a + b log10(parameters)` through the means of the sizes: b, and R². None for fewer than
    LEAST_SIZES, or where a mean is missing.

    b with Student's 95% interval, sizes - 2 degrees of freedom: a size is one point, however many
    seeds it has, because seeds of one size say nothing about the form over sizes.
    Source: ordinary least squares by statsmodels.
    """
    import statsmodels.api

    x, y = np.log10(np.array(parameters, dtype=float)), np.array(means, dtype=float)
    if len(set(x)) < LEAST_SIZES or not np.isfinite(y).all():
        return None
    line = statsmodels.api.OLS(y, statsmodels.api.add_constant(x)).fit()
    low, high = map(float, line.conf_int()[1])
    return (float(line.params[1]), low, high), float(line.rsquared)


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """A mean over seeds with its 95% interval."""

    estimate: float
    low: float
    high: float
    seeds: int


def pool(values: Sequence[float], intervals: Sequence[tuple[float, float]]) -> Pooled | None:
    """The mean over seeds; `intervals` are the seeds' own 95% intervals over posts. None for none.

    `error^2 = s^2 / k + p^2`: s the standard deviation of the k seeds, p the mean of their standard
    errors over posts. All seeds are judged on the same posts, so averaging seeds does not average
    the posts away, and p is not divided by k. s holds a part of p, so the sum is rather too wide.
    The interval is Student's with `error^4 / ((s^2 / k)^2 / (k - 1))` degrees of freedom, because
    posts are many; it is never narrower than that of the seeds alone, which has k - 1. With one
    seed it is the posts' alone. It is cut at 0 and at 1.
    Source: Satterthwaite 1946 for the degrees of freedom; variances of two crossed factors are
    added as in Owen 2007 (the pigeonhole bootstrap), which is conservative too.
    """
    from scipy.stats import t

    count = len(values)
    if not count:
        return None
    mean = float(np.mean(values))
    if count == 1:
        ((low, high),) = intervals
        return Pooled(estimate=mean, low=low, high=high, seeds=1)
    post_error = float(np.mean([(high - low) / (2 * Z) for low, high in intervals]))
    seed_error = float(np.std(values, ddof=1)) / sqrt(count)
    error = sqrt(seed_error**2 + post_error**2)
    freedom = error**4 * (count - 1) / seed_error**4 if seed_error > 0 else inf
    of_seeds = float(t.ppf(TAILS[1], count - 1)) * seed_error
    half = max(float(t.ppf(TAILS[1], freedom)) * error, of_seeds)
    return Pooled(estimate=mean, low=max(0.0, mean - half), high=min(1.0, mean + half), seeds=count)


RATES = ("/win_rate", "/low", "/high", "/controlled", "/rm_agrees")


def frame_of(records: Sequence[Record]) -> pd.DataFrame:
    """One row of numbers a run, with what only this page compares; a missing rate is nan.

    Raises UserError for a run without PPO.
    """
    without = [record.name for record in records if record.policy != "ppo"]
    if without:
        raise UserError(f"{without[0]} has no PPO: only its own page shows it")
    rows = [numbers_of(record) for record in records]
    frame = pd.DataFrame([{**numbers, **_as_numbers(numbers)} for numbers in rows])
    extra = pd.DataFrame([_more(record) for record in records], index=frame.index)
    return frame.join(extra.astype(float))


def _as_numbers(values: Row) -> dict[str, float]:
    lacking = (key for key, value in values.items() if value is None)
    return {key: nan for key in lacking if key.endswith(RATES) or "difference" in key}


def _more(record: Record) -> Row:
    written, judged = (record.results(stage) for stage in ("summaries", "win_rate"))
    gains = judged.get("scores", {}).get("gains", {}).get("ppo", {})
    length = record.results("rm").get("length")
    longer = length and length["longer"]["estimate"]
    numbers: Row = {"sft_loss": record.results("sft")["loss/validation"], "longer": longer}
    for policy in policies_of(record):
        numbers[f"{policy}/copied"] = written["policies"][policy]["copied_title_words"]
        at_length = judged["policies"][policy]["statistics"]["length_controlled"]
        numbers |= {f"{policy}/controlled_{end}": at_length[end] for end in ("low", "high")}
        numbers[f"{policy}/extrapolated"] = at_length["extrapolated"]
    gold = gains.get("gold") or {}
    return numbers | {"gold_gain/high": gold.get("high")}


def sizes(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The runs from the smallest model to the largest, each with its seeds in their order."""
    order = frame.sort_values(["parameters", "seed"], kind="stable")
    return [(str(name), seeds) for name, seeds in order.groupby("name", sort=False)]


def parameters_of(seeds: pd.DataFrame) -> float:
    """The parameters of the model of one size."""
    return float(seeds["parameters"].iloc[0])


def policies(frame: pd.DataFrame) -> list[str]:
    """The policies that any seed has, in the order in which they are shown."""
    there = {policy for policies_of_seed in frame["policies"] for policy in policies_of_seed}
    own = [policy for policy in POLICY_STAGES if policy in there]
    return own + sorted(there - set(own))


def given(seeds: pd.DataFrame, key: str) -> list[float]:
    """The numbers of the seeds that have one."""
    return seeds[key].dropna().astype(float).tolist() if key in seeds else []


# -- verdicts --------------------------------------------------------------------------------------

BEATS, DOES_NOT = "beats the references", "does NOT beat the references"
UNKNOWN = "inconclusive"
BEHIND = 0.10  # of the win rate: three half widths of an interval over 600 posts
RULE = (
    "A seed COLLAPSED if PPO's win rate lies below its own SFT's and the 95% interval of the"
    " difference, paired by post, leaves out 0. A seed FELL BEHIND if it did not collapse and its"
    f" win rate lies {100 * BEHIND:.0f} points or more below the median of the other seeds of its"
    " size."
)


def called_out(seeds: pd.DataFrame) -> pd.DataFrame:
    """The rows of the seeds of one size that collapsed or fell behind, with columns `collapsed` and
    `median`, the median win rate of the other seeds. A seed without a rate is not judged.

    Source: Huang et al. 2024 call two of four 1B seeds over-optimised, which end at 20 and 22 %
    where SFT has 33 %; the rule finds those two.
    """
    rates = seeds["ppo/win_rate"].astype(float)
    known = seeds.dropna(subset=["ppo/win_rate", "difference_high"]).sort_values("seed")
    medians = [rates.drop(index).median() for index in known.index]
    known = known.assign(median=medians, collapsed=known["difference_high"] < 0)
    return known[known["collapsed"] | (known["median"] - known["ppo/win_rate"] >= BEHIND)]


@dataclass(frozen=True, kw_only=True)
class SizeVerdict:
    """What is known of PPO at one size; None where no seed has a rate that may be given."""

    name: str
    parameters: float
    seeds: int
    """Those with a win rate that may be given."""
    known: int
    """Of which it is known whether they collapsed or fell behind."""
    win_rate: Pooled | None
    controlled: Pooled | None
    """At equal length."""
    extrapolated: bool
    """Whether in any of these seeds the model answers at equal length, and not the data."""
    called_out: pd.DataFrame

    @property
    def verdict(self) -> str:
        """Whether PPO beats the references."""
        return verdict_of(self.win_rate)


def pooled(seeds: pd.DataFrame, key: str, low: str, high: str) -> Pooled | None:
    """The mean over the seeds of one size of a column, whose intervals are two other columns."""
    if key not in seeds:
        return None
    rows = seeds.dropna(subset=[key, low, high])
    bounds = list(zip(rows[low].astype(float), rows[high].astype(float), strict=True))
    return pool([float(value) for value in rows[key]], bounds)


def verdict_of(interval: Pooled | None) -> str:
    """What a win rate says whose whole interval lies on one side of 50 %, or does not."""
    place = side(interval.low, interval.high, NO_GUESS) if interval else 0
    return {1: BEATS, -1: DOES_NOT, 0: UNKNOWN}[place]


def size_verdicts(frame: pd.DataFrame) -> list[SizeVerdict]:
    """One verdict a size, from the smallest to the largest, by the seeds that have a win rate: one
    with too many posts without a verdict is left out, and the page says so.
    """
    verdicts = []
    for name, seeds in sizes(frame):
        wins = pooled(seeds, "ppo/win_rate", "ppo/low", "ppo/high")
        keys = [f"ppo/controlled{end}" for end in ("", "_low", "_high")]
        verdicts.append(
            SizeVerdict(
                name=name,
                parameters=parameters_of(seeds),
                seeds=wins.seeds if wins else 0,
                known=len(seeds.dropna(subset=["ppo/win_rate", "difference_high"])),
                win_rate=wins,
                controlled=pooled(seeds, keys[0], keys[1], keys[2]),
                extrapolated=bool(seeds.dropna(subset=keys)["ppo/extrapolated"].any()),
                called_out=called_out(seeds),
            )
        )
    return verdicts


OVER_OPTIMISED_RULE = (
    "A seed is over-optimised if the 95% interval over posts of its reward model's mean score of"
    " PPO's summaries - SFT's lies above 0, while that of PPO's win rate - SFT's, or of the gold"
    " score's gain, lies below 0."
)


def over_optimised(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the seeds whose policy learned its reward model's mistakes.

    Source: Gao et al. 2022 (2210.10760); Huang et al. 2024 find it in two of four 1B seeds.
    """
    fell = (frame["difference_high"] < 0) | (frame["gold_gain/high"] < 0)  # no number: not below
    return frame[fell & (frame["score_gain"].map(direction) == "rose")]
