"""What a table of verdicts says: every rate with its interval, and how far to trust the judge.

The table may hold both orders of each post (our evaluations) or one (published verdicts).
"""

from collections.abc import Iterable, Mapping
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rates.formulas import (
    CONFIDENCE,
    FEW_POSTS,
    Floats,
    Interval,
    as_plain,
    bootstrap,
    clustered_share,
    holm,
    mean_of_posts,
    mean_of_two,
    post_numbers,
    two_sided,
)
from eval.rates.length_control import VerdictTable, length_controlled, rates_by_length, word_count

POINTS = {"policy": 1.0, "tie": 0.5, "reference": 0.0}
FAR_FROM_EVEN = 0.05  # a share of first choices is called a lean beyond 1/2 by more


def analyse(table: VerdictTable) -> dict[str, Any]:
    """The statistics of one policy's verdicts; rates lie in [0, 1], a tie counts half.

    `raw`: mean of the judgements, with the interval of `clustered_share`. `order_balanced`: mean of
    the rates when shown first and second, bootstrap over posts. `shown_first`, `shown_second`,
    `length_controlled`, `length_bins`; `share_first` and `swap_consistency` of `leanings`.
    `unjudged` is a share of the judgements, `worst_case` the raw rate with all of them lost and all
    won. A rate without judgements is None.
    """
    rows = table.judged()
    first = rows.only(rows.shown_first)
    second = rows.only(~rows.shown_first)
    n, missing = len(table.outcomes), len(table.outcomes) - len(rows.outcomes)
    won = float(rows.outcomes.sum())
    return {
        "judgements": n,
        "posts": len(np.unique(table.posts)),
        "unjudged": missing / n,
        "worst_case": [won / n, (won + missing) / n],
        "raw": as_plain(clustered_share(rows.outcomes, rows.posts)),
        "order_balanced": as_plain(order_balanced(table)),
        "shown_first": as_plain(clustered_share(first.outcomes, first.posts)),
        "shown_second": as_plain(clustered_share(second.outcomes, second.posts)),
        **leanings(table, table.posts),
        "length_controlled": length_controlled(table),
        "length_bins": rates_by_length(table),
        "median_length_ratio": _median_ratio(table.log_ratios),
        # Of the posts whose texts differ in length; None where none do.
        "median_other_ratio": _median_ratio(table.log_ratios[np.abs(table.log_ratios) > 1e-9]),
    }


def leanings(table: VerdictTable, clusters: NDArray[np.int64]) -> dict[str, Any]:
    """What a judge leans to, whoever wrote what, with 95% intervals over clusters.

    `share_first`: of the judgements that are no tie, those for the text shown first.
    `swap_consistency`: of the `posts` asked about in both orders, those with one verdict. What the
    table calls a post may be one pair of several about a post: `clusters` [rows] then number the
    posts. A share without judgements is None.
    """
    judged = ~np.isnan(table.outcomes)
    decided = judged & (table.outcomes != 0.5)
    chose_first = np.where(table.shown_first, table.outcomes, 1 - table.outcomes)
    return {
        "share_first": as_plain(clustered_share(chose_first[decided], clusters[decided])),
        "swap_consistency": as_plain(swap_consistency(table.only(judged), clusters[judged])),
    }


def _median_ratio(log_ratios: Floats) -> float | None:
    return float(np.exp(np.median(log_ratios))) if len(log_ratios) else None


