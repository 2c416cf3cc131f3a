"""The win rate that a judge of known errors points to, with room for what is not known.

A judge's sensitivity and specificity are counted on labelled pairs. On our summaries they may be
others, because other policies wrote them. So a corrected rate allows for a stated shift between
labelled and judged texts. Errors are counted per family of policies too: the shift is at least as
large as the difference that families show. No difference of two policies is corrected: a
calibration that both share can turn its sign around (2605.06939).

Labelled pairs are a frame with the columns `label` (whether it prefers the summary), `answer` (how
far the judge does, in [0, 1]), `post` (a number: pairs of one post are one cluster), and `family`
(that of the policies that wrote the pair).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from eval.stats.formulas import (
    TAILS,
    Floats,
    Interval,
    Posts,
    as_plain,
    clustered_share,
    resampled_totals,
    totals_of,
)
from eval.stats.simple_judges import agreements

LEAST_SKILL = 0.05  # if sensitivity + specificity - 1 is below this, a judge's rate says nothing
# How far sensitivity and specificity on our summaries may be from those on labelled ones, at least.
# It is a choice, stated on every page: labelled pairs cannot say how the judge errs elsewhere.
SHIFT = 0.10
FEWEST_OF_FAMILY = 50  # labels of one kind, below which a family's share is not counted


@dataclass(frozen=True, kw_only=True)
class Corrected(Interval):
    """A corrected rate, and the shift that its interval allows for, in [0, 1]."""

    shift: float


def family_of(policies: Iterable[str], reference: str) -> str:
    """The family of a pair: `ppo` where PPO made a policy, else the letters that its name begins
    with (`sup` for `sup4_6b_t0.7`); of two families both. The reference has none.
    """
    families = set()
    for policy in policies:
        letters = re.match(r"[A-Za-z]+", policy)
        name = letters[0].lower() if letters else policy
        if policy != reference:
            families.add("ppo" if "ppo" in policy.lower() else name)
    return " and ".join(sorted(families))


def agreement(pairs: pd.DataFrame) -> Interval | None:
    """How far the judge agrees with the labels, in [0, 1]; None without a pair."""
    right = agreements(pairs["label"].to_numpy(), pairs["answer"].to_numpy(float))
    return clustered_share(right, pairs["post"].to_numpy())


def shares_of(known: pd.DataFrame) -> dict[str, Interval | None]:
    """Sensitivity and specificity: agreement where the label prefers the summary, and where not."""
    rows = {"sensitivity": known["label"], "specificity": ~known["label"]}
    return {kind: agreement(known[of_kind]) for kind, of_kind in rows.items()}


def errors_by_family(known: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Family -> `pairs`, and its `sensitivity` and `specificity`; None where no label counts."""
    return {
        str(family): {"pairs": len(part)}
        | {kind: as_plain(share) for kind, share in shares_of(part).items()}
        for family, part in known.groupby("family")
    }


def shift_of(known: pd.DataFrame) -> float:
    """The shift that a corrected rate allows for: `SHIFT`, or more where families show more.

    It is at least the largest distance of a family's sensitivity or specificity from that of all.
    Families with fewer labels of a kind than `FEWEST_OF_FAMILY` do not count.
    """
    of_all, shift = shares_of(known), SHIFT
    for _, part in known.groupby(["family", "label"]):
        kind = "sensitivity" if part["label"].iloc[0] else "specificity"
        share, whole = agreement(part), of_all[kind]
        if share and whole and len(part) >= FEWEST_OF_FAMILY:
            shift = max(shift, abs(share.estimate - whole.estimate))
    return shift


def corrected_rate(
    scores: Floats, known: pd.DataFrame, shift: float, posts: Posts = None
) -> Corrected | None:
    """The win rate that a judge of known errors points to, kept within [0, 1].

    `(p + specificity - 1) / skill`, skill being sensitivity + specificity - 1; p is the mean of
    `scores`, each about one of `posts`. The interval is a bootstrap over both samples (the pairs of
    one post are drawn together), and `shift / skill` wider on each side: so far the rate
    moves where sensitivity and specificity on the judged texts differ from the labelled ones by at
    most `shift`, in the direction that matters most (sensitivity up and specificity down lowers
    it). None where this allowance alone would span every rate, the judge is hardly better than
    chance (skill below `LEAST_SKILL`), or one kind of label is missing.
    Source: Rogan and Gladen 1978; for LLM judges Lee et al. 2511.21140; the allowance is the
    identification region of misclassification rates known within bounds (Molinari 2008).
    """
    rows = _totals(known)
    whole = rows.sum(axis=0, keepdims=True)
    if not _skill(whole)[0] >= max(LEAST_SKILL, 2 * shift):
        return None
    estimate = _rogan_gladen(np.array([scores.mean()]), whole, 0.0)
    means = np.divide(*resampled_totals(np.column_stack(totals_of(scores, posts))).T)
    totals = resampled_totals(rows, seed=1)
    # In a resample in which the judge is no better than chance, every rate is possible.
    low = np.nan_to_num(_rogan_gladen(means, totals, -shift), nan=0.0)
    high = np.nan_to_num(_rogan_gladen(means, totals, shift), nan=1.0)
    return Corrected(
        estimate=float(estimate[0]),
        low=float(np.quantile(low, TAILS[0])),
        high=float(np.quantile(high, TAILS[1])),
        posts=len(scores),
        shift=shift,
    )


def _totals(known: pd.DataFrame) -> Floats:
    """[posts, 4]: labels for the summary, agreement with them, labels against it, agreement."""
    labels, answers = known["label"].to_numpy(), known["answer"].to_numpy(float)
    columns = (labels, labels * answers, ~labels, ~labels * (1 - answers))
    return np.column_stack([totals_of(column, known["post"].to_numpy())[0] for column in columns])


def _skill(totals: Floats) -> Floats:
    """Sensitivity + specificity - 1 of sums [n, 4]; nan where a kind of label is missing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        skill: Floats = totals[:, 1] / totals[:, 0] + totals[:, 3] / totals[:, 2] - 1
    return skill


def _rogan_gladen(rates: Floats, totals: Floats, shift: float) -> Floats:
    """From rates [n] and sums [n, 4]; `shift` is added to specificity and taken off sensitivity.

    So skill stays as it is. nan where the judge is blind.
    """
    skill = _skill(totals)
    with np.errstate(divide="ignore", invalid="ignore"):
        corrected = (rates + totals[:, 3] / totals[:, 2] + shift - 1) / skill
    clipped: Floats = np.where(skill >= LEAST_SKILL, np.clip(corrected, 0, 1), np.nan)
    return clipped
