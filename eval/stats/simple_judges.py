"""A judge compared with three simple ones that read nothing, on the same labeled pairs.

`majority` gives every pair the label that most pairs have, `longest` prefers the text with more
words, and `overlap` prefers the text that repeats more of the post's words. A judge that does not
clearly agree with the labels more often than each of them may be no better than one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.stats.intervals import (
    Floats,
    Interval,
    Posts,
    as_plain,
    bootstrap,
    clustered_share,
    mean_over_posts,
    post_numbers,
)
from eval.stats.length_control import word_count
from stages.data.text_metrics import words_of

Labels = NDArray[np.bool_]
Pair = Mapping[str, Any]
"""A labeled pair: `post`, `label`, `answer` in [0, 1], and what `measured` says about its texts."""


def measured(query: str, first: str, second: str) -> dict[str, list[int]]:
    """The features that the simple judges use, for the first text of a pair and for the second.

    `words`: number of words; `overlap`: number of distinct words that occur in the post.
    """
    words_of_post = set(words_of(query))
    texts = (first, second)
    return {
        "words": [word_count(text) for text in texts],
        "overlap": [len(set(words_of(text)) & words_of_post) for text in texts],
    }


def simple_answers(pairs: Sequence[Pair]) -> dict[str, Floats]:
    """The answers [pairs] of each simple judge; 1/2 if its two numbers are equal."""
    labels = np.array([pair["label"] for pair in pairs], dtype=float)
    most_common_label = float(labels.mean() > 0.5)
    return {
        "majority": np.full(len(pairs), most_common_label),
        "longest": _prefers_larger([pair["words"] for pair in pairs]),
        "overlap": _prefers_larger([pair["overlap"] for pair in pairs]),
    }


def _prefers_larger(numbers: Sequence[Sequence[int]]) -> Floats:
    """For each two numbers 1 if the first is larger, 1/2 if they are equal, otherwise 0."""
    first, second = np.array(numbers, dtype=float).T
    return (1 + np.sign(first - second)) / 2


def compare_with_simple_judges(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The judge's kappa, how often it prefers the longer text, and the simple judges.

    `pairs` are those that the judge has answered. `kappa_interval` is about the pairs that it
    decided; None without one. `prefers_longer`: of the decided pairs of unequal length, the share
    for the longer text, by the judge (`judge`) and by the labels of all pairs (`labels`). `simple`
    has the result of `compare_judges` for each simple judge. Intervals are 95% over posts.
    """
    if not pairs:
        return {"kappa_interval": None, "prefers_longer": None, "simple": {}}
    answers = np.array([pair["answer"] for pair in pairs], dtype=float)
    labels = np.array([pair["label"] for pair in pairs], dtype=bool)
    posts = post_numbers([pair["post"] for pair in pairs])
    simple = simple_answers(pairs)
    longer = simple["longest"]
    return {
        "kappa_interval": as_plain(kappa_interval(labels, answers, posts)),
        "prefers_longer": {
            "judge": _prefers_longer(answers, longer, posts),
            "labels": _prefers_longer(labels.astype(float), longer, posts),
        },
        "simple": {
            name: compare_judges(labels=labels, answers=answers, other_answers=other, posts=posts)
            for name, other in simple.items()
        },
    }


def compare_judges(
    *, labels: Labels, answers: Floats, other_answers: Floats, posts: Posts
) -> dict[str, Any]:
    """Another judge compared with this one, on the same pairs; all arguments are [pairs].

    `agreement` of the other judge with the labels, and its `kappa`; `difference`: by how much this
    judge agrees more often (paired); `same`: of the pairs that both decide, the share with the same
    verdict; `right`: of these verdicts, the share that the label agrees with. Intervals are 95%
    over posts; a value is None if there are no pairs for it.
    """
    agreed = agreements(labels, answers)
    other_agreed = agreements(labels, other_answers)
    both_decide = (answers != 0.5) & (other_answers != 0.5)
    is_same = (answers > 0.5) == (other_answers > 0.5)
    both_same = both_decide & is_same
    is_right = agreed > 0.5
    difference = mean_over_posts(agreed - other_agreed, limits=(-1.0, 1.0), posts=posts)
    same = clustered_share(is_same[both_decide].astype(float), posts[both_decide])
    right = clustered_share(is_right[both_same].astype(float), posts[both_same])
    return {
        "agreement": as_plain(clustered_share(other_agreed, posts)),
        "kappa": as_plain(kappa_interval(labels, other_answers, posts)),
        "difference": as_plain(difference),
        "same": as_plain(same),
        "right": as_plain(right),
    }


def _prefers_longer(answers: Floats, longer: Floats, posts: Posts) -> dict[str, Any] | None:
    """Of the decided answers about texts of unequal length, the share for the longer text."""
    is_decided = (longer != 0.5) & (answers != 0.5)
    prefers_longer = (answers == longer)[is_decided]
    return as_plain(clustered_share(prefers_longer.astype(float), posts[is_decided]))


def agreements(labels: Labels, answers: Floats) -> Floats:
    """[pairs]: how far each answer agrees with its label, in [0, 1]; a tie is 1/2."""
    return np.where(labels, answers, 1 - answers)


def kappa_interval(labels: Labels, answers: Floats, posts: Posts) -> Interval | None:
    """Cohen's kappa of the decided answers, with a bootstrap over posts; None if all are ties."""
    is_decided = answers != 0.5
    if not is_decided.any():
        return None

    # A table of two by two for each post: rows for the answer, columns for the label.
    row = answers[is_decided] < 0.5
    column = ~labels[is_decided]
    _, post = np.unique(posts[is_decided], return_inverse=True)
    tables = np.zeros((post.max() + 1, 2, 2))
    np.add.at(tables, (post, row.astype(int), column.astype(int)), 1)
    rows = tables.reshape(-1, 4)

    [estimate] = kappas(rows.sum(axis=0, keepdims=True))
    low, high = bootstrap(rows, kappas)
    return Interval(
        estimate=float(estimate),
        low=min(low, float(estimate)),
        high=max(high, float(estimate)),
        posts=len(rows),
    )


def kappas(totals: Floats) -> Floats:
    """Cohen's kappa [n] of n flat tables of two by two [n, 4]: `(po - pe) / (1 - pe)`.

    po is the observed agreement, and pe the agreement of independent answers with the same
    frequencies. Kappa is 0 if pe is 1. The bootstrap needs thousands of kappas, and statsmodels'
    `cohens_kappa` takes only one table per call.
    Source: Cohen 1960.
    """
    tables = totals.reshape(-1, 2, 2)
    n = totals.sum(axis=1)
    observed = np.trace(tables, axis1=1, axis2=2) / n
    expected = (tables.sum(axis=2) * tables.sum(axis=1)).sum(axis=1) / n**2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(expected < 1, (observed - expected) / (1 - expected), 0.0)
