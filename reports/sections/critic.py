"""PPO's critic in several groups of runs, such as those of ablations: what it explained."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from reports.parts.blocks import Table
from reports.parts.cells import MISSING
from reports.parts.collect import Record, explained_by_critic
from reports.parts.words import number


def table(groups: Mapping[str, Sequence[Record]]) -> Table:
    """A row a group: how much of the returns the critic explained while the policy learned.

    `groups`: name -> its runs; a group may be empty.
    """
    rows: list[list[object]] = []
    for name, runs in groups.items():
        logged = (explained_by_critic(run) for run in runs)
        critics = [critic for critic in logged if critic]
        if not critics:
            rows.append([name, *[MISSING] * 3])
            continue
        means = [number(fmean(critic[key] for critic in critics)) for key in ("first", "last")]
        below = sum(critic["below"] > 0 for critic in critics)
        rows.append([name, *means, f"{below} of {len(critics)}"])
    caption = (
        "Explained variance of the returns (1: all, below 0: less than a constant), mean over"
        " seeds; updates in which the critic learned alone do not count."
    )
    header = ("switch", "policy's first update", "last update", "seeds ever below 0")
    return Table(header, rows, caption)
