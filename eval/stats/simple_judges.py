"""A judge beside three that need no judgement, on the same labelled pairs.

`majority` gives every pair the label that most pairs have, `longest` prefers the text of more
words, `overlap` the one that repeats more of the post's words. A judge that does not clearly agree
with the labels more often than each of them may be no more than one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.stats.formulas import (
    Floats,
    Interval,
    as_plain,
    bootstrap,
    clustered_share,
    mean_of_posts,
)
from eval.stats.length_control import word_count
from stages.data.text_metrics import words_of

Pair = Mapping[str, Any]
"""A labelled pair: `post`, `label`, `answer` in [0, 1], and what `measured` says of its texts."""


def measured(query: str, first: str, second: str) -> dict[str, list[int]]:
    """What the simple judges know of a pair: words, and distinct words that the post has too.

    Each is a list of two numbers, of the first text and of the second.
    """
    post = set(words_of(query))
    texts = (first, second)
    return {
        "words": [word_count(text) for text in texts],
        "overlap": [len(set(words_of(text)) & post) for text in texts],
    }


def simple_answers(pairs: Sequence[Pair]) -> dict[str, Floats]:
    """The answers [pairs] of each simple judge; 1/2 where its two numbers are alike."""
    labels = np.array([pair["label"] for pair in pairs], dtype=float)
    answers = {"majority": np.full(len(pairs), float(labels.mean() > 0.5))}
    for name, key in (("longest", "words"), ("overlap", "overlap")):
        numbers = np.array([pair[key] for pair in pairs], dtype=float)
        answers[name] = (1 + np.sign(numbers[:, 0] - numbers[:, 1])) / 2
    return answers


def beside_simple_judges(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The judge's kappa, how often it prefers the longer text, and each simple judge beside it.

    `kappa_interval`: of the judge's decided pairs, None where there is none. `prefers_longer`: of
    the pairs of unequal length that were decided, the share for the longer text, by the judge
    (`judge`) and by the labels of all judged pairs (`labels`). `simple`: of each simple
    judge what `beside_judge` says. Intervals are 95% over posts. `pairs` are the judged ones.
    """
    if not pairs:
        return {"kappa_interval": None, "prefers_longer": None, "simple": {}}
    answers = np.array([pair["answer"] for pair in pairs], dtype=float)
    labels = np.array([pair["label"] for pair in pairs], dtype=bool)
    posts = np.unique([pair["post"] for pair in pairs], return_inverse=True)[1]
    rivals = simple_answers(pairs)
    simple = {name: beside_judge(labels, answers, rivals[name], posts) for name in rivals}
    longer = rivals["longest"]
    return {
        "kappa_interval": as_plain(kappa_interval(labels, answers, posts)),
        "prefers_longer": {
            "judge": _prefers_longer(answers, longer, posts),
            "labels": _prefers_longer(labels.astype(float), longer, posts),
        },
        "simple": simple,
    }


def beside_judge(
    labels: NDArray[np.bool_], answers: Floats, rivals: Floats, posts: NDArray[np.int64]
) -> dict[str, Any]:
    """What a rival's answers [pairs] are beside this judge's; None where nothing is known.

    Its `agreement` with the labels and its `kappa`; by how much this judge agrees more often
    (`difference`, paired); of the pairs that both decide the share with the `same` verdict, and of
    these verdicts the share that is `right`. Intervals are 95% over posts.
    """
    right, rival_right = agreements(labels, answers), agreements(labels, rivals)
    both = (answers != 0.5) & (rivals != 0.5)
    same = (answers > 0.5) == (rivals > 0.5)
    return {
        "agreement": as_plain(clustered_share(rival_right, posts)),
        "kappa": as_plain(kappa_interval(labels, rivals, posts)),
        "difference": as_plain(mean_of_posts(right - rival_right, (-1.0, 1.0), posts)),
        "same": as_plain(clustered_share(same[both] * 1.0, posts[both])),
        "right": as_plain(clustered_share((right > 0.5)[both & same] * 1.0, posts[both & same])),
    }


def _prefers_longer(
    answers: Floats, longer: Floats, posts: NDArray[np.int64]
) -> dict[str, Any] | None:
    """Of the answers and lengths that are no tie, the share for the longer text."""
    decided = (longer != 0.5) & (answers != 0.5)
    return as_plain(clustered_share((answers == longer)[decided].astype(float), posts[decided]))


def agreements(labels: NDArray[np.bool_], answers: Floats) -> Floats:
    """[pairs]: how far each answer agrees with its label; a tie is 1/2."""
    return np.where(labels, answers, 1 - answers)


def kappa_interval(
    labels: NDArray[np.bool_], answers: Floats, posts: NDArray[np.int64]
) -> Interval | None:
    """Cohen's kappa of the decided answers, with a bootstrap over posts; None where none decides.

    A judge that always says the same has kappa 0, by definition and in every resample.
    """
    decided = answers != 0.5
    if not decided.any():
        return None
    cells = np.eye(4)[2 * (answers[decided] < 0.5) + ~labels[decided]]
    _, of_posts = np.unique(posts[decided], return_inverse=True)
    sums = np.zeros((int(of_posts.max()) + 1, 4))
    np.add.at(sums, of_posts, cells)
    estimate = float(kappas(sums.sum(axis=0, keepdims=True))[0])
    low, high = bootstrap(sums, kappas)
    return Interval(
        estimate=estimate, low=min(low, estimate), high=max(high, estimate), posts=len(sums)
    )


def kappas(totals: Floats) -> Floats:
    """Cohen's kappa [n] of n tables of two by two, flat [n, 4]: `(po - pe) / (1 - pe)`.

    po is the share of equal pairs, pe what the two's own frequencies would give; 0 where chance
    alone agrees always.
    Source: Cohen 1960.
    """
    tables, n = totals.reshape(-1, 2, 2), totals.sum(axis=1)
    same = np.trace(tables, axis1=1, axis2=2) / n
    chance = (tables.sum(axis=2) * tables.sum(axis=1)).sum(axis=1) / n**2
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(chance < 1, (same - chance) / (1 - chance), 0.0)
