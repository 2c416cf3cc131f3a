"""Stage `win_rate` (`make eval`): win rates against the reference, with 95% intervals.

In each order a post scores 1 (policy), 1/2 (tie) or 0 (reference), and its score is the mean of
both orders, so a judge that contradicts itself has said tie. A post with an unjudged order is left
out and counted, never imputed; `worst_case` says how far the rate could move. Differences between
policies are paired by post, and posts are resampled (`eval.stats.intervals`).
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
    gain,
    interval,
    judged_posts,
    mean_gain,
    proxy_and_gold,
    scores_by_name,
)
from eval.stats.hypothesis_tests import sign_flip_p_value
from eval.stats.intervals import Interval, mean_over_posts, sums_by_post
from eval.stats.table import POINTS, analyse, verdict_table
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.judge import MOST_UNJUDGED
from stages.config.stages import TRAINED
from stages.data.halves import in_half
from stages.data.text_metrics import first_ids, identical
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from stages.runs.run import open_stage, write_rows


@dataclass(frozen=True, kw_only=True)
class PairedInterval(Interval):
    """A difference on the same posts, with the p-value of "there is no difference"."""

    p_value: float


def measure_win_rates(config: Config) -> dict[str, Any]:
    """Write `post_scores.jsonl` and return the manifest's results; all rates lie in [0, 1].

    A policy without verdicts has no rate, and two policies without a post that is judged for both
    have no difference. Raises UserError if there are no usable judgements.
    """
    with open_stage(config, "win_rate") as run:
        summary_files = sorted(run.require("summaries").glob("*.jsonl"))
        written = {path.stem: read_lines(path) for path in summary_files}
        post_of = posts_by_text(written)

        judge_folder = run.require("judge")
        manifest = read_manifest(judge_folder) or {}
        judge = manifest["results"]["judge"]
        judgements = read_lines(judge_folder / "judgements.jsonl")
        scores = post_scores(judgements)
        if not any(has_score(scores_of_policy) for scores_of_policy in scores.values()):
            raise UserError(
                f"{judge_folder}: no post has a verdict in both orders: see the replies in"
                " judgements.jsonl, correct the judge's settings and judge again"
            )
        write_rows(run, "post_scores.jsonl", score_rows(scores, post_of))

        gold_file = judge_folder / "gold_scores.jsonl"
        gold_rows = rows_by_policy(read_lines(gold_file)) if gold_file.exists() else {}

        # Policies that PPO kept during training are used only to choose the best one.
        kept = []
        if config.kind == TRAINED:
            kept = [policy for policy in scores if policy.startswith("ppo-")]
        final_scores = {policy: scores[policy] for policy in scores if policy not in kept}
        final_gold_rows = {policy: gold_rows[policy] for policy in gold_rows if policy not in kept}

        results: dict[str, Any] = {
            "judge": judge,
            "posts": len({row["id"] for row in judgements}),
            "texts": len({post_of[row["id"]] for row in judgements}),
            **rates_of(
                written=written,
                judgements=judgements,
                scores=final_scores,
                post_of=post_of,
                judge_kind=judge["kind"],
            ),
        }
        if gold_rows:
            results["scores"] = proxy_and_gold(written, final_gold_rows, post_of)
        if kept:
            # A gold reward model's scores say more than its verdicts.
            by: Mapping[str, Scores] = scores
            if judge["kind"] == "gold_reward_model":
                by = scores_by_name(gold_rows)
            training = {policy: by[policy] for policy in (START, *kept, "ppo")}
            best = best_of_training(training, post_of)
            unjudged = best.pop("unjudged")
            if unjudged <= MOST_UNJUDGED:
                name = "win rate" if by is scores else "gold score"
                results["best"] = {"by": name, **best}
        for policy, row in results["policies"].items():
            row["identical"] = identical(written[policy], config.data.prompt)
        run.finish(results)
    return results


# -- rows ------------------------------------------------------------------------------------------


def rows_by_policy(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each policy, by their field `policy`."""
    policies: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        policies.setdefault(row["policy"], []).append(row)
    return policies


