"""Mean scores of two reward models on the same summaries: PPO's own, the proxy, and a gold one.

If the proxy rises and the gold one falls, the policy is over-optimised (Gao et al. 2022,
2210.10760). The two have units of their own; in both, references of training posts average 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from eval.rates.formulas import as_plain, clustered_share, mean_with_error

REFERENCE = "reference"
START = "sft"  # the policy that the others started from
ScoredRows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Policy -> rows with `id`, `score` and `reference_score`, None where there is no score."""
Scores = dict[str, dict[str, float]]


def proxy_and_gold(proxy: ScoredRows, gold: ScoredRows) -> dict[str, Any]:
    """Means of both scorers with 95% intervals over posts, in each one's own unit.

    `proxy` and `gold`: name -> interval of the mean, the reference first. `gains`: policy ->
    `proxy` and `gold`, the mean difference from SFT on the same posts. A text without a score is
    left out; a mean without any score is None.
    """
    scorers = {"proxy": by_name(proxy), "gold": by_name(gold)}
    gains = {
        name: {scorer: gain(scores, name) for scorer, scores in scorers.items()}
        for name in gold
        if name != START and START in gold
    }
    means = {
        scorer: {name: interval(list(posts.values())) for name, posts in scores.items()}
        for scorer, scores in scorers.items()
    }
    return {**means, "gains": gains}


def agreement(
    written: Sequence[Mapping[str, Any]], judged: Mapping[str, float | None]
) -> dict[str, Any] | None:
    """How often a scorer prefers what the judge prefers, summary or reference, with 95% interval.

    `written`: rows of one policy with `id`, `score` and `reference_score`; `judged`: post to score
    in [0, 1]. Posts count that the judge decided and on which the two scores differ; None where
    there is none. Wilson's interval.
    Source: Huang et al. 2024, detail 17 (agreement of the reward model with its judge).
    """
    right = []
    for row in written:
        ours, theirs, points = row["score"], row["reference_score"], judged.get(row["id"])
        if ours is None or theirs is None or points is None or points == 0.5 or ours == theirs:
            continue
        right.append((ours > theirs) == (points > 0.5))
    share = clustered_share(np.array(right, dtype=float), np.arange(len(right)))
    return as_plain(share)


def by_name(rows: ScoredRows) -> Scores:
    """Name -> post -> score; the references of all policies are one more name."""
    scores: Scores = {name: {} for name in (REFERENCE, *rows)}
    for policy, of_policy in rows.items():
        for row in of_policy:
            for name, key in ((policy, "score"), (REFERENCE, "reference_score")):
                if row.get(key) is not None:
                    scores[name][row["id"]] = row[key]
    return scores


def gain(scores: Scores, policy: str) -> dict[str, Any] | None:
    """The mean of a policy's score minus SFT's, over the posts on which both have one."""
    ours, start = scores.get(policy, {}), scores.get(START, {})
    return interval([ours[post] - start[post] for post in ours if post in start])


def interval(values: Sequence[float]) -> dict[str, Any] | None:
    """A mean with its interval, as plain data; None where there is no value."""
    return asdict(mean_with_error(np.array(values, dtype=float))) if values else None
