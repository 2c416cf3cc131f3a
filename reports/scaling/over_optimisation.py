"""Over-optimisation: the proxy rose while the win rate or the gold score fell."""

from dataclasses import dataclass

import pandas as pd

RULE = (
    "A seed is over-optimised if its reward model gives PPO's summaries a higher mean score than"
    " SFT's, while the 95% interval of PPO's win rate less SFT's, or of the gold score's gain, lies"
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
    found = []
    for row in frame.to_dict("records"):
        gain = row["ppo/score"] - row["sft/score"]
        win_rate_fell = row["difference_high"] < 0  # False where there is no number
        gold_fell = row["gold_gain/high"] < 0
        if gain > 0 and (win_rate_fell or gold_fell):
            one = OverOptimised(
                name=row["name"],
                seed=row["seed"],
                kl=row["kl"],
                proxy_gain=gain,
                win_rate_fell=bool(win_rate_fell),
                gold_fell=bool(gold_fell),
            )
            found.append(one)
    return found
