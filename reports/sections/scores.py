"""Scores of summaries: proxy and gold, and accuracy beside length."""

from collections import Counter
from collections.abc import Sequence

from reports.parts.collect import Record, policies_of
from reports.parts.gained import by_kind
from reports.parts.page import Block, Note, Table, Text
from reports.parts.words import (
    Row,
    accuracy,
    direction,
    estimate,
    named,
    number,
    percent,
    plain,
    posts_of,
    whole,
)
from stages.posts.toy import OPTIONAL, facts_of, read_summary

SCORERS = ("proxy", "gold")


def blocks(record: Record) -> list[Block]:
    """The blocks; none if another kind of judge judged."""
    results = record.results("win_rate").get("scores")
    if results is None:
        return []
    return [
        Text(_what(record)),
        _table(results),
        *(Note(_reading(name, gains)) for name, gains in results["gains"].items()),
    ]


def _what(record: Record) -> str:
    """What proxy and gold score are, as far as the run knows."""
    results, learner = record.results("judge"), record.policy
    scorer, rule = results["gold"]["label"], results["judge"]["kind"] == "facts"
    if rule and learner:
        scorer += ", which labelled, with noise, what the proxy learned from"
    elif not rule:
        scorer = f"the reward model {scorer}: {results['judge']['note']}"
    units = "Each has its own unit, so compare signs and directions and not sizes."
    if not learner:
        return f"The gold score is that of {scorer}. The proxy is a reward model, if any. {units}"
    return (
        f"The proxy is the run's own reward model, which {named(learner)} was trained to raise. The"
        f" gold score is that of {scorer}. {units} Proxy up and gold down is over-optimisation."
    )


def _table(results: Row) -> Table:
    rows = []
    for name in results["gold"]:
        gains = results["gains"].get(name, {})
        means = [results[scorer].get(name) for scorer in SCORERS]
        cells = [*means, *(gains.get(scorer) for scorer in SCORERS)]
        rows.append([named(name), *map(plain, cells)])
    posts = max(mean["posts"] for mean in results["gold"].values() if mean)
    caption = (
        f"Mean scores of {whole(posts)} held-out posts, with 95% t intervals over posts. The"
        " last two: mean differences on the same posts."
    )
    header = ("", "proxy [95%]", "gold [95%]", "proxy - SFT", "gold - SFT")
    return Table(header, rows, caption, name="proxy-and-gold-score")


def _reading(name: str, gains: Row) -> str:
    """What the two differences from SFT say together."""
    proxy, gold = gains["proxy"], gains["gold"]
    if proxy is None or gold is None:
        return f"{named(name)}: fewer than two posts have both scores, so nothing is compared."
    moves = {scorer: direction(gain) for scorer, gain in gains.items()}
    text = f"{named(name)} against SFT: the proxy {moves['proxy']}, the gold score {moves['gold']}"
    if moves == {"proxy": "rose", "gold": "fell"}:
        return f"{text}. This is OVER-OPTIMISATION: the policy learned its reward model's mistakes."
    return f"{text}."


FACTS = {"when": "day", "ask": "question"}  # else a fact is called as the world calls it


def told_blocks(record: Record) -> list[Block]:
    """Which facts of the built-in world the summaries tell right; none of real posts."""
    if record.has_real_texts:
        return []
    policies = policies_of(record)
    shares_of = [told_shares(record.rows("summaries", f"{name}.jsonl")) for name in policies]
    header = [f"{named(name)}, {where}" for name in policies for where in ("wanted", "not wanted")]
    rows = [
        [FACTS.get(slot, slot), *(percent(share) for shares in shares_of for share in shares[slot])]
        for slot in OPTIONAL
    ]
    caption = (
        "Share of held-out summaries that tell a fact right, on posts whose readers want it and on"
        " the others. Where a seed falls behind, some wanted fact is hardly told, and another one"
        " in its place."
    )
    return [Table(["", *header], rows, caption, name="facts-told")]


