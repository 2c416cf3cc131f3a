"""Win rates against the reference, with 95% intervals, from the judgements of a run.

    python -m eval.win_rate --preset tiny --seed 44413

A post scores 1, 1/2 or 0 in each order (policy, tie, reference) and the mean over the two orders:
a judge that contradicts itself has said tie. A post with an unjudged order is left out and
counted, never imputed; `worst_case` says how far the rate could move if it were. Differences
between policies are paired by post. Posts are resampled: see `eval.stats.formulas`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import pandas as pd

from eval.judges.protocol import VERDICTS
from eval.scores import (
    START,
    PostOf,
    ScoredRows,
    Scores,
    agreement,
    by_name,
    gain,
    interval,
    judged_posts,
    mean_gain,
    proxy_and_gold,
)
from eval.stats.formulas import Interval, mean_of_posts, sign_flip_p_value, totals_of
from eval.stats.table import POINTS, analyse, verdict_table
from stages.config.config import TRAINED, Config, UserError
from stages.config.judge import MOST_UNJUDGED
from stages.data.halves import in_half
from stages.data.text_metrics import first_ids, identical
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from stages.runs.run import open_stage, write_rows


@dataclass(frozen=True, kw_only=True)
class PairedInterval(Interval):
    """A difference on the same posts, with the p-value of there being none."""

    p_value: float


def measure_win_rates(config: Config) -> dict[str, Any]:
    """Write `post_scores.jsonl` and return the manifest's results; all rates lie in [0, 1].

    A policy without a verdict is a row without a rate, and two policies that no post has judged
    both have no difference. Raises UserError where judgements are missing, or none is usable.
    """
    with open_stage(config, "win_rate") as run:
        paths = sorted(run.require("summaries").glob("*.jsonl"))
        written = {path.stem: read_lines(path) for path in paths}
        post_of = posts_by_text(written)
        folder = run.require("judge")
        judgements = read_lines(folder / "judgements.jsonl")
        scores = post_scores(judgements)
        if not any(judged_for_both(of_posts, of_posts) for of_posts in scores.values()):
            problem = f"{folder}: no post has a verdict in both orders"
            mend = "see the replies in judgements.jsonl, correct the judge's settings"
            raise UserError(f"{problem}: {mend} and judge again")
        rows = [
            {"policy": policy, "id": post_id, "score": score}
            | ({} if post_of[post_id] == post_id else {"post": post_of[post_id]})
            for policy, of_posts in scores.items()
            for post_id, score in of_posts.items()
        ]
        write_rows(run, "post_scores.jsonl", rows)
        gold = folder / "gold_scores.jsonl"
        gold_rows = rows_by_policy(read_lines(gold)) if gold.exists() else {}
        judge = (read_manifest(folder) or {})["results"]["judge"]
        kept = [name for name in scores if config.kind == TRAINED and name.startswith("ppo-")]
        last = {name: of for name, of in scores.items() if name not in kept}
        last_gold = {name: of for name, of in gold_rows.items() if name not in kept}
        results = {
            "judge": judge,
            "posts": len({row["id"] for row in judgements}),
            "texts": len({post_of[row["id"]] for row in judgements}),
            **rates_of(written, judgements, last, post_of, judge["kind"]),
            **({"scores": proxy_and_gold(written, last_gold, post_of)} if gold_rows else {}),
        }
        if kept:
            by_gold = by_name(gold_rows) if judge["kind"] == "gold_reward_model" else {}
            of_training = {name: (by_gold or scores)[name] for name in (START, *kept, "ppo")}
            best = best_of_training(of_training, post_of)
            if best.pop("unjudged") <= MOST_UNJUDGED:
                results["best"] = {"by": "gold score" if by_gold else "win rate", **best}
        for name, row in results["policies"].items():
            row["identical"] = identical(written[name], config.data.prompt)
        run.finish(results)
    return results


def rates_of(
    written: ScoredRows,
    judgements: Sequence[dict[str, Any]],
    scores: Mapping[str, Scores],
    post_of: Mapping[str, str],
    judge_kind: str,
) -> dict[str, Any]:
    """`policies`: what `describe`, `analyse` and `of_reward_model` say; `differences`."""
    rows_of = rows_by_policy(judgements)
    texts = {
        name: {row["id"]: (row["summary"], row["reference"]) for row in rows}
        for name, rows in written.items()
    }
    policies = {
        name: {
            **describe(of_posts, post_of),
            "statistics": analyse(verdict_table(rows_of[name], texts[name], post_of)),
            **of_reward_model(name, written, of_posts, post_of, judge_kind),
        }
        for name, of_posts in scores.items()
    }
    differences = {
        pair_name(b, a): {
            **asdict(paired_difference(scores[b], scores[a], post_of)),
            "alike": alike(texts[b], texts[a]),
        }
        for a, b in combinations(scores, 2)
        if judged_for_both(scores[b], scores[a])
    }
    return {"policies": policies, "differences": differences}


def of_reward_model(
    policy: str, written: ScoredRows, judged: Scores, post_of: PostOf, judge_kind: str
) -> dict[str, Any]:
    """`rm_agrees`: the `agreement` of the run's reward model with the judge, None where it is the
    judge; `score_gain`: the `gain` of its score, None for SFT itself.
    """
    is_judge = judge_kind == "reward_model"
    return {
        "rm_agrees": None if is_judge else agreement(written[policy], judged, post_of),
        "score_gain": None if policy == START else gain(by_name(written), policy, post_of),
    }


def pair_name(first: str, second: str) -> str:
    """The name of two policies, such as `ppo-sft`; with spaces where a name has a hyphen itself."""
    return " - ".join((first, second)) if "-" in first + second else f"{first}-{second}"


def names_of_pair(name: str) -> tuple[str, str]:
    """The two policies that `pair_name` named; a policy's name holds no space."""
    first, _, second = name.partition(" - " if " - " in name else "-")
    return first, second