def posts_by_text(policies: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Id -> the first id with the same `query`, from the summaries of the policies."""
    posts = [(row["id"], row["query"]) for rows in policies.values() for row in rows]
    return {
        post_id: first_id for (post_id, _), first_id in zip(posts, first_ids(posts), strict=True)
    }


def score_rows(scores: Mapping[str, Scores], post_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of `post_scores.jsonl`; `post` is an earlier id with the same text, if any."""
    rows = []
    for policy, scores_of_policy in scores.items():
        for post_id, score in scores_of_policy.items():
            row: dict[str, Any] = {"policy": policy, "id": post_id, "score": score}
            if post_of[post_id] != post_id:
                row["post"] = post_of[post_id]
            rows.append(row)
    return rows


def post_scores(judgements: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """For each policy and post id the mean of both orders, None if one of them is unjudged.

    Raises UserError if a post lacks an order or has one twice.
    """
    verdicts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in judgements:
        verdicts_of_post = verdicts.setdefault((row["policy"], row["id"]), [])
        verdicts_of_post.append((row["order"], row["verdict"]))

    scores: dict[str, dict[str, float | None]] = {}
    for (policy, post_id), verdicts_of_post in verdicts.items():
        orders = [order for order, _ in verdicts_of_post]
        if sorted(orders) != sorted(VERDICTS):
            raise UserError(
                f"post {post_id} of {policy} was judged in the orders {', '.join(orders)},"
                " but each order must occur once: judge again"
            )
        points = [POINTS[verdict] for _, verdict in verdicts_of_post if verdict in POINTS]
        scores_of_policy = scores.setdefault(policy, {})
        scores_of_policy[post_id] = sum(points) / 2 if len(points) == 2 else None
    return scores


def has_score(scores: Scores) -> bool:
    """Whether any post has a verdict in both orders."""
    return any(score is not None for score in scores.values())


def judged_for_both(a: Scores, b: Scores) -> bool:
    """Whether any post has a verdict in both orders for both policies."""
    return any(score is not None and b.get(post_id) is not None for post_id, score in a.items())


# -- names of pairs --------------------------------------------------------------------------------


def pair_name(first: str, second: str) -> str:
    """The name of two policies, `ppo-sft`; with spaces if a name contains a hyphen."""
    separator = " - " if "-" in first or "-" in second else "-"
    return f"{first}{separator}{second}"


def names_of_pair(name: str) -> tuple[str, str]:
    """The two policies in a `pair_name`; a policy's name contains no space."""
    separator = " - " if " - " in name else "-"
    first, _, second = name.partition(separator)
    return first, second


# -- rates -----------------------------------------------------------------------------------------


def rates_of(
    *,
    written: ScoredRows,
    judgements: Sequence[dict[str, Any]],
    scores: Mapping[str, Scores],
    post_of: Mapping[str, str],
    judge_kind: str,
) -> dict[str, Any]:
    """`policies` and `differences` of the manifest's results.

    `written` has the rows of each policy, `scores` those of `post_scores`. A policy's row is that
    of `describe`, with its `statistics` (`analyse`) and what `of_reward_model` says.
    """
    rows_of = rows_by_policy(judgements)
    texts = {
        policy: {row["id"]: (row["summary"], row["reference"]) for row in rows}
        for policy, rows in written.items()
    }
    policies = {}
    for policy, scores_of_policy in scores.items():
        table = verdict_table(rows_of[policy], texts[policy], post_of)
        policies[policy] = {
            **describe(scores_of_policy, post_of),
            "statistics": analyse(table),
            **of_reward_model(
                policy,
                written=written,
                judged=scores_of_policy,
                post_of=post_of,
                judge_kind=judge_kind,
            ),
        }

    differences = {}
    for a, b in combinations(scores, 2):
        if judged_for_both(scores[b], scores[a]):
            difference = paired_difference(scores[b], scores[a], post_of)
            differences[pair_name(b, a)] = {
                **asdict(difference),
                "alike": share_alike(texts[b], texts[a]),
            }
    return {"policies": policies, "differences": differences}


def describe(scores: Scores, post_of: PostOf = None) -> dict[str, Any]:
    """One policy's row: its rate and interval, the number of posts, and how far to trust them.

    `wins`, `ties` and `losses` count judged posts with a score above, at and below 1/2. `unjudged`
    is a share of all posts. `worst_case` is the rate if every unjudged post were lost, and if every
    one were won. `p_value` is that of a rate of 1/2. Without judged posts, rate, interval and
    p-value are None.
    """
    values, posts = judged_posts(scores, post_of)
    total = float(values.sum())
    unjudged = len(scores) - len(values)

    rate = None
    p_value = None
    if len(values) > 0:
        rate = win_rate(scores, post_of)
        sums, _ = sums_by_post(values - 0.5, posts)
        p_value = sign_flip_p_value(sums)
    return {
        "win_rate": rate.estimate if rate else None,
        "low": rate.low if rate else None,
        "high": rate.high if rate else None,
        "posts": len(values),
        "wins": int((values > 0.5).sum()),
        "ties": int((values == 0.5).sum()),
        "losses": int((values < 0.5).sum()),
        "unjudged": unjudged / len(scores),
        "worst_case": [total / len(scores), (total + unjudged) / len(scores)],
        "p_value": p_value,
    }


def of_reward_model(
    policy: str, written: ScoredRows, judged: Scores, post_of: PostOf, judge_kind: str
) -> dict[str, Any]:
    """What the run's own reward model says about a policy.

    `rm_agrees`: its `agreement` with the judge; None if it is the judge. `score_gain`: the `gain`
    of its score over SFT; None for SFT.
    """
    rm_agrees = None
    if judge_kind != "reward_model":
        rm_agrees = agreement(written[policy], judged, post_of)
    score_gain = None
    if policy != START:
        score_gain = gain(scores_by_name(written), policy, post_of)
    return {"rm_agrees": rm_agrees, "score_gain": score_gain}


def win_rate(scores: Scores, post_of: PostOf = None) -> Interval:
    """The mean score of the judged posts in [0, 1]. Raises UserError if no post is judged."""
    values, posts = judged_posts(scores, post_of)
    return mean_over_posts(values, limits=(0.0, 1.0), posts=posts)


def paired_difference(a: Scores, b: Scores, post_of: PostOf = None) -> PairedInterval:
    """The mean of `a - b` in [-1, 1] over the posts that are judged for both.

    The interval is that of `mean_over_posts`, and the p-value that of `sign_flip_p_value`. Raises
    UserError if there is no such post.
    """
    differences = {}
    for post_id, score in a.items():
        other = b.get(post_id)
        if score is not None and other is not None:
            differences[post_id] = score - other
    values, posts = judged_posts(differences, post_of)
    mean = mean_over_posts(values, limits=(-1.0, 1.0), posts=posts)
    sums, _ = sums_by_post(values, posts)
    return PairedInterval(**asdict(mean), p_value=sign_flip_p_value(sums))


def share_alike(a: Mapping[str, tuple[str, str]], b: Mapping[str, tuple[str, str]]) -> float:
    """The share of posts for which two policies wrote the same summary, up to white space."""
    is_same = [a[post_id][0].split() == b[post_id][0].split() for post_id in a if post_id in b]
    return sum(is_same) / len(is_same)


def best_of_training(scores: Mapping[str, Scores], post_of: Mapping[str, str]) -> dict[str, Any]:
    """The best policy of a training run on half of the posts, and its score on the other half.

    `scores` has the policies in the order of training; of equal ones the later is chosen. Only
    posts with a score of each policy count. The posts whose ids have even hashes (`in_half`) choose
    `policy`. The other half gives `mean`, and `above_last`: the difference from the last policy,
    None for the last policy itself. `means` are over all posts, by policy. Intervals are t
    intervals over posts. `unjudged` is the share of posts that do not count.
    """
    all_posts = pd.DataFrame(
        {policy: pd.Series(of_policy, dtype=float) for policy, of_policy in scores.items()}
    )
    table = all_posts.dropna()
    is_even = [in_half(post_of[str(post_id)], "even") for post_id in table.index]
    even = table.loc[is_even]
    odd = table.drop(even.index)

    last = table.columns[-1]
    # idxmax takes the first of equal sums, so the policies are reversed.
    best = str(even.sum()[::-1].idxmax())
    above_last = None
    if best != last:
        above_last = mean_gain((odd[best] - odd[last]).to_dict(), post_of)
    return {
        "policy": best,
        "unjudged": 1 - len(table) / max(1, len(all_posts)),
        "chosen_on": len({post_of[post_id] for post_id in even.index}),
        "judged_on": len({post_of[post_id] for post_id in odd.index}),
        "mean": interval(odd[best].to_dict(), post_of),
        "above_last": above_last,
        "means": {policy: interval(table[policy].to_dict(), post_of) for policy in scores},
    }
