"""The rule by which a seed is called out: it collapsed, or fell behind the others of its size."""

from dataclasses import dataclass
from statistics import median

import pandas as pd

from reports.verdict import percent

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
    found = []
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
        found.append(CalledOut(seed=row["seed"], collapsed=below < 0, win_rate=rate, why=why))
    return found
