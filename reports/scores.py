"""Scores of summaries: the proxy that training raised, and the gold score that judged.

Where the proxy rises and the gold score falls, a policy learned the mistakes of its reward model
(Gao et al. 2022, 2210.10760).
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from eval.scores import REFERENCE, START, mean_gain
from reports.plots import Figure, Panel, color_of, figure
from reports.posts import judged_posts, texts_of
from reports.results import Interval, Json, RunResult, interval_from, kl_from_sft, title_of

ROSE = "rose"
FELL = "fell"
UNCLEAR = "did not reliably move"
UNKNOWN = "is not known"


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """Mean scores of one policy, or of the references, over the held-out posts."""

    name: str
    title: str
    proxy: Interval | None
    gold: Interval | None
    proxy_gain: Interval | None
    """Minus SFT's, on the same posts."""
    gold_gain: Interval | None

    @property
    def proxy_moved(self) -> str:
        """Whether the proxy rose or fell against SFT."""
        return direction(self.proxy_gain)

    @property
    def gold_moved(self) -> str:
        """Whether the gold score rose or fell against SFT."""
        return direction(self.gold_gain)

    @property
    def is_over_optimized(self) -> bool:
        """Whether the proxy rose while the gold score fell."""
        return (self.proxy_moved, self.gold_moved) == (ROSE, FELL)


@dataclass(frozen=True, kw_only=True)
class GoldScores:
    """The scores of a run whose judge gives one, by policy; the references come first."""

    scorer: str
    """What gives the gold score."""
    is_rule: bool
    """Whether that is the rule of the built-in posts."""
    posts: int
    rows: tuple[ScoreRow, ...]


@dataclass(frozen=True, kw_only=True)
class KeptPolicy:
    """SFT, PPO's last policy, or one that was kept during training."""

    title: str
    kl: float | None
    score: float
    mean: Interval
    """The win rate or the gold score."""


@dataclass(frozen=True, kw_only=True)
class BestOfTraining:
    """When PPO was best: chosen on some posts, and judged on the others."""

    is_rate: bool
    title: str
    chosen_on: int
    judged_on: int
    mean: Interval
    above_last: Interval | None
    policies: tuple[KeptPolicy, ...]


@dataclass(frozen=True, kw_only=True)
class GainByKind:
    """A policy's gain over SFT on the posts of one kind, and on the other posts."""

    title: str
    posts: int
    proxy: Interval | None
    gold: Interval | None
    other_posts: int
    other_proxy: Interval | None
    other_gold: Interval | None
    proxy_gain: Interval | None
    """On all posts."""


def direction(gain: Interval | None) -> str:
    """Return whether a score rose or fell, by its interval over posts."""
    if gain is None:
        return UNKNOWN
    if gain.low >= gain.high:  # of one post
        return UNCLEAR
    if gain.is_above(0):
        return ROSE
    return FELL if gain.is_below(0) else UNCLEAR


def gold_scores(run: RunResult) -> GoldScores | None:
    """Return proxy and gold scores; None if the judge gives none."""
    results = run.stages["win_rate"].results.get("scores")
    if results is None:
        return None
    asked = run.stages["judge"].results
    rows = []
    posts = 0
    for name in results["gold"]:
        gains = results["gains"].get(name, {})
        gold = results["gold"].get(name)
        posts = max(posts, gold["posts"] if gold else 0)
        rows.append(
            ScoreRow(
                name=name,
                title=title_of(name, list(run.policies)),
                proxy=interval_from(results["proxy"].get(name)),
                gold=interval_from(gold),
                proxy_gain=interval_from(gains.get("proxy")),
                gold_gain=interval_from(gains.get("gold")),
            )
        )
    return GoldScores(
        scorer=asked["gold"]["label"],
        is_rule=run.judge.kind == "facts",
        posts=posts,
        rows=tuple(sorted(rows, key=lambda row: row.name != REFERENCE)),
    )