def leaning(shares: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """The systems whose comparisons show that the judge chooses by place, of all that it compared.

    A share of first choices counts that is not 1/2 after Holm's correction for all systems, and
    far enough from it to matter. The test is the one that its interval makes.
    """
    known = {name: share for name, share in shares.items() if share}
    p_values = [two_sided(share, 0.5) for share in known.values()]
    return [
        name
        for (name, share), p in zip(known.items(), holm(p_values), strict=True)
        if p < 1 - CONFIDENCE and abs(share["estimate"] - 0.5) > FAR_FROM_EVEN
    ]


def order_balanced(table: VerdictTable) -> Interval | None:
    """The mean of the rate when shown first and when shown second, with posts drawn anew.

    Where every post was asked about in both orders, only those with a verdict in both count, so
    that both rates are about the same posts. Elsewhere all verdicts count, as in the rates of the
    two orders. None where an order has no judgement.
    """
    rows = table.judged()
    sums, questions = _by(rows.ids, rows), _by(table.ids, table)
    if np.all((questions[:, 1] > 0) & (questions[:, 3] > 0)):
        both = (sums[:, 1] > 0) & (sums[:, 3] > 0)
        if 2 * both.sum() > len(sums):
            kept, posts = sums[both], rows.posts[_first_rows(rows)][both]
            means = (kept[:, 0] / kept[:, 1] + kept[:, 2] / kept[:, 3]) / 2
            return mean_of_posts(means, (0.0, 1.0), posts)
    parts = [rows.only(rows.shown_first), rows.only(~rows.shown_first)]
    rates = [clustered_share(part.outcomes, part.posts) for part in parts]
    if rates[0] is None or rates[1] is None:
        return None
    sums = _by(rows.posts, rows)
    _, counts = np.unique(rows.outcomes, return_counts=True)
    if len(rows.outcomes) - counts.max() < FEW_POSTS:
        low, high = mean_of_two(rates[0], rates[1])
    else:
        low, high = bootstrap(sums, lambda s: (s[:, 0] / s[:, 1] + s[:, 2] / s[:, 3]) / 2)
    mean = (rates[0].estimate + rates[1].estimate) / 2
    return Interval(estimate=mean, low=low, high=high, posts=len(sums))


def swap_consistency(rows: VerdictTable, clusters: NDArray[np.int64]) -> Interval | None:
    """Of the posts judged in both orders, the share with one verdict, with its interval over
    clusters.

    Identical texts are left out: the judge was not asked about them. Shapes: clusters [rows].
    """
    asked_about = rows.only(rows.differ)
    sums = _by(asked_about.ids, asked_about)
    both = (sums[:, 1] > 0) & (sums[:, 3] > 0)
    same = sums[both, 0] / sums[both, 1] == sums[both, 2] / sums[both, 3]
    firsts = _first_rows(asked_about)
    return clustered_share(same.astype(float), clusters[rows.differ][firsts][both])


def _first_rows(rows: VerdictTable) -> NDArray[np.int64]:
    """The first row of each id, [ids]."""
    return np.unique(rows.ids, return_index=True)[1]


def _by(kinds: NDArray[np.int64], rows: VerdictTable) -> Floats:
    """[kinds, 4]: sum and number of the outcomes when shown first, then when shown second."""
    _, codes = np.unique(kinds, return_inverse=True)
    size = int(codes.max()) + 1 if len(codes) else 0
    columns = []
    for mask in (rows.shown_first, ~rows.shown_first):
        columns.append(np.bincount(codes[mask], rows.outcomes[mask], size))
        columns.append(np.bincount(codes[mask], minlength=size).astype(float))
    return np.column_stack(columns)


def verdict_table(
    judgements: Iterable[dict[str, Any]],
    texts: Mapping[str, tuple[str, str]],
    post_of: Mapping[str, str] | None = None,
) -> VerdictTable:
    """The table of one policy's rows of `judgements.jsonl`.

    `texts`: post id -> the policy's summary and the one that it was compared with; their words are
    counted. `post_of`: id -> the first id with the same post; None: each is the first.
    """
    rows = list(judgements)
    pairs = [texts[row["id"]] for row in rows]
    ratios = [log(word_count(summary) / word_count(other)) for summary, other in pairs]
    return VerdictTable(
        posts=post_numbers([(post_of or {}).get(row["id"], row["id"]) for row in rows]),
        outcomes=np.array([POINTS.get(row["verdict"], np.nan) for row in rows], dtype=float),
        shown_first=np.array([row["order"] == "policy_first" for row in rows], dtype=bool),
        log_ratios=np.array(ratios, dtype=float),
        differ=np.array([summary.split() != other.split() for summary, other in pairs], dtype=bool),
        ids=post_numbers([row["id"] for row in rows]),
    )