def told_shares(rows: Sequence[Row]) -> dict[str, tuple[float | None, float | None]]:
    """Fact -> share of summaries that tell it right, where it is wanted and where it is not.

    `rows` are summaries with the ids of their posts. None where no post is of that kind.
    """
    posts: Counter[tuple[str, bool]] = Counter()
    right_of: Counter[tuple[str, bool]] = Counter()
    for row in rows:
        facts = facts_of(row["id"])
        right, _ = read_summary(row["summary"], facts)
        for slot in OPTIONAL:
            kind = slot, slot in facts.wanted
            posts[kind] += 1
            right_of[kind] += slot in right

    def share_of(slot: str, wanted: bool) -> float | None:
        kind = slot, wanted
        return right_of[kind] / posts[kind] if posts[kind] else None

    return {slot: (share_of(slot, True), share_of(slot, False)) for slot in OPTIONAL}


def gain_notes(record: Record) -> list[str]:
    """Policies whose gold score reliably rose only, or more, where they ask at the end and SFT does
    not: the intervals over posts do not overlap. And those whose proxy rose, but not reliably on
    the posts on which neither summary is cut off.
    """
    notes = []
    for name, (added, rest) in by_kind(record, "question").items():
        if added.gold is None or rest.gold is None or direction(added.gold) != "rose":
            continue
        only = direction(rest.gold) != "rose"
        if only or added.gold["low"] > rest.gold["high"]:
            more, elsewhere = "more", " than elsewhere"
            if only:
                more, elsewhere = "only", f"; elsewhere it {direction(rest.gold)}"
            notes.append(
                f"{named(name)}'s gold score reliably rose {more} where it ends with a question and"
                f" SFT does not ({posts_of(added.posts)}: {plain(added.gold)}){elsewhere}"
                f" ({posts_of(rest.posts)}: {plain(rest.gold)})."
            )
    gains = record.results("win_rate").get("scores", {}).get("gains", {})
    for name, (_, rest) in by_kind(record, "ending").items():
        rose = gains.get(name, {}).get("proxy") and direction(gains[name]["proxy"]) == "rose"
        if rose and rest.proxy and direction(rest.proxy) != "rose":
            notes.append(
                f"{named(name)}'s proxy rose, but not reliably where its summary and SFT's both end"
                f" by themselves ({posts_of(rest.posts)}: {plain(rest.proxy)})."
            )
    return notes


LONGER = ("longer", "longer_near_equal")
CAPTION = (
    "Pairs ranked as the labellers did, with 95% intervals over posts. The longer one: how often"
    " the summary with more tokens is the preferred one, an equal length counting half. Two texts"
    " alike have equal scores, which counts as wrong of all pairs, as in the paper's code, and"
    " half elsewhere. Nearly equal: pairs"
    " whose lengths differ by at most 10% of the longer. At equal length: what a logistic model"
    " with bounded terms of the length ratio gives at a ratio of 1, standard errors clustered by"
    " post."
)


def length_blocks(scorers: dict[str, Row]) -> list[Block]:
    """A table of scorers (name -> results of their stage), and what it means."""
    rows = [
        [
            name,
            accuracy(results),
            estimate(results["length"]["near_equal"]),
            estimate(results["length"]["at_equal_length"]),
        ]
        for name, results in scorers.items()
    ]
    length = next(iter(scorers.values()))["length"]
    rows.append(["the longer one", *(estimate(length[key]) for key in LONGER), percent(0.5)])
    pairs = whole(length["near_equal"]["pairs"] if length["near_equal"] else 0)
    near = f"nearly equal length (n = {pairs})"
    header = ("", "all pairs [95%]", near, "at equal length")
    return [Table(header, rows, CAPTION), *_notes(scorers)]


def _notes(scorers: dict[str, Row]) -> list[Block]:
    """A warning for each scorer that is not reliably better than length."""
    notes: list[Block] = []
    for scorer, results in scorers.items():
        name = f"{scorer[0].upper()}{scorer[1:]}"
        above, model = results["length"]["above_longer"], results["length"]["at_equal_length"]
        if model["estimate"] is None:
            notes.append(Note(f"{name}: no accuracy at equal length: {model['why']}."))
        if above["low"] <= 0:
            bounds = ", ".join(str(number(100 * above[key], 1)) for key in ("low", "high"))
            notes.append(
                Note(
                    f"{name} is NOT reliably better than taking the longer summary:"
                    f" {100 * above['estimate']:+.1f} points [{bounds}] on the same pairs."
                )
            )
    return notes
