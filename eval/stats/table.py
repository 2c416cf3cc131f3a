"""What a table of verdicts says: every rate with its interval, and how far to trust the judge."""

from collections.abc import Iterable, Mapping
from math import log
from typing import Any

import numpy as np

from eval.stats.formulas import (
    CONFIDENCE,
    Interval,
    as_plain,
    clustered_share,
    holm,
    mean_of_posts,
    post_numbers,
    two_sided,
)
from eval.stats.length_control import (
    VerdictTable,
    in_both_orders,
    length_controlled,
    of_orders,
    rates_by_length,
    word_count,
)

POINTS = {"policy": 1.0, "tie": 0.5, "reference": 0.0}
FAR_FROM_EVEN = 0.05  # a share of first choices is called a lean beyond 1/2 by more


def analyse(table: VerdictTable) -> dict[str, Any]:
    """The statistics of one policy's verdicts; rates lie in [0, 1], a tie counts half.

    `raw`, `shown_first` and `shown_second`: means of the judgements, with the intervals of
    `clustered_share`; `order_balanced`, `length_controlled`, `length_bins`; those of `leanings`.
    A rate without judgements is None.
    """
    rows = table.judged()
    first, second = rows.only(rows.shown_first), rows.only(~rows.shown_first)
    ratios = table.log_ratios
    return {
        "raw": as_plain(clustered_share(rows.outcomes, rows.posts)),
        "order_balanced": as_plain(order_balanced(rows)),
        "shown_first": as_plain(clustered_share(first.outcomes, first.posts)),
        "shown_second": as_plain(clustered_share(second.outcomes, second.posts)),
        **leanings(table),
        "length_controlled": length_controlled(table),
        "length_bins": rates_by_length(table),
        "median_length_ratio": float(np.exp(np.median(ratios))) if len(ratios) else None,
    }


def leanings(table: VerdictTable) -> dict[str, Any]:
    """What a judge leans to, whoever wrote what, with 95% intervals over posts.

    `share_first`: of the judgements that are no tie, those for the text shown first.
    `swap_consistency`: of the texts asked about in both orders, those with one verdict. Without
    judgements either is None. `unjudged`: the share of the judgements.
    """
    rows = table.judged()
    decided = rows.only(rows.outcomes != 0.5)
    chose_first = np.where(decided.shown_first, decided.outcomes, 1 - decided.outcomes)
    return {
        "share_first": as_plain(clustered_share(chose_first, decided.posts)),
        "swap_consistency": as_plain(swap_consistency(rows)),
        "unjudged": float(np.isnan(table.outcomes).mean()),
    }


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


def order_balanced(rows: VerdictTable) -> Interval | None:
    """The mean of the rates when shown first and second, of the judged posts that have both.

    So both rates are about the same posts. None where no post has both.
    """
    both = in_both_orders(rows)
    means = of_orders(both).mean(axis=1)
    return mean_of_posts(means, (0.0, 1.0), both.posts[::2]) if len(means) else None


def swap_consistency(rows: VerdictTable) -> Interval | None:
    """Of the ids judged in both orders, the share with one verdict, with its interval over posts.

    Identical texts are left out: the judge was not asked about them.
    """
    both = in_both_orders(rows.only(rows.differ))
    same = np.ptp(of_orders(both), axis=1) == 0
    return clustered_share(same.astype(float), both.posts[::2])


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
