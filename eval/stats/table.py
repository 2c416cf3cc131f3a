"""The statistics of one policy's verdicts: every rate with its interval, and the judge's biases."""

from collections.abc import Iterable, Mapping
from math import log
from typing import Any

import numpy as np

from eval.stats.hypothesis_tests import holm, p_of_interval
from eval.stats.intervals import (
    CONFIDENCE,
    Interval,
    as_plain,
    clustered_share,
    mean_over_posts,
    post_numbers,
)
from eval.stats.length_control import length_controlled, rates_by_length, word_count
from eval.stats.verdict_table import VerdictTable, both_orders

POINTS = {"policy": 1.0, "tie": 0.5, "reference": 0.0}
# A judge prefers a position only if its share of first choices is further than this from 1/2.
FAR_FROM_EVEN = 0.05


def verdict_table(
    judgements: Iterable[dict[str, Any]],
    texts: Mapping[str, tuple[str, str]],
    post_of: Mapping[str, str] | None = None,
) -> VerdictTable:
    """The table of one policy's rows of `judgements.jsonl`.

    `texts` maps a post's id to the policy's summary and the text it was compared with. `post_of`
    maps an id to the first id with the same post; without it, all posts differ.
    """
    if post_of is None:
        post_of = {}
    ids = []
    posts = []
    outcomes = []
    shown_first = []
    log_ratios = []
    differ = []
    for row in judgements:
        summary, other = texts[row["id"]]
        ids.append(row["id"])
        posts.append(post_of.get(row["id"], row["id"]))
        outcomes.append(POINTS.get(row["verdict"], np.nan))
        shown_first.append(row["order"] == "policy_first")
        log_ratios.append(log(word_count(summary) / word_count(other)))
        differ.append(summary.split() != other.split())
    return VerdictTable(
        posts=post_numbers(posts),
        ids=post_numbers(ids),
        outcomes=np.array(outcomes, dtype=float),
        shown_first=np.array(shown_first, dtype=bool),
        log_ratios=np.array(log_ratios, dtype=float),
        differ=np.array(differ, dtype=bool),
    )


def analyse(table: VerdictTable) -> dict[str, Any]:
    """The statistics of one policy's verdicts; rates lie in [0, 1], and a tie counts half.

    `raw`, `shown_first` and `shown_second` are means of the judgements. The other keys have the
    names of their functions: `order_balanced`, `length_controlled`, those of `leanings`, and
    `length_bins` from `rates_by_length`. A rate without judgements is None.
    """
    rows = table.judged()
    first = rows.only(rows.shown_first)
    second = rows.only(~rows.shown_first)
    median_ratio = None
    if len(table.log_ratios) > 0:
        median_ratio = float(np.exp(np.median(table.log_ratios)))
    return {
        "raw": as_plain(clustered_share(rows.outcomes, rows.posts)),
        "order_balanced": as_plain(order_balanced(rows)),
        "shown_first": as_plain(clustered_share(first.outcomes, first.posts)),
        "shown_second": as_plain(clustered_share(second.outcomes, second.posts)),
        **leanings(table),
        "length_controlled": length_controlled(table),
        "length_bins": rates_by_length(table),
        "median_length_ratio": median_ratio,
    }


def leanings(table: VerdictTable) -> dict[str, Any]:
    """A judge's biases, regardless of who wrote the texts, with 95% intervals over posts.

    `share_first`: of the verdicts that are not ties, the share for the text that was shown first.
    `swap_consistency`: of the ids judged in both orders, the share with the same verdict. Both are
    None without such verdicts. `unjudged`: the share of judgements without a verdict.
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
    """The systems for which the judge's verdicts clearly depend on position.

    `shares` has the `share_first` of each system that the judge compared. A share counts if it is
    far from 1/2, and different from it after Holm's correction for all systems.
    """
    judged = {name: share for name, share in shares.items() if share}
    p_values = [
        p_of_interval(
            estimate=share["estimate"],
            low=share["low"],
            high=share["high"],
            value=0.5,
        )
        for share in judged.values()
    ]
    systems = []
    for name, p_value in zip(judged, holm(p_values), strict=True):
        is_significant = p_value < 1 - CONFIDENCE
        is_large = abs(judged[name]["estimate"] - 0.5) > FAR_FROM_EVEN
        if is_significant and is_large:
            systems.append(name)
    return systems


def order_balanced(rows: VerdictTable) -> Interval | None:
    """The mean of the rates when shown first and second; None if no id has both orders.

    Only ids with both orders count, so that both rates are about the same posts.
    """
    both = both_orders(rows)
    means = both.outcomes.mean(axis=1)
    if len(means) == 0:
        return None
    return mean_over_posts(means, limits=(0.0, 1.0), posts=both.posts)


def swap_consistency(rows: VerdictTable) -> Interval | None:
    """Of the ids judged in both orders, the share with the same verdict.

    Identical texts do not count, because the judge was not asked about them.
    """
    both = both_orders(rows.only(rows.differ))
    is_same = np.ptp(both.outcomes, axis=1) == 0
    return clustered_share(is_same.astype(float), both.posts)
