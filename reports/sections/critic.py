"""PPO's critic in several groups of runs, such as those of ablations: what it explained."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, explained_by_critic
from reports.parts.page import Table
from reports.parts.words import Row, number

Groups = Mapping[str, Sequence[Record]]
"""Name of a group -> its runs; a group may be empty."""
ADVANTAGES_TOLD = ("advantages follow scores", "advantage at EOS")


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