def rows_by_policy(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each policy, which their `policy` names."""
    policies: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        policies.setdefault(row["policy"], []).append(row)
    return policies


def posts_by_text(policies: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Id -> the first id with the same `query`, of the summaries of some policies."""
    posts = [(row["id"], row["query"]) for rows in policies.values() for row in rows]
    return dict(zip((name for name, _ in posts), first_ids(posts), strict=True))


def alike(a: Mapping[str, tuple[str, str]], b: Mapping[str, tuple[str, str]]) -> float:
    """The share of the posts of two policies on which both wrote the same, but for white space."""
    both = [(a[post][0].split(), b[post][0].split()) for post in a if post in b]
    return sum(first == second for first, second in both) / len(both)


def post_scores(judgements: Iterable[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """For each policy and post id the mean of both orders, None where one is unjudged.

    Raises UserError where a post lacks an order or has one twice.
    """
    verdicts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in judgements:
        verdicts.setdefault((row["policy"], row["id"]), []).append((row["order"], row["verdict"]))
    scores: dict[str, dict[str, float | None]] = {}
    for (policy, post_id), of_post in verdicts.items():
        orders = [order for order, _ in of_post]
        if sorted(orders) != sorted(VERDICTS):
            problem = f"post {post_id} of {policy} was judged in the orders {', '.join(orders)}"
            raise UserError(f"{problem}: one of each is needed")
        points = [POINTS[verdict] for _, verdict in of_post if verdict in POINTS]
        score = sum(points) / 2 if len(points) == 2 else None
        scores.setdefault(policy, {})[post_id] = score
    return scores


def judged_for_both(a: Scores, b: Scores) -> bool:
    """Whether any post has a verdict in both orders for both policies."""
    return any(score is not None and b.get(post) is not None for post, score in a.items())


def describe(scores: Scores, post_of: PostOf = None) -> dict[str, Any]:
    """One policy's row: its rate and interval, counts of posts, and how far to trust them.

    `wins`, `ties` and `losses` count judged posts with a score above, at and below 1/2;
    `unjudged` is a share of all posts; `worst_case` is the rate with every unjudged post lost, and
    won; `p_value` is that of a rate of 1/2. Rate, interval and p-value of no judged post are None.
    """
    values, posts = judged_posts(scores, post_of)
    unjudged = len(scores) - len(values)
    total, beyond = float(values.sum()), totals_of(values - 0.5, posts)[0]
    rate = asdict(win_rate(scores, post_of)) if len(values) else {}
    return {
        "win_rate": rate.get("estimate"),
        "low": rate.get("low"),
        "high": rate.get("high"),
        "posts": len(values),
        "wins": int((values > 0.5).sum()),
        "ties": int((values == 0.5).sum()),
        "losses": int((values < 0.5).sum()),
        "unjudged": unjudged / len(scores),
        "worst_case": [total / len(scores), (total + unjudged) / len(scores)],
        "p_value": sign_flip_p_value(beyond) if rate else None,
    }


def win_rate(scores: Scores, post_of: PostOf = None) -> Interval:
    """The mean score of the judged posts in [0, 1]. Raises UserError where no post is judged."""
    values, posts = judged_posts(scores, post_of)
    return mean_of_posts(values, (0.0, 1.0), posts)


def paired_difference(a: Scores, b: Scores, post_of: PostOf = None) -> PairedInterval:
    """The mean of `a - b` in [-1, 1] over the posts that are judged for both.

    Its interval is that of `mean_of_posts`, the p-value that of `sign_flip_p_value`. Raises
    UserError where there is no such post.
    """
    known = {name: score for name, score in b.items() if score is not None}
    gaps = {name: x - known[name] for name, x in a.items() if x is not None and name in known}
    differences, posts = judged_posts(gaps, post_of)
    interval = mean_of_posts(differences, (-1.0, 1.0), posts)
    p_value = sign_flip_p_value(totals_of(differences, posts)[0])
    return PairedInterval(**asdict(interval), p_value=p_value)


def best_of_training(scores: Mapping[str, Scores], post_of: Mapping[str, str]) -> dict[str, Any]:
    """Which policy of a training does best on half of the posts, and how it does on the others.

    `scores`: of each policy, in the order of training; a tie is the later one's. Posts with a score
    of each count. The half with even hashes of their ids (`in_half`) chooses `policy`; of the other
    are `mean` and `above_last`, its difference from the last policy's, None for that one itself.
    `means`: of all posts, by policy. Intervals are t intervals over posts. `unjudged`: a share.
    """
    whole = pd.DataFrame({name: pd.Series(of, dtype=float) for name, of in scores.items()})
    table = whole.dropna()
    even = table.loc[[post for post in table.index if in_half(post_of[post], "even")]]
    odd = table.drop(even.index)
    best, last = str(even.sum()[::-1].idxmax()), table.columns[-1]
    gaps = odd[best] - odd[last]
    return {
        "policy": best,
        "unjudged": 1 - len(table) / max(1, len(whole)),
        "chosen_on": len({post_of[post] for post in even.index}),
        "judged_on": len({post_of[post] for post in odd.index}),
        "mean": interval(odd[best].to_dict(), post_of),
        "above_last": mean_gain(gaps.to_dict(), post_of) if best != last else None,
        "means": {name: interval(table[name].to_dict(), post_of) for name in scores},
    }
