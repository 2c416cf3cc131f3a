"""Scores of summaries: proxy and gold, and on which posts a gain lies."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from eval.scores import START, mean_gain
from reports.parts import plots, words
from reports.parts.blocks import Block, Heading, Note, Table, Text
from reports.parts.collect import Record, distance, policies_of
from reports.parts.gained import SCORERS
from reports.parts.paired import posts_frame, texts_of
from reports.parts.words import Row, direction, named, number, plain, posts_of, whole


def blocks(record: Record) -> list[Block]:
    """The blocks; none if another kind of judge judged."""
    results = record.results("win_rate").get("scores")
    if results is None:
        return []
    return [
        Text(_what(record)),
        _table(results),
        *(_reading(name, gains) for name, gains in results["gains"].items()),
    ]


def on_the_way(record: Record) -> list[Block]:
    """When PPO was best: SFT, what PPO kept on the way, and its last policy, over their KL."""
    best = record.results("win_rate").get("best")
    if best is None:
        return []
    is_rate = best["by"] == "win rate"
    cell, gap_cell = (words.estimate, words.in_points) if is_rate else (plain, plain)
    written = record.results("summaries")["policies"]
    rows: list[list[Any]] = [
        [named(x), number(distance(record, x)), number(written[x]["score"]), cell(mean)]
        for x, mean in best["means"].items()
    ]
    gap = best["above_last"]
    better = (
        "It is BETTER than the last." if direction(gap) == "rose" else "None is shown to be better."
    )
    text = (
        f"By {best['by']} on {posts_of(best['chosen_on'])} {named(best['policy'])} is the best."
        f" On the other {whole(best['judged_on'])}, which did not choose, it has"
        f" {cell(best['mean'])}{f', {gap_cell(gap)} against the last' if gap else ''}. {better}"
    )

    def draw(axes: Axes) -> None:
        for _, kl, _, mean in rows:
            axes.plot([kl.value] * 2, [mean.low, mean.high], color=plots.PPO, lw=5, alpha=0.35)
            axes.plot([kl.value], [mean.value], "o", color=plots.PPO)
        axes.set_xlabel("KL from SFT, nats per summary")

    caption = "ppo-N: PPO's policy after update N, at the KL of the next. Bars: 95% intervals."
    panel = plots.Panel(f"{best['by'].capitalize()}{', %' if is_rate else ''}", draw)
    figure = plots.figure("on-the-way", caption, [panel], wide=1.4)
    table = Table(("", "KL", "RM score", f"{best['by']} [95%]"), rows, name="on-the-way")
    return [Heading("When PPO was best"), Text(text), figure, table]


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


def _reading(name: str, gains: Row) -> Block:
    """What the two differences from SFT say together; a note where it is bad news."""
    proxy, gold = gains["proxy"], gains["gold"]
    if proxy is None or gold is None:
        return Note(f"{named(name)}: fewer than two posts have both scores to compare.")
    moves = {scorer: direction(gain) for scorer, gain in gains.items()}
    text = f"{named(name)} against SFT: the proxy {moves['proxy']}, the gold score {moves['gold']}"
    if moves == {"proxy": "rose", "gold": "fell"}:
        over = "This is OVER-OPTIMISATION: the policy learned its reward model's mistakes"
        return Note(f"{text}. {over}.")
    return Text(f"{text}.")


def gain_notes(record: Record) -> list[str]:
    """Policies whose gold score reliably rose only, or more, where they ask at the end and SFT does
    not: the intervals over posts do not overlap. And those whose proxy rose, but not reliably on
    the posts on which neither summary is cut off.
    """
    notes = []
    for name, (added, rest) in by_kind(record, adds_question).items():
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
    for name, (_, rest) in by_kind(record, is_cut_off).items():
        rose = gains.get(name, {}).get("proxy") and direction(gains[name]["proxy"]) == "rose"
        if rose and rest.proxy and direction(rest.proxy) != "rose":
            notes.append(
                f"{named(name)}'s proxy rose, but not reliably where its summary and SFT's both end"
                f" by themselves ({posts_of(rest.posts)}: {plain(rest.proxy)})."
            )
    return notes


class Gains(NamedTuple):
    """Mean differences from SFT on some posts; None on fewer than two."""

    posts: int
    proxy: Row | None
    gold: Row | None


def adds_question(both: pd.DataFrame) -> Any:
    """The posts on which a policy's summary ends with a question and SFT's does not: a habit that a
    reward model may pay for, whatever the post says.
    """
    return both["summary"].map(asks) & ~both[f"summary_{START}"].map(asks)


def asks(summary: str) -> bool:
    """Whether a summary ends with a question."""
    return summary.rstrip(" \n\t\"'”’)").endswith("?")


def is_cut_off(both: pd.DataFrame) -> Any:
    """The posts of which one of both summaries is known not to end: it can score far below all."""
    return both["ends"].isin([False]) | both[f"ends_{START}"].isin([False])


def by_kind(
    record: Record, is_first: Callable[[pd.DataFrame], Any]
) -> dict[str, tuple[Gains, Gains]]:
    """The gains of each policy on the posts of a kind and on the others; without posts of the kind,
    or without a gold score, it is left out.
    """
    frames = {name: posts_frame(record, name) for name in policies_of(record)}
    frames = {name: posts for name, posts in frames.items() if posts["gold"].notna().any()}
    kinds = {}
    for name in [name for name in frames if name != START and START in frames]:
        both = frames[name].merge(frames[START], on="post", suffixes=("", f"_{START}"))
        first = is_first(both).astype(bool)
        if first.any():
            kinds[name] = _gains(both[first]), _gains(both[~first])
    return kinds


def _gains(both: pd.DataFrame) -> Gains:
    posts = both.set_index("post")
    gaps = (posts[scorer] - posts[f"{scorer}_{START}"] for scorer in SCORERS)
    return Gains(len(both), *(mean_gain(x.dropna().to_dict(), texts_of(both)) for x in gaps))
