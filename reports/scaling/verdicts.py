"""Does PPO beat the references at a size?"""

from dataclasses import dataclass

import pandas as pd

from reports.scaling.collapse import CalledOut, called_out
from reports.scaling.pooled import Pooled, pool
from reports.scaling.rows import given, sizes
from reports.verdict import NO_GUESS

BEATS, DOES_NOT, UNKNOWN = "beats the references", "does not beat them", "cannot be told"
SHARES = (0.0, 1.0)


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
    return pool([float(one) for one in rows[key]], bounds, limits)


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
    found = []
    for name, seeds in sizes(frame):
        wins = pooled(seeds, "ppo/win_rate", "ppo/low", "ppo/high")
        lengths = [given(seeds, key) for key in ("ppo/tokens", "reference/tokens")]
        keys = [f"ppo/controlled{end}" for end in ("", "_low", "_high")]
        found.append(
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
    return found