def best_of_training(run: RunResult) -> BestOfTraining | None:
    """Return when PPO was best; None if no policy was kept during training."""
    best = run.stages["win_rate"].results.get("best")
    if best is None:
        return None
    summaries = run.stages["summaries"].results["policies"]
    policies = []
    for name, mean in best["means"].items():
        interval = interval_from(mean)
        assert interval is not None
        policies.append(
            KeptPolicy(
                title=title_of(name),
                kl=kl_from_sft(run.stages, name),
                score=summaries[name]["score"],
                mean=interval,
            )
        )
    mean = interval_from(best["mean"])
    assert mean is not None
    return BestOfTraining(
        is_rate=best["by"] == "win rate",
        title=title_of(best["policy"]),
        chosen_on=best["chosen_on"],
        judged_on=best["judged_on"],
        mean=mean,
        above_last=interval_from(best["above_last"]),
        policies=tuple(policies),
    )


def best_of_training_figure(best: BestOfTraining | None) -> Figure | None:
    """Draw the kept policies over their KL from SFT."""
    if best is None:
        return None
    scale = 100 if best.is_rate else 1

    def draw(axes: Axes) -> None:
        color = color_of("ppo")
        for policy in best.policies:
            if policy.kl is None:
                continue
            ends = [scale * policy.mean.low, scale * policy.mean.high]
            axes.plot([policy.kl, policy.kl], ends, color=color, lw=5, alpha=0.35)
            axes.plot([policy.kl], [scale * policy.mean.estimate], "o", color=color)
        axes.set_xlabel("KL from SFT, nats per summary")
        axes.set_ylabel("win rate, %" if best.is_rate else "gold score")

    title = "Win rate" if best.is_rate else "Gold score"
    return figure("during-training", [Panel(title=f"{title} during training", draw=draw)])


# -- on which posts a gain lies --------------------------------------------------------------------


def gains_by_question(run: RunResult) -> list[GainByKind]:
    """Return gains where a policy ends with a question and SFT does not, and on the other posts.

    Reward models may pay for a question at the end, whatever the post says.
    """
    return _gains_by_kind(
        run, lambda both: both["summary"].map(asks) & ~both[f"summary_{START}"].map(asks)
    )


def gains_by_cut_off(run: RunResult) -> list[GainByKind]:
    """Return gains where one of the two summaries is cut off, and on the other posts."""
    return _gains_by_kind(
        run, lambda both: both["ends"].isin([False]) | both[f"ends_{START}"].isin([False])
    )


def asks(summary: str) -> bool:
    """Whether a summary ends with a question."""
    return summary.rstrip(" \n\t\"'”’)").endswith("?")


def _gains_by_kind(
    run: RunResult, is_of_kind: Callable[[pd.DataFrame], pd.Series]
) -> list[GainByKind]:
    """Return each policy's gains on the posts of a kind and on the others.

    A policy without such posts, or without gold scores, is left out.
    """
    frames = {}
    for policy in run.policies:
        posts = judged_posts(run, policy)
        if posts["gold"].notna().any():
            frames[policy] = posts
    if START not in frames:
        return []

    scores: Json = run.stages["win_rate"].results.get("scores") or {}
    gains = scores.get("gains", {})
    kinds = []
    for policy, posts in frames.items():
        if policy == START:
            continue
        both = posts.merge(frames[START], on="post", suffixes=("", f"_{START}"))
        of_kind = is_of_kind(both).astype(bool)
        if not of_kind.any():
            continue
        inside = both[of_kind]
        outside = both[~of_kind]
        kinds.append(
            GainByKind(
                title=run.policies[policy].title,
                posts=len(inside),
                proxy=_mean_gain(inside, "proxy"),
                gold=_mean_gain(inside, "gold"),
                other_posts=len(outside),
                other_proxy=_mean_gain(outside, "proxy"),
                other_gold=_mean_gain(outside, "gold"),
                proxy_gain=interval_from(gains.get(policy, {}).get("proxy")),
            )
        )
    return kinds


def _mean_gain(both: pd.DataFrame, scorer: str) -> Interval | None:
    """Return the mean difference from SFT; None on fewer than two posts."""
    posts = both.set_index("post")
    gaps = (posts[scorer] - posts[f"{scorer}_{START}"]).dropna()
    return interval_from(mean_gain(gaps.to_dict(), texts_of(both)))
