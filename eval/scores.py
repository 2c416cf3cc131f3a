"""Scores of posts, by a judge and by reward models, and a reward model's held-out accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eval.stats.intervals import (
    Floats,
    Posts,
    as_plain,
    clustered_share,
    mean_with_t_interval,
    post_numbers,
)
from eval.stats.reward_pairs import pair_accuracy, pair_statistics
from stages.runs.files import read_lines
from stages.runs.run import HELD_OUT_CNNDM, HELD_OUT_PAIRS

Scores = Mapping[str, float | None]
"""Post id -> score in [0, 1]; None if unjudged."""
ScoredRows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Policy -> rows with `id`, `score` and `reference_score`, which are None without a score."""
PostOf = Mapping[str, str] | None
"""Id -> the first id with the same text (`posts_by_text`); None: all posts differ."""
REFERENCE = "reference"
START = "sft"  # the policy from which the others start


def judged_posts(scores: Scores, post_of: PostOf) -> tuple[Floats, Posts]:
    """The scores of the judged ids, and the post of each, both [ids]."""
    judged = {post_id: score for post_id, score in scores.items() if score is not None}
    values = np.array(list(judged.values()), dtype=float)
    posts = [post_of.get(post_id, post_id) if post_of else post_id for post_id in judged]
    return values, post_numbers(posts)


def proxy_and_gold(proxy: ScoredRows, gold: ScoredRows, post_of: PostOf = None) -> dict[str, Any]:
    """Mean scores by the proxy (the run's own reward model) and by a gold reward model.

    If the proxy score rises while the gold score falls, the policy is over-optimized (Gao et al.
    2022, arXiv 2210.10760). Each scorer has its own unit and its own zero.

    `proxy` and `gold`: name -> mean with its interval, the reference first. `gains`: policy ->
    `proxy` and `gold`, the mean difference from SFT on the same posts. Texts without a score are
    left out. A mean without scores is None, and so is a gain on fewer than two posts.
    """
    proxy_scores = scores_by_name(proxy)
    gold_scores = scores_by_name(gold)
    gains = {}
    if START in gold:
        for policy in gold:
            if policy != START:
                gains[policy] = {
                    "proxy": gain(proxy_scores, policy, post_of),
                    "gold": gain(gold_scores, policy, post_of),
                }
    return {
        "proxy": {name: interval(scores, post_of) for name, scores in proxy_scores.items()},
        "gold": {name: interval(scores, post_of) for name, scores in gold_scores.items()},
        "gains": gains,
    }


def agreement(
    written: Sequence[Mapping[str, Any]], judged: Scores, post_of: PostOf = None
) -> dict[str, Any] | None:
    """How often a scorer prefers the same text as the judge, summary or reference.

    `written` are rows of one policy with `id`, `score` and `reference_score`; `judged` has the
    judge's scores. Only posts that the judge decided and whose two scores differ count; None if
    there are none.
    Source: Huang et al. 2024, detail 17 (agreement of the reward model with its judge).
    """
    agrees: dict[str, float] = {}
    for row in written:
        score = row.get("score")
        reference_score = row.get("reference_score")
        points = judged.get(row["id"])
        if score is None or reference_score is None or points is None:
            continue
        if score == reference_score or points == 0.5:
            continue
        scorer_prefers_summary = score > reference_score
        judge_prefers_summary = points > 0.5
        agrees[row["id"]] = float(scorer_prefers_summary == judge_prefers_summary)
    values, posts = judged_posts(agrees, post_of)
    return as_plain(clustered_share(values, posts))


def scores_by_name(rows: ScoredRows) -> dict[str, dict[str, float]]:
    """Policy, or `reference` for the references of all policies -> post id -> score."""
    scores: dict[str, dict[str, float]] = {REFERENCE: {}}
    for policy, rows_of_policy in rows.items():
        scores[policy] = {}
        for row in rows_of_policy:
            if row.get("score") is not None:
                scores[policy][row["id"]] = row["score"]
            if row.get("reference_score") is not None:
                scores[REFERENCE][row["id"]] = row["reference_score"]
    return scores


def gain(
    scores: Mapping[str, Mapping[str, float]], policy: str, post_of: PostOf = None
) -> dict[str, Any] | None:
    """The mean of a policy's score minus SFT's, over the posts for which both have one."""
    trained = scores.get(policy, {})
    start = scores.get(START, {})
    differences = {
        post_id: trained[post_id] - start[post_id] for post_id in trained if post_id in start
    }
    return mean_gain(differences, post_of)


def mean_gain(differences: Mapping[Any, float], post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean difference with its interval over posts; None for fewer than two posts."""
    mean = interval(differences, post_of)
    if mean is None or mean["posts"] < 2:
        return None
    return mean


def interval(scores: Mapping[Any, float], post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean score with its t interval over posts; None without scores."""
    if not scores:
        return None
    values, posts = judged_posts(scores, post_of)
    return asdict(mean_with_t_interval(values, posts))


def with_statistics(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A stage's results with `pair_statistics` of the held-out pairs in its folder, if any."""
    if not (folder / HELD_OUT_PAIRS).exists():
        return results
    articles = results["cnndm"]
    if articles is not None:
        articles = articles | pair_statistics(read_lines(folder / HELD_OUT_CNNDM))
    return results | pair_statistics(read_lines(folder / HELD_OUT_PAIRS)) | {"cnndm": articles}


def held_out_accuracy(folder: Path) -> dict[str, float]:
    """`pair_accuracy` of the held-out pairs in a stage's folder; empty if there are none."""
    path = folder / HELD_OUT_PAIRS
    if not path.exists():
        return {}
    return pair_accuracy(read_lines(path))
