"""Win rates against the reference, with 95% intervals, from the judgements of a run.

    python -m eval.win_rate --preset tiny --seed 44413

A post scores 1, 1/2 or 0 in each order (policy, tie, reference) and the mean over the two orders:
a judge that contradicts itself has said tie. A post with an unjudged order is left out and
counted, never imputed; `worst_case` says how far the rate could move if it were.

Posts are what was sampled, so posts are resampled: both orders of a post, all policies on it, and
its text under other ids stay together (Miller 2411.00640). Differences between policies are paired
by post.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from eval.judges.protocol import VERDICTS
from eval.rates.formulas import Interval, mean_of_posts, sign_flip_p_value, totals_of
from eval.rates.table import POINTS, analyse, verdict_table
from eval.scores import (
    START,
    PostOf,
    ScoredRows,
    Scores,
    agreement,
    by_name,
    gain,
    judged_posts,
    proxy_and_gold,
)
from stages.driving.start import run_stage
from stages.finished import read_manifest
from stages.posts.text_metrics import first_ids, identical
from stages.running.files import read_lines
from stages.running.progress import folded
from stages.runs import open_stage, write_rows
from stages.settings.config import Config, UserError
from stages.settings.judge import MOST_UNJUDGED


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
        summaries = run.require("summaries")
        paths = sorted(summaries.glob("*.jsonl"))
        written = {path.stem: read_lines(path) for path in paths}
        post_of = posts_by_text(written)
        folder = run.require("judge")
        judgements = read_lines(folder / "judgements.jsonl")
        scores = post_scores(judgements)
        if not any(judged_for_both(of_posts, of_posts) for of_posts in scores.values()):
            raise UserError(
                f"{folder}: no post has a verdict in both orders: see the replies in"
                " judgements.jsonl, correct the judge's settings and judge again"
            )
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
        results = {
            "judge": judge,
            "posts": len({row["id"] for row in judgements}),
            "texts": len({post_of[row["id"]] for row in judgements}),
            **rates_of(written, judgements, scores, post_of, judge["kind"]),
            **({"scores": proxy_and_gold(written, gold_rows, post_of)} if gold_rows else {}),
        }
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
        name: describe(scores[name], post_of)
        | {
            "statistics": analyse(verdict_table(rows_of[name], texts[name], post_of)),
            **of_reward_model(name, written, scores[name], post_of, judge_kind),
        }
        for name in scores
    }
    differences = {
        pair_name(later, earlier): asdict(
            paired_difference(scores[later], scores[earlier], post_of)
        )
        | {"alike": alike(texts[later], texts[earlier])}
        for earlier, later in combinations(scores, 2)
        if judged_for_both(scores[later], scores[earlier])
    }
    return {"policies": policies, "differences": differences}


def of_reward_model(
    policy: str, written: ScoredRows, judged: Scores, post_of: PostOf, judge_kind: str
) -> dict[str, Any]:
    """What the run's reward model says of a policy's summaries.

    `rm_agrees`: its `agreement` with the judge, None where it is the judge; `score_gain`: the
    `gain` of its score, None for SFT itself.
    """
    is_judge, is_start = judge_kind == "reward_model", policy == START
    return {
        "rm_agrees": None if is_judge else agreement(written[policy], judged, post_of),
        "score_gain": None if is_start else gain(by_name(written), policy, post_of),
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
        points = [POINTS.get(verdict) for _, verdict in of_post]
        known = [point for point in points if point is not None]
        score = sum(known) / len(known) if len(known) == len(points) else None
        scores.setdefault(policy, {})[post_id] = score
    return scores


def judged_for_both(a: Scores, b: Scores) -> bool:
    """Whether any post has a verdict in both orders for both policies."""
    return any(score is not None and b.get(post) is not None for post, score in a.items())


def describe(scores: Scores, post_of: PostOf = None) -> dict[str, Any]:
    """One policy's row: its rate and interval, counts of posts, and how far to trust them.

    `wins`, `ties` and `losses` count judged posts with a score above, at and below 1/2;
    `unjudged` is a share of all posts; `worst_case` is the rate with every unjudged post lost
    and with every one won; `p_value` is that of a rate of 1/2 (paired randomisation test).
    Where no post was judged, rate, interval and p-value are None.
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
    """The mean score of the judged posts in [0, 1], with a cluster bootstrap over posts.

    Raises UserError where no post is judged.
    """
    values, posts = judged_posts(scores, post_of)
    return mean_of_posts(values, (0.0, 1.0), posts)


def paired_difference(a: Scores, b: Scores, post_of: PostOf = None) -> PairedInterval:
    """The mean of `a - b` in [-1, 1] over the posts that are judged for both.

    The interval is a bootstrap over posts, the p-value a paired randomisation test (each post's
    difference keeps or changes its sign). Raises UserError where there is no such post.
    """
    gaps: dict[str, float | None] = {}
    for name, score in a.items():
        other = b.get(name)
        gaps[name] = None if score is None or other is None else score - other
    differences, posts = judged_posts(gaps, post_of)
    interval = mean_of_posts(differences, (-1.0, 1.0), posts)
    p_value = sign_flip_p_value(totals_of(differences, posts)[0])
    return PairedInterval(**asdict(interval), p_value=p_value)


def print_summary(results: dict[str, Any]) -> None:
    """A line for the judge, one for each policy and one for each difference, 80 columns."""
    print(*folded(f"win rate against the reference, by {results['judge']['name']}"), sep="\n")
    for name, row in results["policies"].items():
        if row["unjudged"] > MOST_UNJUDGED:
            low, high = row["worst_case"]
            rate = f"no rate: {row['unjudged']:.1%} unjudged, so [{low:.1%}, {high:.1%}]"
        else:
            rate = f"{row['win_rate']:6.1%} [{row['low']:6.1%}, {row['high']:6.1%}]"
            rate += f"  {row['posts']} posts, {row['unjudged']:.1%} unjudged"
        print(*folded(f"  {name:16} {rate}"), sep="\n")
    for name, row in results["differences"].items():
        pair = names_of_pair(name)
        if all(results["policies"][policy]["unjudged"] <= MOST_UNJUDGED for policy in pair):
            estimate, low, high = (100 * row[key] for key in ("estimate", "low", "high"))
            points = f"{estimate:+6.1f} [{low:+6.1f}, {high:+6.1f}]  points on the same posts"
            print(*folded(f"  {' - '.join(pair):28} {points}"), sep="\n")


def main(argv: list[str] | None = None) -> None:
    """Turn a run's judgements into win rates."""
    about = "win rates with 95% intervals from judgements"
    print_summary(run_stage("win_rate", measure_win_rates, argv, about))


if __name__ == "__main__":
    main()
