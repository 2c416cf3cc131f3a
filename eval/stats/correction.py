"""The win rate that remains after correcting for a judge's known errors.

A judge's sensitivity and specificity are measured on labeled pairs. On our summaries they may
differ, because different policies wrote them. So the interval of a corrected rate allows for a
stated shift between labeled and judged texts. Errors are also measured for each family of policies,
and the shift is at least as large as the difference between families. Differences between two
policies are not corrected: a shared calibration can reverse their sign (arXiv 2605.06939).

Labeled pairs are a frame with the columns `label` (whether it prefers the summary), `answer` (how
far the judge prefers it, in [0, 1]), `post` (a number; pairs about one post are one cluster) and
`family` (of the policies that wrote the pair).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.stats.intervals import (
    TAILS,
    Floats,
    Interval,
    Posts,
    as_plain,
    clustered_share,
    resampled_totals,
    sums_by_post,
)
from eval.stats.simple_judges import agreements

# If sensitivity + specificity - 1 is smaller than this, the judge's rate is meaningless.
LEAST_SKILL = 0.05
# The least shift of sensitivity and specificity between labeled pairs and our summaries. It is an
# assumption, stated on every page: labeled pairs cannot tell how the judge errs elsewhere.
SHIFT = 0.10
# With fewer labels of a kind, a family's sensitivity or specificity does not affect the shift.
FEWEST_OF_FAMILY = 50


@dataclass(frozen=True, kw_only=True)
class Corrected(Interval):
    """A corrected rate, and the shift that its interval allows for, in [0, 1]."""

    shift: float


def family_of(policies: Iterable[str], reference: str) -> str:
    """The family of the policies that wrote a pair; the reference belongs to none.

    It is `ppo` for a policy that PPO trained, and otherwise the letters with which the name begins
    (`sup` for `sup4_6b_t0.7`). A pair of two families has both names.
    """
    families = set()
    for policy in policies:
        if policy == reference:
            continue
        letters = re.match(r"[A-Za-z]+", policy)
        if "ppo" in policy.lower():
            families.add("ppo")
        elif letters:
            families.add(letters[0].lower())
        else:
            families.add(policy)
    return " and ".join(sorted(families))


def agreement(pairs: pd.DataFrame) -> Interval | None:
    """How far the judge agrees with the labels, in [0, 1]; None without pairs."""
    agreed = agreements(pairs["label"].to_numpy(), pairs["answer"].to_numpy(float))
    return clustered_share(agreed, pairs["post"].to_numpy())


def sensitivity(pairs: pd.DataFrame) -> Interval | None:
    """Agreement on the pairs whose label prefers the summary."""
    return agreement(pairs[pairs["label"]])


def specificity(pairs: pd.DataFrame) -> Interval | None:
    """Agreement on the pairs whose label prefers the other text."""
    return agreement(pairs[~pairs["label"]])


def errors_by_family(pairs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """For each family the number of `pairs`, its `sensitivity` and its `specificity`.

    A share without labels of its kind is None.
    """
    return {
        str(family): {
            "pairs": len(of_family),
            "sensitivity": as_plain(sensitivity(of_family)),
            "specificity": as_plain(specificity(of_family)),
        }
        for family, of_family in pairs.groupby("family")
    }


def shift_of(pairs: pd.DataFrame) -> float:
    """The shift that corrected rates allow for: `SHIFT`, or more if families differ by more.

    It is at least the largest distance between a family's sensitivity or specificity and that of
    all pairs. Families with fewer than `FEWEST_OF_FAMILY` labels of a kind do not count.
    """
    shift = SHIFT
    for label in (True, False):
        of_label = pairs[pairs["label"] == label]
        overall = agreement(of_label)
        for _, of_family in of_label.groupby("family"):
            share = agreement(of_family)
            if share and overall and len(of_family) >= FEWEST_OF_FAMILY:
                shift = max(shift, abs(share.estimate - overall.estimate))
    return shift


def corrected_rate(
    scores: Floats, pairs: pd.DataFrame, shift: float, posts: Posts | None = None
) -> Corrected | None:
    """The win rate implied by the mean of `scores` and the judge's errors, within [0, 1].

    `(p + specificity - 1) / skill`, where p is the mean of `scores`, each about one of `posts`, and
    skill is sensitivity + specificity - 1. The interval is a bootstrap over both samples, in which
    the pairs of one post are drawn together. It is `shift / skill` wider on each side: that is how
    far the rate moves if sensitivity and specificity on the judged texts differ from those on the
    labeled pairs by up to `shift`, in the direction that matters most (sensitivity up and
    specificity down lower it).

    None if the allowance alone would span every rate, if the judge is hardly better than chance
    (skill below `LEAST_SKILL`), or if one kind of label is missing.
    Source: Rogan and Gladen 1978; for LLM judges Lee et al. 2025, arXiv 2511.21140; the allowance
    is the identification region of misclassification rates with known bounds (Molinari 2008).
    """
    pair_totals = _totals_by_post(pairs)
    totals = pair_totals.sum(axis=0, keepdims=True)
    # NaN fails this comparison, too: then a kind of label is missing.
    has_skill = _skill(totals)[0] >= max(LEAST_SKILL, 2 * shift)
    if not has_skill:
        return None
    [estimate] = _rogan_gladen(np.array([scores.mean()]), totals, shift=0.0)

    sums, sizes = sums_by_post(scores, posts)
    resampled_scores = resampled_totals(np.column_stack([sums, sizes]))
    rates = resampled_scores[:, 0] / resampled_scores[:, 1]
    # Another seed, because the labeled pairs are another sample.
    resampled_pairs = resampled_totals(pair_totals, seed=1)
    lowest = _rogan_gladen(rates, resampled_pairs, shift=-shift)
    highest = _rogan_gladen(rates, resampled_pairs, shift=shift)

    # If the judge is not better than chance in a resample, every rate is possible.
    low = np.quantile(np.nan_to_num(lowest, nan=0.0), TAILS[0])
    high = np.quantile(np.nan_to_num(highest, nan=1.0), TAILS[1])
    return Corrected(
        estimate=float(estimate),
        low=float(low),
        high=float(high),
        posts=len(scores),
        shift=shift,
    )


def _totals_by_post(pairs: pd.DataFrame) -> Floats:
    """[posts, 4]: labels for the summary, agreement with them, labels against it, agreement."""
    labels = pairs["label"].to_numpy()
    answers = pairs["answer"].to_numpy(float)
    posts = pairs["post"].to_numpy()
    columns = [
        sums_by_post(labels, posts)[0],
        sums_by_post(labels * answers, posts)[0],
        sums_by_post(~labels, posts)[0],
        sums_by_post(~labels * (1 - answers), posts)[0],
    ]
    return np.column_stack(columns)


def _skill(totals: Floats) -> Floats:
    """Sensitivity + specificity - 1 [n] from totals [n, 4]; NaN if a kind of label is missing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        skill: Floats = totals[:, 1] / totals[:, 0] + totals[:, 3] / totals[:, 2] - 1
    return skill


def _rogan_gladen(rates: Floats, totals: Floats, shift: float) -> Floats:
    """Corrected rates [n] from rates [n] and totals [n, 4]; NaN if the judge has no skill.

    `shift` is added to specificity and subtracted from sensitivity, so the skill stays the same.
    """
    skill = _skill(totals)
    with np.errstate(divide="ignore", invalid="ignore"):
        specificities = totals[:, 3] / totals[:, 2]
        corrected = (rates + specificities + shift - 1) / skill
    clipped: Floats = np.where(skill >= LEAST_SKILL, np.clip(corrected, 0, 1), np.nan)
    return clipped
