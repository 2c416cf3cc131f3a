"""What training changed: the proxy and the gold score of policies, minus SFT's, by seed.

The proxy is the reward model that a run's own policies learned from. Where it rises and the gold
score falls, the policy learned the proxy's mistakes (Gao et al. 2022, 2210.10760).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from eval.scores import START, mean_gain
from reports.parts import plots
from reports.parts.blocks import Figure, Table
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, judged_row, policies_of
from reports.parts.paired import Entry, posts_frame, texts_of
from reports.parts.words import Row, direction, seeds_mean

SCORERS = {"proxy": "proxy", "gold": "gold score"}
MOST_SEEDS = 6  # that are listed one by one


def gains(entry: Entry, scorer: str) -> list[Row]:
    """The mean difference from SFT on the same posts with its interval over posts, of each run.

    In the scorer's unit. Empty if a run has none: its judge was no reward model, or SFT itself.
    """
    results = [run.results("win_rate").get("scores") or {} for run in entry.runs]
    each = [(scores.get("gains", {}).get(entry.policy) or {}).get(scorer) for scores in results]
    return [gain for gain in each if gain is not None] if None not in each else []


def table(entries: Sequence[Entry]) -> list[Table]:
    """A row for each entry that has gains; no table without any."""
    rows = [
        [entry.label, *(cell for scorer in SCORERS for cell in _cells(gains(entry, scorer)))]
        for entry in entries
        if any(gains(entry, scorer) for scorer in SCORERS)
    ]
    header = [f"{title} - SFT [95%]" for title in SCORERS.values()]
    caption = (
        "Mean differences on the same posts, each scorer in its own unit; intervals over seeds, of"
        " one seed over posts. By seed: with a +, or a -, where the interval over posts leaves out"
        f" 0; of more than {MOST_SEEDS} seeds the lowest, the highest, and how many are + or -."
    )
    columns = ["", header[0], "by seed", header[1], "by seed"]
    return [Table(columns, rows, caption, name="gained")] if rows else []


def _cells(each: Sequence[Row]) -> list[object]:
    """The mean with its interval, and the difference of every seed."""
    if not each:
        return [MISSING] * 2
    middles = [gain["estimate"] for gain in each]
    mean = seeds_mean(middles, lambda value: Number(value, signed=True))
    if len(each) == 1:
        mean = replace(mean, low=each[0]["low"], high=each[0]["high"])
    if len(each) > MOST_SEEDS:
        counts = (f"{sum(_sign(gain) == sign for gain in each)}{sign}" for sign in (" (+)", " (-)"))
        return [mean, f"{min(middles):.2f} to {max(middles):.2f}: {', '.join(counts)}"]
    return [mean, ", ".join(f"{gain['estimate']:.2f}{_sign(gain)}" for gain in each)]


def _sign(gain: Row) -> str:
    """Whether a seed's interval over posts lies above or below 0."""
    return {"rose": " (+)", "fell": " (-)"}.get(direction(gain), "")


def over_kl(entries: Sequence[Entry], colors: Sequence[str]) -> list[Figure]:
    """The gold score - SFT's over the square root of KL from it, a point for each seed.

    None where no entry has both. Source: Gao et al. 2022, 2210.10760, figure 1.
    """
    points = {}
    for entry, color in zip(entries, colors, strict=True):
        kls = [judged_row(run)[f"{entry.policy}/kl"] for run in entry.runs]
        golds = [gain["estimate"] for gain in gains(entry, "gold")]
        if golds and None not in kls:
            points[entry.label] = color, [max(0.0, kl) ** 0.5 for kl in kls], golds

    def draw(axes: Axes) -> None:
        for label, (color, roots, golds) in points.items():
            axes.plot(roots, golds, "o", ms=3.5, color=color, label=label)
        axes.axhline(0.0, color=plots.INK, lw=0.6, ls=":")
        axes.set_xlabel("square root of KL, nats")
        plots.legend(axes)

    about = " ".join(
        f"{label}: " + ", ".join(f"{y:.2f} at {x:.2f}" for x, y in zip(*both, strict=True)) + "."
        for label, (_, *both) in points.items()
    )
    caption = "A point is a seed. Below 0 the policy is worse than SFT by the gold score."
    panel = plots.Panel("Gold score - SFT", draw, about)
    return [plots.figure("gold-over-kl", caption, [panel], wide=1.4)] if points else []


# -- where the gain lies ---------------------------------------------------------------------------


class Gains(NamedTuple):
    """Mean differences from SFT on some posts."""

    posts: int
    proxy: Row | None
    gold: Row | None


def asks(summary: str) -> bool:
    """Whether a summary ends with a question."""
    return summary.rstrip(" \n\t\"'”’)").endswith("?")


# What tells posts apart -> which posts are of the first kind, by the posts of a policy beside
# SFT's. A closing question is a habit that a reward model may pay for, whatever the post says, and
# a summary that is cut off can score far below all others.
KINDS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "question": lambda both: both["summary"].map(asks) & ~both["summary_sft"].map(asks),
    # None: not known.
    "ending": lambda both: both["ends"].isin([False]) | both["ends_sft"].isin([False]),
}


def by_kind(record: Record, key: str) -> dict[str, tuple[Gains, Gains]]:
    """The gains of each policy on the two kinds of posts; without posts of the first, or without a
    gold score, it is left out.
    """
    frames = {name: posts_frame(record, name) for name in policies_of(record)}
    frames = {name: posts for name, posts in frames.items() if posts["gold"].notna().any()}
    kinds = {}
    for name in [name for name in frames if name != START and START in frames]:
        both = frames[name].merge(frames[START], on="post", suffixes=("", f"_{START}"))
        is_first = KINDS[key](both).astype(bool)
        if is_first.any():
            kinds[name] = _gains(both[is_first]), _gains(both[~is_first])
    return kinds


def _gains(both: pd.DataFrame) -> Gains:
    """The mean differences on some posts; None on fewer than two."""
    means = []
    for scorer in SCORERS:
        gaps = zip(both["post"], both[scorer] - both[f"{scorer}_{START}"], strict=True)
        known = {post: gap for post, gap in gaps if gap == gap}
        means.append(mean_gain(known, texts_of(both)))
    return Gains(len(both), *means)
