"""A judge beside three that need no judgement, on the same labelled pairs.

`majority` gives every pair the label that most pairs have, `longest` prefers the text of more
words, `overlap` the one that repeats more of the post's words. A judge that does not clearly agree
with the labels more often than each of them may be no more than one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.agreement import cohen_over_posts
from eval.rates.formulas import Floats, Interval, as_plain, clustered_share, mean_of_posts
from eval.rates.length_control import word_count
from stages.posts.text_metrics import words_of

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
    (`judge`) and by the labels of all judged pairs (`labels`). `simple`: for each simple judge its
    `agreement` and `kappa`, and by how much the judge agrees more often (`difference`, paired).
    Intervals are 95% over posts. `pairs` are the judged ones.
    """
    if not pairs:
        return {"kappa_interval": None, "prefers_longer": None, "simple": {}}
    answers = np.array([pair["answer"] for pair in pairs], dtype=float)
    labels = np.array([pair["label"] for pair in pairs], dtype=bool)
    posts = np.unique([pair["post"] for pair in pairs], return_inverse=True)[1]
    right, simple, others = agreements(labels, answers), {}, simple_answers(pairs)
    for name, of_simple in others.items():
        simply_right = agreements(labels, of_simple)
        simple[name] = {
            "agreement": as_plain(clustered_share(simply_right, posts)),
            "kappa": as_plain(kappa_interval(labels, of_simple, posts)),
            "difference": as_plain(paired_difference(right - simply_right, posts)),
        }
    longer = others["longest"]
    return {
        "kappa_interval": as_plain(kappa_interval(labels, answers, posts)),
        "prefers_longer": {
            "judge": _prefers_longer(answers, longer, posts),
            "labels": _prefers_longer(labels.astype(float), longer, posts),
        },
        "simple": simple,
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


def paired_difference(differences: Floats, posts: NDArray[np.int64]) -> Interval:
    """The mean of one difference in [-1, 1] a pair, with the pairs of a post drawn together."""
    return mean_of_posts(differences, (-1.0, 1.0), posts)


def kappa_interval(
    labels: NDArray[np.bool_], answers: Floats, posts: NDArray[np.int64]
) -> Interval | None:
    """Cohen's kappa of the decided answers, with a bootstrap over posts; None where none decides.

    A judge that always says the same has kappa 0, by definition and in every resample.
    """
    decided = answers != 0.5
    if not decided.any():
        return None
    answer_names, label_names = (
        np.where(for_first, "first", "second").tolist()
        for for_first in (answers[decided] > 0.5, labels[decided])
    )
    kappa = cohen_over_posts(answer_names, label_names, posts[decided])
    none = Interval(estimate=0.0, low=0.0, high=0.0, posts=len(np.unique(posts[decided])))
    return kappa or none
