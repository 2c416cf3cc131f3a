"""A judge beside three that need no judgement, on the same labelled pairs.

`majority` gives every pair the label that most pairs have, `longest` prefers the text of more
words, `overlap` the one that repeats more of the post's words. A judge that does not clearly agree
with the labels more often than each of them may be no more than one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import (
    Floats,
    Interval,
    bootstrap,
    clustered_share,
    cohens_kappa,
    mean_of_posts,
)
from eval.rates.length_control import word_count
from stages.posts.text_metrics import WORD

Pair = Mapping[str, Any]
"""A labelled pair: `post`, `label`, `answer` in [0, 1], and what `measured` says of its texts."""
Answers = Callable[[Sequence[Pair]], Floats]


def measured(query: str, first: str, second: str) -> dict[str, list[int]]:
    """What the simple judges know of a pair: words, and distinct words that the post has too.

    Each is a list of two numbers, of the first text and of the second.
    """
    post = set(WORD.findall(query.lower()))
    texts = (first, second)
    return {
        "words": [word_count(text) for text in texts],
        "overlap": [len(set(WORD.findall(text.lower())) & post) for text in texts],
    }


def majority_answers(pairs: Sequence[Pair]) -> Floats:
    """[pairs]: 1 everywhere if most labels prefer the first text, else 0."""
    labels = np.array([pair["label"] for pair in pairs], dtype=float)
    return np.full(len(pairs), float(labels.mean() > 0.5))


def answers_by(key: str) -> Answers:
    """The judge that prefers the text with the larger number under `key`; 1/2 if they are alike."""

    def answers(pairs: Sequence[Pair]) -> Floats:
        numbers = np.array([pair[key] for pair in pairs], dtype=float)
        return (1 + np.sign(numbers[:, 0] - numbers[:, 1])) / 2

    return answers


SIMPLE: dict[str, Answers] = {
    "majority": majority_answers,
    "longest": answers_by("words"),
    "overlap": answers_by("overlap"),
}
NAMES = {
    "majority": "the label that most pairs have",
    "longest": "the longest text",
    "overlap": "the text that repeats most of the post",
}


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
    longer = SIMPLE["longest"](pairs)
    unlike = longer != 0.5
    decided = unlike & (answers != 0.5)
    return {
        "kappa_interval": _plain(kappa_interval(labels, answers, posts)),
        "prefers_longer": {
            "judge": _share(answers == longer, decided, posts),
            "labels": _share(labels == (longer == 1), unlike, posts),
        },
        "simple": {
            name: _beside(labels, answers, other(pairs), posts) for name, other in SIMPLE.items()
        },
    }


def simple_judges_on(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """Each simple judge's `agreement`, `kappa` and `prefers_longer` on all labelled pairs."""
    labels = np.array([pair["label"] for pair in pairs], dtype=bool)
    posts = np.unique([pair["post"] for pair in pairs], return_inverse=True)[1]
    longer = SIMPLE["longest"](pairs)
    found = {}
    for name, simple in SIMPLE.items():
        answers = simple(pairs)
        decided = (longer != 0.5) & (answers != 0.5)
        found[name] = {
            "agreement": _plain(clustered_share(agreements(labels, answers), posts)),
            "kappa": _plain(kappa_interval(labels, answers, posts)),
            "prefers_longer": _share(answers == longer, decided, posts),
        }
    return found


def _beside(
    labels: NDArray[np.bool_], answers: Floats, other: Floats, posts: NDArray[np.int64]
) -> dict[str, Any]:
    theirs, ours = agreements(labels, other), agreements(labels, answers)
    return {
        "agreement": _plain(clustered_share(theirs, posts)),
        "kappa": _plain(kappa_interval(labels, other, posts)),
        "difference": _plain(paired_difference(ours - theirs, posts)),
    }


def agreements(labels: NDArray[np.bool_], answers: Floats) -> Floats:
    """[pairs]: how far each answer agrees with its label; a tie is 1/2."""
    return np.where(labels, answers, 1 - answers)


def paired_difference(differences: Floats, posts: NDArray[np.int64]) -> Interval:
    """The mean of one difference in [-1, 1] a pair, with the pairs of a post drawn together."""
    _, codes = np.unique(posts, return_inverse=True)
    sums: Floats = np.bincount(codes, differences).astype(float)
    counts: Floats = np.bincount(codes).astype(float)
    if (counts == 1).all():
        return mean_of_posts(sums, (-1.0, 1.0))
    rows = np.column_stack([sums, counts])
    low, high = bootstrap(rows, lambda totals: totals[:, 0] / totals[:, 1])
    mean = float(differences.mean())
    return Interval(estimate=mean, low=min(low, mean), high=max(high, mean), posts=len(counts))


def kappa_interval(
    labels: NDArray[np.bool_], answers: Floats, posts: NDArray[np.int64]
) -> Interval | None:
    """Cohen's kappa of the decided answers, with a bootstrap over posts; None where none decides.

    A judge that always says the same has kappa 0, by definition and in every resample.
    """
    decided = answers != 0.5
    if not decided.any():
        return None
    said, true = answers[decided] > 0.5, labels[decided]
    _, codes = np.unique(posts[decided], return_inverse=True)
    cells = (said & true, said & ~true, ~said & true, ~said & ~true)
    sums = [np.bincount(codes, cell.astype(float)) for cell in cells]
    rows: Floats = np.column_stack(sums).astype(float)
    estimate = cohens_kappa([str(one) for one in true], [str(one) for one in said]) or 0.0
    low, high = bootstrap(rows, kappas)
    return Interval(
        estimate=estimate, low=min(low, estimate), high=max(high, estimate), posts=len(rows)
    )


def kappas(totals: Floats) -> Floats:
    """Cohen's kappa [n] of tables [n, 4]: both yes, the judge alone, the label alone, both no.

    0 where chance alone agrees always.
    """
    both, judge, label, neither = totals.T
    n = totals.sum(axis=1)
    chance = ((both + judge) * (both + label) + (label + neither) * (judge + neither)) / n**2
    with np.errstate(divide="ignore", invalid="ignore"):
        found = ((both + neither) / n - chance) / (1 - chance)
    return np.where(chance < 1, found, 0.0)


def not_beaten(found: Mapping[str, Any]) -> list[str]:
    """What a judge does not clearly beat, in plain sentences; `found` as `beside_simple_judges`."""
    said = []
    for name, one in found["simple"].items():
        more = one["difference"]
        if more["low"] <= 0:
            points = ", ".join(f"{100 * more[key]:+.1f}" for key in ("low", "high"))
            said.append(
                f"it does not clearly agree more often than {NAMES[name]}"
                f" ({100 * more['estimate']:+.1f} points [{points}])"
            )
    kappa = found["kappa_interval"]
    if kappa is not None and kappa["low"] <= 0:
        bounds = f"[{kappa['low']:.2f}, {kappa['high']:.2f}]"
        what = (
            "may be 0" if kappa["high"] >= 0 else "is below 0: it says the opposite of the labels"
        )
        said.append(f"its Cohen's kappa, {kappa['estimate']:.2f} {bounds}, {what}")
    return said


def _share(
    agree: NDArray[np.bool_], counted: NDArray[np.bool_], posts: NDArray[np.int64]
) -> dict[str, Any] | None:
    return _plain(clustered_share(agree[counted].astype(float), posts[counted]))


def _plain(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)
