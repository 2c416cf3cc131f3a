"""All systems of a run on the same posts: by one judge, by several side by side, by a panel.

What is counted here, `make leaderboard` and the page of given summaries show. Everything starts
from rows of `judgements.jsonl`; a system is what those rows call a policy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from math import copysign, inf
from typing import Any

import numpy as np

from eval.judges.protocol import Row
from eval.rates.formulas import (
    as_plain,
    clustered_share,
    mean_of_posts,
    post_numbers,
    sign_flip_p_value,
    two_sided,
)
from eval.rates.length_control import mean_words
from eval.rates.strengths import (
    Game,
    cohen_over_posts,
    fleiss_over_posts,
    holm,
    majority,
    strengths,
)
from eval.win_rate import (
    Scores,
    describe,
    judged_for_both,
    names_of_pair,
    paired_difference,
    post_scores,
    statistics_of,
)
from stages.settings.config import UserError
from stages.settings.judge import MOST_UNJUDGED

Texts = Mapping[str, Mapping[str, tuple[str, str]]]
"""System -> post id -> its summary and the reference."""
BASE = "the reference"


def standings(judgements: Sequence[Row], texts: Texts, pairs: Sequence[Row] = ()) -> dict[str, Any]:
    """What one judge says of all systems, on the posts that all of them have.

    `systems`: name -> what `win_rate` and `analyse` find, the mean `words`, the `strength`, and the
    p-value against the reference corrected after Holm for all systems, best first; a system
    without one usable verdict has `win_rate` None and no `holm`. `differences`: all pairs of
    systems, paired by post, with the p-value corrected after Holm. `left_out`: posts that some
    system lacks. With `pairs`, judgements on two systems, order, p-values and differences are those
    of the strengths, and `head_to_head` has the rate of each system against each other. A system
    without a finite strength keeps the p-value of its rate.
    """
    posts = set.intersection(*(set(of_posts) for of_posts in texts.values()))
    if not posts:
        raise UserError("no post was summarised by all systems: a leaderboard needs the same posts")
    rows = [row for row in judgements if row["id"] in posts]
    scores = post_scores(rows)
    direct = {
        names_of_pair(name): of_pair
        for name, of_pair in post_scores([row for row in pairs if row["id"] in posts]).items()
    }
    placed = strengths(_games({(name, BASE): scores[name] for name in scores} | direct), BASE)
    systems = {
        name: describe(scores[name])
        | {
            "statistics": statistics_of(name, rows, texts[name]),
            "words": mean_words(texts[name][post][0] for post in scores[name]),
            "strength": placed.get(name),
        }
        for name in scores
    }
    if pairs:
        for system in systems.values():
            if has_strength(system):
                system["p_value"] = two_sided(system["strength"], 0.0)
    rated = {name: row["p_value"] for name, row in systems.items() if row["p_value"] is not None}
    for name, corrected in zip(rated, holm(list(rated.values())), strict=True):
        systems[name]["holm"] = corrected
    met = head_to_head(list(systems), direct)
    worths = {name: _worth(systems[name], met[name], bool(pairs)) for name in systems}
    order = sorted(systems, key=lambda name: worths[name], reverse=True)
    given = [name for name in order if has_rate(systems[name])]
    all_posts = set().union(*(set(of_posts) for of_posts in texts.values()))
    return {
        "posts": len(posts),
        "left_out": len(all_posts - posts),
        "judgements": len(rows) + len(pairs),
        "with_pairs": bool(pairs),
        "systems": {name: systems[name] for name in order},
        "differences": of_strengths(given, placed, direct)
        if pairs
        else differences({name: scores[name] for name in given}),
        "head_to_head": head_to_head(order, direct),
        "reference_words": mean_words(next(iter(texts.values()))[post][1] for post in posts),
    }


def _worth(system: Row, met: Mapping[str, Row], by_strength: bool) -> tuple[float, float]:
    """What systems are ordered by: strength, where the rate decides of those that have none.

    Of several that won, or lost, everything, the mean rate against the others in `met` decides. One
    that ties with the reference on every post, such as a copy of it, stands where that does.
    """
    rate = system["win_rate"] or 0.0
    if not by_strength:
        return rate, rate
    if has_strength(system):
        return system["strength"]["estimate"], rate
    others = [seen["estimate"] for seen in met.values()]
    mean = float(np.mean(others)) if others else rate
    return copysign(inf, rate - 0.5) if rate != 0.5 else 0.0, mean


def has_strength(system: Row) -> bool:
    """Whether the system has a finite strength."""
    return system["strength"] is not None and system["strength"]["estimate"] is not None


def head_to_head(
    order: Sequence[str], direct: Mapping[tuple[str, str], Scores]
) -> dict[str, dict[str, Any]]:
    """For each system its rate against each other that it was compared with, with its interval."""
    rates: dict[str, dict[str, Any]] = {name: {} for name in order}
    for (first, second), of_pair in direct.items():
        scores = np.array([score for score in of_pair.values() if score is not None])
        for name, other, seen in ((first, second, scores), (second, first, 1 - scores)):
            if len(scores):
                rates[name][other] = asdict(mean_of_posts(seen, (0.0, 1.0)))
    return rates


def of_strengths(
    order: Sequence[str], placed: Mapping[str, Row], direct: Mapping[tuple[str, str], Scores]
) -> list[dict[str, Any]]:
    """The differences of the strengths of all pairs of systems, in logits, as `differences`.

    A pair without one, because a system won or lost everything, has its rate head to head above
    1/2 in the place of it (`by_rate`), with the p-value of a paired randomisation test; none where
    nobody compared the two.
    """
    pairs = []
    for first, second in combinations(order, 2):
        beyond = placed[first].get("beyond", {}).get(second)
        if beyond and beyond["estimate"] is not None:
            of_pair = beyond | {"p_value": two_sided(beyond, 0.0), "by_rate": False}
        else:
            of_pair = _by_rate(first, second, direct)
        if of_pair:
            pairs.append({"first": first, "second": second} | of_pair)
    return _corrected(pairs)


def _by_rate(first: str, second: str, direct: Mapping[tuple[str, str], Scores]) -> Row:
    """How far the rate of the first against the second lies above 1/2; empty without a verdict."""
    sides = direct.get((first, second), {}), direct.get((second, first), {})
    above, below = ([x - 0.5 for x in side.values() if x is not None] for side in sides)
    seen = np.array(above + [-x for x in below])
    if not len(seen):
        return {}
    p_value = sign_flip_p_value(seen)
    return asdict(mean_of_posts(seen, (-0.5, 0.5))) | {"p_value": p_value, "by_rate": True}


def has_rate(system: Row) -> bool:
    """Whether so few posts are unjudged that a rate may be given."""
    return bool(system["win_rate"] is not None and system["unjudged"] <= MOST_UNJUDGED)


def _games(scores: Mapping[tuple[str, str], Scores]) -> list[Game]:
    """The judged posts of all pairs of systems, or of a system and the reference."""
    return [
        Game(*names, post, score)
        for names, of_posts in scores.items()
        for post, score in of_posts.items()
        if score is not None
    ]


def differences(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """The difference of the rates of all pairs of systems on the same posts, `first - second`.

    `p_value` is that of a paired randomisation test, `holm` the same corrected for all of them.
    Two systems that no post has judged both have none.
    """
    return _corrected(
        [
            {"first": first, "second": second} | asdict(paired_difference(a, b))
            for (first, a), (second, b) in combinations(scores.items(), 2)
            if judged_for_both(a, b)
        ]
    )


def _corrected(pairs: Sequence[Row]) -> list[dict[str, Any]]:
    corrected = holm([pair["p_value"] for pair in pairs])
    return [pair | {"holm": p} for pair, p in zip(pairs, corrected, strict=True)]


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
        {"policy": policy, "id": post, "order": order, "verdict": majority(votes)}
        for (policy, post, order), votes in verdicts.items()
        if len(votes) == len(judged)
    ]


def agreement(judged: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """How far judges say the same of a post, after both orders: win, tie or loss.

    `pairs`: for each two judges the share (`clustered_share`), Cohen's kappa (bootstrap over
    posts), and on how many `summaries`; `fleiss`: of all together, on the `shared` summaries that
    all have judged. None where they share no judged post.
    """
    verdicts = {name: _verdicts_of_posts(rows) for name, rows in judged.items()}
    first, *others = verdicts.values()
    shared = [key for key in first if all(key in other for other in others)]
    answers = [[of_judge[key] for of_judge in verdicts.values()] for key in shared]
    return {
        "pairs": [_agreement(names, verdicts) for names in combinations(verdicts, 2)],
        "fleiss": as_plain(fleiss_over_posts(answers, [post for _, post in shared])),
        "shared": len(shared),
    }


def _verdicts_of_posts(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    return {
        (policy, post): "win" if score > 0.5 else "loss" if score < 0.5 else "tie"
        for policy, of_posts in post_scores(rows).items()
        for post, score in of_posts.items()
        if score is not None
    }


def _agreement(
    names: tuple[str, str], verdicts: Mapping[str, Mapping[tuple[str, str], str]]
) -> dict[str, Any]:
    a, b = (verdicts[name] for name in names)
    shared = [key for key in a if key in b]
    posts = [post for _, post in shared]
    same = np.array([a[key] == b[key] for key in shared], dtype=float)
    kappa = cohen_over_posts([a[key] for key in shared], [b[key] for key in shared], posts)
    return {
        "judges": list(names),
        "share": as_plain(clustered_share(same, post_numbers(posts))),
        "kappa": as_plain(kappa),
        "summaries": len(shared),
    }
