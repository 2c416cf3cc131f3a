"""Scores of summaries: proxy and gold."""

from reports.parts.blocks import Block, Note, Table, Text
from reports.parts.collect import Record
from reports.parts.gained import by_kind
from reports.parts.words import Row, direction, named, plain, posts_of, whole

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
            notes.append(
                f"{named(name)}'s gold score reliably rose {'only' if only else 'more'} where it"
                f" ends with a question and SFT does not ({posts_of(added.posts)}:"
                f" {plain(added.gold)}; the others, {posts_of(rest.posts)}: {plain(rest.gold)})."
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
