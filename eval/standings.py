"""All systems of a run on the same posts: by one judge, by several side by side, by a panel.

What is counted here, `make leaderboard` and the page of given summaries show. Everything starts
from rows of `judgements.jsonl`; a system is what those rows call a policy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np

from eval.judges.protocol import Row
from eval.rates.formulas import clustered_share
from eval.rates.length_control import word_count
from eval.rates.strengths import (
    Game,
    cohen_over_posts,
    fleiss_over_posts,
    holm,
    majority,
    strengths,
)
from eval.rates.table import MOST_UNJUDGED, analyse, verdict_table
from eval.win_rate import (
    Scores,
    describe,
    judged_for_both,
    names_of_pair,
    paired_difference,
    post_scores,
)
from stages.settings.config import UserError

Texts = Mapping[str, Mapping[str, tuple[str, str]]]
"""System -> post id -> its summary and the reference."""
BASE = "the reference"


def standings(judgements: Sequence[Row], texts: Texts, pairs: Sequence[Row] = ()) -> dict[str, Any]:
    """What one judge says of all systems, on the posts that all of them have.

    `systems`: name -> what `win_rate` and `analyse` find, the mean `words`, and the `strength`,
    best raw rate first; a system without one usable verdict has `win_rate` None. `differences`:
    each two systems, paired by post, with the p-value corrected after Holm. `left_out`: posts that
    some system lacks. `pairs` are judgements on two systems; strengths rest on them too.
    """
    posts = set.intersection(*(set(of_posts) for of_posts in texts.values()))
    if not posts:
        raise UserError("no post was summarised by all systems: a leaderboard needs the same posts")
    rows = [row for row in judgements if row["id"] in posts]
    scores = post_scores(rows)
    games = [*_games(scores), *_games_of_pairs(pairs, posts)]
    placed = strengths(games, BASE)
    systems = {
        name: _system(name, scores[name], [row for row in rows if row["policy"] == name], texts)
        | {"strength": placed.get(name)}
        for name in scores
    }
    order = sorted(systems, key=lambda name: -(systems[name]["win_rate"] or 0.0))
    all_posts = set().union(*(set(of_posts) for of_posts in texts.values()))
    return {
        "posts": len(posts),
        "left_out": len(all_posts - posts),
        "judgements": len(rows) + len(pairs),
        "with_pairs": bool(pairs),
        "systems": {name: systems[name] for name in order},
        "differences": differences({name: scores[name] for name in order if _given(systems[name])}),
        "reference_words": _mean_words(pair[1] for pair in _texts_on(texts, posts)),
    }


def _given(system: Row) -> bool:
    """Whether so few posts are unjudged that a rate may be given."""
    return bool(system["win_rate"] is not None and system["unjudged"] <= MOST_UNJUDGED)


def _system(name: str, scores: Scores, rows: Sequence[Row], texts: Texts) -> dict[str, Any]:
    rates = describe(scores)
    words = _mean_words(texts[name][post][0] for post in scores)
    return rates | {"statistics": analyse(verdict_table(rows, texts[name])), "words": words}


def _texts_on(texts: Texts, posts: set[str]) -> list[tuple[str, str]]:
    first = next(iter(texts.values()))
    return [pair for post, pair in first.items() if post in posts]


def _mean_words(found: Iterable[str]) -> float:
    return float(np.mean([word_count(text) for text in found]))


def _games(scores: Mapping[str, Scores]) -> list[Game]:
    """What was said of each system and the reference."""
    return [
        Game(name, BASE, post, score)
        for name, of_posts in scores.items()
        for post, score in of_posts.items()
        if score is not None
    ]


def _games_of_pairs(pairs: Sequence[Row], posts: set[str]) -> list[Game]:
    kept = [row for row in pairs if row["id"] in posts]
    return [
        Game(*names_of_pair(name), post, score)
        for name, of_posts in post_scores(kept).items()
        for post, score in of_posts.items()
        if score is not None
    ]


def differences(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """The difference of each two systems' rates on the same posts, `first` less `second`.

    `p_value` is that of a paired randomisation test, `holm` the same corrected for all of them.
    Two systems that no post has judged both have none.
    """
    found: list[dict[str, Any]] = []
    for first, second in combinations(scores, 2):
        a, b = scores[first], scores[second]
        if judged_for_both(a, b):
            found.append({"first": first, "second": second} | asdict(paired_difference(a, b)))
    corrected = holm([one["p_value"] for one in found])
    return [one | {"holm": p} for one, p in zip(found, corrected, strict=True)]


def panel(judged: Sequence[Sequence[Row]]) -> list[Row]:
    """The verdicts of a panel: what more than half of the judges say, order by order.

    Questions that one of the judges was not asked are left out.
    """
    verdicts: dict[tuple[str, str, str], list[str]] = {}
    for rows in judged:
        for row in rows:
            key = row["policy"], row["id"], row["order"]
            verdicts.setdefault(key, []).append(row["verdict"])
    return [
        {"policy": policy, "id": post, "order": order, "verdict": majority(said)}
        for (policy, post, order), said in verdicts.items()
        if len(said) == len(judged)
    ]


def agreement(judged: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """How far judges say the same of a post, after both orders: win, tie or loss.

    `pairs`: for each two judges the share with Wilson's interval (clustered by post), Cohen's kappa
    (bootstrap over posts), and on how many `summaries`; `fleiss`: of all together, on the `shared`
    summaries that all have judged. None where they share no judged post.
    """
    said = {name: _verdicts_of_posts(rows) for name, rows in judged.items()}
    shared = [key for key in next(iter(said.values())) if all(key in one for one in said.values())]
    answers = [[one[key] for one in said.values()] for key in shared]
    together = fleiss_over_posts(answers, [post for _, post in shared])
    return {
        "pairs": [_agreement(a, b, said) for a, b in combinations(said, 2)],
        "fleiss": None if together is None else asdict(together),
        "shared": len(shared),
    }


def _verdicts_of_posts(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    return {
        (policy, post): "win" if score > 0.5 else "loss" if score < 0.5 else "tie"
        for policy, of_posts in post_scores(rows).items()
        for post, score in of_posts.items()
        if score is not None
    }


def _agreement(a: str, b: str, said: Mapping[str, Mapping[tuple[str, str], str]]) -> dict[str, Any]:
    shared = [key for key in said[a] if key in said[b]]
    numbers = {post: number for number, post in enumerate({post: 0 for _, post in shared})}
    same = np.array([said[a][key] == said[b][key] for key in shared], dtype=float)
    share = clustered_share(same, np.array([numbers[post] for _, post in shared], dtype=np.int64))
    answers = [[said[one][key] for key in shared] for one in (a, b)]
    kappa = cohen_over_posts(answers[0], answers[1], [post for _, post in shared])
    return {
        "judges": [a, b],
        "share": None if share is None else asdict(share),
        "kappa": None if kappa is None else asdict(kappa),
        "summaries": len(shared),
    }
