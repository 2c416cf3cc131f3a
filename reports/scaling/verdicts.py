"""Does PPO beat the references at a size?"""

from dataclasses import dataclass
from statistics import median

import pandas as pd

from reports.parts.sentences import NO_GUESS
from reports.parts.words import percent
from reports.scaling.fits import Pooled, given, pool, sizes

BEATS, DOES_NOT, UNKNOWN = "beats the references", "does not beat them", "inconclusive"
SHARES = (0.0, 1.0)


BEHIND = 0.10  # of the win rate: three half widths of an interval over 600 posts
RULE = (
    "A seed COLLAPSED if PPO's win rate lies below its own SFT's and the 95% interval of the"
    " difference, paired by post, leaves out 0. A seed FELL BEHIND if it did not collapse and its"
    f" win rate lies {100 * BEHIND:.0f} points or more below the median of the other seeds of its"
    " size."
)


@dataclass(frozen=True, kw_only=True)
class CalledOut:
    """A seed that nobody should miss."""

    seed: int
    collapsed: bool
    """Else it fell behind."""
    win_rate: float
    why: str


def called_out(seeds: pd.DataFrame) -> list[CalledOut]:
    """The seeds of one size that collapsed or fell behind; a seed without a rate is not judged.

    Source: Huang et al. 2024 call two of four 1B seeds over-optimised, which end at 20 and 22 %
    where SFT has 33 %; the rule finds those two.
    """
    seeds_called = []
    for row in seeds.sort_values("seed").to_dict("records"):
        rate, below = row["ppo/win_rate"], row["difference_high"]
        if rate != rate or below != below or rate is None:
            continue
        others = list(seeds.loc[seeds["seed"] != row["seed"], "ppo/win_rate"].dropna())
        gap = median(others) - rate if others else 0.0
        if below < 0:
            why = f"PPO {percent(rate)}, its own SFT {percent(row['sft/win_rate'])}"
        elif gap >= BEHIND:
            why = f"PPO {percent(rate)}, the median of the others {percent(median(others))}"
        else:
            continue
        seeds_called.append(
            CalledOut(seed=row["seed"], collapsed=below < 0, win_rate=rate, why=why)
        )
    return seeds_called


@dataclass(frozen=True, kw_only=True)
class SizeVerdict:
    """What is known of PPO at one size."""

    name: str
    parameters: float
    seeds: int
    verdict: str
    win_rate: Pooled | None
    """None if no seed has a rate that may be given."""
    controlled: Pooled | None
    """At equal length; None if no seed has one."""
    extrapolated: bool
    """Whether in any of these seeds the model answers at equal length, and not the data."""
    tokens: float
    reference_tokens: float
    called_out: tuple[CalledOut, ...]


def pooled(
    seeds: pd.DataFrame, key: str, low: str, high: str, limits: tuple[float, float] = SHARES
) -> Pooled | None:
    """The mean over the seeds of one size of a column, whose intervals are two other columns."""
    if key not in seeds:
        return None
    rows = seeds.dropna(subset=[key, low, high])
    bounds = list(zip(rows[low].astype(float), rows[high].astype(float), strict=True))
    return pool([float(value) for value in rows[key]], bounds, limits)


def verdict_of(interval: Pooled | None) -> str:
    """What a win rate says whose whole interval lies on one side of 50 %, or does not."""
    if interval is None:
        return UNKNOWN
    if interval.low > NO_GUESS:
        return BEATS
    return DOES_NOT if interval.high < NO_GUESS else UNKNOWN


def size_verdicts(frame: pd.DataFrame) -> list[SizeVerdict]:
    """One verdict a size, from the smallest to the largest.

    The win rate is that of the seeds that have one: a seed with too many posts without a verdict
    is left out, and the page says so.
    """
    verdicts = []
    for name, seeds in sizes(frame):
        wins = pooled(seeds, "ppo/win_rate", "ppo/low", "ppo/high")
        lengths = [given(seeds, key) for key in ("ppo/tokens", "reference/tokens")]
        keys = [f"ppo/controlled{end}" for end in ("", "_low", "_high")]
        verdicts.append(
            SizeVerdict(
                name=name,
                parameters=float(seeds["parameters"].iloc[0]),
                seeds=len(seeds),
                verdict=verdict_of(wins),
                win_rate=wins,
                controlled=pooled(seeds, keys[0], keys[1], keys[2]),
                extrapolated=bool(seeds.dropna(subset=keys)["ppo/extrapolated"].any()),
                tokens=sum(lengths[0]) / len(lengths[0]),
                reference_tokens=sum(lengths[1]) / len(lengths[1]),
                called_out=tuple(called_out(seeds)),
            )
        )
    return verdicts


OVER_OPTIMISED_RULE = (
    "A seed is over-optimised if its reward model gives PPO's summaries a higher mean score than"
    " SFT's, while the 95% interval of PPO's win rate - SFT's, or of the gold score's gain, lies"
    " below 0."
)


@dataclass(frozen=True, kw_only=True)
class OverOptimised:
    """A seed whose policy learned its reward model's mistakes."""

    name: str
    seed: int
    kl: float
    """Nats per episode at the end of PPO."""
    proxy_gain: float
    """By how much the reward model's mean score rose, reward units."""
    win_rate_fell: bool
    gold_fell: bool


def over_optimised(frame: pd.DataFrame) -> list[OverOptimised]:
    """The over-optimised seeds, in the order of the frame.

    Source: Gao et al. 2022 (2210.10760); Huang et al. 2024 find it in two of four 1B seeds.
    """
    bad_seeds = []
    for row in frame.to_dict("records"):
        gain = row["ppo/score"] - row["sft/score"]
        win_rate_fell = row["difference_high"] < 0  # False where there is no number
        gold_fell = row["gold_gain/high"] < 0
        if gain > 0 and (win_rate_fell or gold_fell):
            bad_seed = OverOptimised(
                name=row["name"],
                seed=row["seed"],
                kl=row["kl"],
                proxy_gain=gain,
                win_rate_fell=bool(win_rate_fell),
                gold_fell=bool(gold_fell),
            )
            bad_seeds.append(bad_seed)
    return bad_seeds
