"""Scores of posts: a judge's in [0, 1], and those of reward models, PPO's own and a gold one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import Floats, as_plain, clustered_share, mean_with_error, post_numbers

Scores = Mapping[str, float | None]
"""Post id to score in [0, 1], None where unjudged."""
ScoredRows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Policy -> rows with `id`, `score` and `reference_score`, None where there is no score."""
Scored = dict[str, dict[str, float]]
PostOf = Mapping[str, str] | None
"""Id -> the first id with the same text (`posts_by_text`); None: every id has its own."""
REFERENCE = "reference"
START = "sft"  # the policy that the others started from


def judged_posts(scores: Scores, post_of: PostOf) -> tuple[Floats, NDArray[np.int64]]:
    """The scores of the judged posts and which post each is about, both [posts]."""
    judged = {name: score for name, score in scores.items() if score is not None}
    numbers = post_numbers([(post_of or {}).get(name, name) for name in judged])
    return np.array([*judged.values()], dtype=float), numbers


def proxy_and_gold(proxy: ScoredRows, gold: ScoredRows, post_of: PostOf = None) -> dict[str, Any]:
    """Means of PPO's own reward model, the proxy, and a gold one, with 95% intervals over posts.

    If the proxy rises and the gold one falls, the policy is over-optimised (Gao et al. 2022,
    2210.10760). Each has its own unit, and of a reward model references of training posts average
    0; the rule of the built-in world has another zero.

    `proxy` and `gold`: name -> interval of the mean, the reference first. `gains`: policy ->
    `proxy` and `gold`, the mean difference from SFT on the same posts. A text without a score is
    left out; a mean without any score is None, and so is a gain on fewer than two posts.
    """
    scorers = {"proxy": by_name(proxy), "gold": by_name(gold)}
    gains = {
        name: {scorer: gain(scores, name, post_of) for scorer, scores in scorers.items()}
        for name in gold
        if name != START and START in gold
    }
    means = {
        scorer: {name: interval(of_posts, post_of) for name, of_posts in scores.items()}
        for scorer, scores in scorers.items()
    }
    return {**means, "gains": gains}


def agreement(
    written: Sequence[Mapping[str, Any]], judged: Scores, post_of: PostOf = None
) -> dict[str, Any] | None:
    """How often a scorer prefers what the judge prefers, summary or reference, with 95% interval.

    `written`: rows of one policy with `id`, `score` and `reference_score`; `judged`: post to score
    in [0, 1]. Posts count that the judge decided and on which the two scores differ; None where
    there is none. Wilson's interval.
    Source: Huang et al. 2024, detail 17 (agreement of the reward model with its judge).
    """
    right: dict[str, float] = {}
    for row in written:
        own, reference = row.get("score"), row.get("reference_score")
        points = judged.get(row["id"])
        if own is None or reference is None or points is None or points == 0.5 or own == reference:
            continue
        right[row["id"]] = (own > reference) == (points > 0.5)
    return as_plain(clustered_share(*judged_posts(right, post_of)))


def by_name(rows: ScoredRows) -> Scored:
    """Name -> post -> score; the references of all policies are one more name."""
    scores: Scored = {name: {} for name in (REFERENCE, *rows)}
    for policy, of_policy in rows.items():
        for row in of_policy:
            for name, key in ((policy, "score"), (REFERENCE, "reference_score")):
                if row.get(key) is not None:
                    scores[name][row["id"]] = row[key]
    return scores


def gain(scores: Scored, policy: str, post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean of a policy's score minus SFT's, over the posts on which both have one."""
    trained, start = scores.get(policy, {}), scores.get(START, {})
    return mean_gain(
        {post: trained[post] - start[post] for post in trained if post in start}, post_of
    )


def mean_gain(differences: Mapping[str, float], post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean of a difference an id, as plain data; None for one post, which has no spread."""
    mean = interval(differences, post_of)
    return mean if mean and mean["posts"] > 1 else None


def interval(values: Mapping[str, float], post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean of a value an id with its interval over posts; None where there is no value."""
    return asdict(mean_with_error(*judged_posts(values, post_of))) if values else None
