"""Scores of posts, by a judge and by reward models; and what the latter say of held-out pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.stats.formulas import Floats, as_plain, clustered_share, mean_with_error, post_numbers
from eval.stats.reward_pairs import pair_accuracy, pair_statistics
from stages.runs.files import read_lines
from stages.runs.run import HELD_OUT_CNNDM, HELD_OUT_PAIRS

Scores = Mapping[str, float | None]
"""Post id to score in [0, 1], None where unjudged."""
ScoredRows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Policy -> rows with `id`, `score` and `reference_score`, None where there is no score."""
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
    2210.10760). Each has its own unit and its own zero.

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


def by_name(rows: ScoredRows) -> dict[str, dict[str, float]]:
    """Name -> post -> score; the references of all policies are one more name."""
    scores: dict[str, dict[str, float]] = {name: {} for name in (REFERENCE, *rows)}
    for policy, of_policy in rows.items():
        for row in of_policy:
            for name, key in ((policy, "score"), (REFERENCE, "reference_score")):
                if row.get(key) is not None:
                    scores[name][row["id"]] = row[key]
    return scores


def gain(
    scores: Mapping[str, Mapping[str, float]], policy: str, post_of: PostOf = None
) -> dict[str, Any] | None:
    """The mean of a policy's score minus SFT's, over the posts on which both have one."""
    trained, start = scores.get(policy, {}), scores.get(START, {})
    both = {post: score - start[post] for post, score in trained.items() if post in start}
    return mean_gain(both, post_of)


def mean_gain(differences: Mapping[Any, float], post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean of a difference an id, as plain data; None for one post, which has no spread."""
    mean = interval(differences, post_of)
    return mean if mean and mean["posts"] > 1 else None


def interval(values: Mapping[Any, float], post_of: PostOf = None) -> dict[str, Any] | None:
    """The mean of a value an id with its interval over posts; None where there is no value."""
    return asdict(mean_with_error(*judged_posts(values, post_of))) if values else None


def with_statistics(results: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A stage's results with `pair_statistics` of the rows in its folder, if it wrote such rows."""
    if not (folder / HELD_OUT_PAIRS).exists():
        return results
    articles = results["cnndm"]
    if articles is not None:
        articles = articles | pair_statistics(read_lines(folder / HELD_OUT_CNNDM))
    return results | pair_statistics(read_lines(folder / HELD_OUT_PAIRS)) | {"cnndm": articles}


def held_out_accuracy(folder: Path) -> dict[str, float]:
    """`pair_accuracy` of a stage's folder; empty if it wrote no such rows."""
    path = folder / HELD_OUT_PAIRS
    return pair_accuracy(read_lines(path)) if path.exists() else {}
