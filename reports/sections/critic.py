"""PPO's critic in several groups of runs, such as those of ablations: what it explained."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from reports.parts import plots
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, explained_by_critic
from reports.parts.page import Block, Figure, Table
from reports.parts.paired import mean_curve
from reports.parts.plots import COLORS, Panel
from reports.parts.words import Row, number

Groups = Mapping[str, Sequence[Record]]
"""Name of a group -> its runs; a group may be empty."""
ADVANTAGES_TOLD = ("advantages follow scores", "advantage at EOS")
# Title of a panel -> the metric that is drawn, a curve a group.
PANELS = {
    "Explained variance": "val/explained_variance",
    "Advantages follow scores": "val/advantage_score_correlation",
    "Advantage at EOS": "policy/advantage_at_eos",
    "Reward-model score": "objective/scores",
    "KL from SFT, nats per summary": "objective/kl",
    "Length, tokens": "policy/response_length",
}


def blocks(groups: Groups) -> list[Block]:
    """The table of the groups' critics; of at most len(COLORS) groups the curves, too."""
    return [table(groups), *curves(groups)]


def curves(groups: Groups) -> list[Figure]:
    """What the critic does to PPO, update by update: means of a group's runs.

    More groups than there are colours would hide each other.
    """
    drawn = {name: runs for name, runs in groups.items() if runs}
    if len(drawn) > len(COLORS):
        return []
    panels = [panel for title, key in PANELS.items() for panel in _panel(title, key, drawn)]
    caption = "Update by update while PPO learned; the mean of each switch's seeds."
    return [plots.figure("critics", caption, panels)] if panels else []


def _panel(title: str, key: str, groups: Groups) -> list[Panel]:
    """One metric of all groups; none where nobody logged it."""
    colored = zip(groups.items(), COLORS, strict=False)
    drawn = [(name, mean_curve(runs, "ppo", key), color) for (name, runs), color in colored]
    lines = [plots.curve(rows, key, name, color) for name, rows, color in drawn if rows]
    return [plots.lines(title, lines)] if lines else []


def table(groups: Groups) -> Table:
    """A row a group: how much of the returns the critic explained while the policy learned."""
    critics = {name: critics_of(runs) for name, runs in groups.items()}
    caption = (
        "Explained variance of the returns (1: all, below 0: less than a constant), mean over"
        " seeds; updates in which the critic learned alone do not count."
    )
    header = ["switch", "policy's first update", "last update", "seeds ever below 0"]
    keys = ["first", "last"]
    if any("follows" in critic for seeds in critics.values() for critic in seeds):
        header, keys = [*header, *ADVANTAGES_TOLD], [*keys, "follows", "at_eos"]
        caption += (
            " Means over updates and seeds, where they were logged: the correlation of a token's"
            " advantage with its episode's score less that of its query's others, and the"
            " advantage of EOS, in standard deviations where advantages are whitened."
        )
    rows = []
    for name, seeds in critics.items():
        below = f"{sum(critic['below'] > 0 for critic in seeds)} of {len(seeds)}"
        first, last, *more = (_mean_of(seeds, key) for key in keys)
        rows.append([name, first, last, below if seeds else MISSING, *more])
    return Table(header, rows, caption)


def critics_of(runs: Sequence[Record]) -> list[Row]:
    """How the critic stood in each run that logged it (`explained_by_critic`)."""
    critics = (explained_by_critic(run.folders.get("ppo")) for run in runs)
    return [critic for critic in critics if critic]


def _mean_of(critics: Sequence[Row], key: str) -> Number:
    values = [critic[key] for critic in critics if key in critic]
    return number(fmean(values)) if values else MISSING
