"""The range to which `ppo.bound_values` squashes the critic's outputs: found once, then logged.

The first update finds it, and every update logs it. So a resumed stage reads it from metrics.jsonl,
exactly, and all processes have the same one. `bound_values` in `stages/functional.py` is the
formula; `Episodes.values_of` applies it to the values of a rollout and to those of an optimizer
step.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator

from stages.config.errors import UserError
from stages.config.ppo import PolicyGradient, Ppo
from stages.rl.episodes import Episodes, ValueRange
from stages.rl.networks import Origins
from stages.runs.files import read_lines

E = TypeVar("E", bound=Episodes)


def logged_range(settings: PolicyGradient, metrics_file: Path, update: int) -> ValueRange | None:
    """The range that the updates before this one have logged; None without them or without bounds.

    Updates are counted from 0.
    """
    if update == 0 or not isinstance(settings, Ppo) or not settings.bound_values:
        return None
    logged = next(row for row in read_lines(metrics_file) if row["step"] == update)
    return ValueRange(low=logged["val/value_low"], high=logged["val/value_high"])


def find_range(
    accelerator: Accelerator, episodes: Episodes, origins: Origins, ppo: Ppo
) -> ValueRange:
    """The range of the scores that enter the rewards.

    With `score_shaping=preference` it is known: 0 to 1. Otherwise it reaches from the lowest to the
    highest score of the first update's responses, on all devices, and of the references that
    normalization has scored. With `eos_trick=replace` it also contains the penalty, whether or not
    a response has got it.

    The KL penalty has no part in it, as in BPCO, which has none in its rewards: in the first update
    the KL is 0, and how large it will be is not known. Raises UserError if all scores are equal.
    """
    scores = accelerator.gather(episodes.rewarded_scores)
    bounds = [scores.min().item(), scores.max().item()]
    if ppo.score_shaping == "preference":
        bounds += [0.0, 1.0]
    else:
        bounds += origins.reference_scores
    if ppo.eos_trick == "replace":
        bounds.append(ppo.missing_eos_penalty)

    low = min(bounds)
    high = max(bounds)
    if low == high:
        raise UserError(
            f"ppo.bound_values needs scores that differ, and all of the first update are {low:g}: "
            "set ppo.bound_values=false, or look at the reward model"
        )
    return ValueRange(low=low, high=high)


def in_range(episodes: E, value_range: ValueRange) -> E:
    """The episodes with the critic's outputs bounded to this range.

    Raises ValueError if they have no values.
    """
    if episodes.values is None:
        raise ValueError("these episodes have no critic's values to bound")
    bounded = replace(episodes, value_range=value_range)
    return replace(bounded, values=bounded.values_of(episodes.values))
