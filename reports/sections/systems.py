"""Several systems on the same posts: their table, their differences, and in one sentence who leads.

A standing is what `eval.standings.standings` finds by one judge.
"""

from collections.abc import Mapping
from typing import Any

from eval.rates.table import MOST_UNJUDGED
from reports.parts import plots
from reports.parts.page import Block, Details, Figure, Table, Text
from reports.parts.verdict import (
    MISSING,
    NO_GUESS,
    at_equal_length,
    interval,
    number,
    p_value,
    percent,
    posts_of,
)

Standing = dict[str, Any]
LEVEL = 0.05  # a corrected p-value below it counts as a difference
ROW_HEIGHT = 0.27  # of a plot, for each system
CAPTION = (
    "Best raw win rate first. Rank: what is possible when only differences count that hold after"
    " Holm's correction for all pairs of systems (5%). Win rate: share of posts on which the"
    " summary is preferred to the reference, a tie counting half. At equal length: what a model of"
    " order and length leaves; it stands beside the raw rate and not in its place. EXTRAPOLATED:"
    " few posts have texts of nearly equal length, so the model answers and not the data. Strength:"
    " Bradley-Terry, in logits above the reference, a logistic model clustered by post."
)


def table(found: Standing, explained: bool = True) -> Table:
    """All systems and the reference, best first; `explained`: with what the columns mean."""
    rows = [_row(name, found) for name in found["systems"]]
    words = number(found["reference_words"], 1)
    rows.append(["reference", MISSING, MISSING, MISSING, "0 (by definition)", words, MISSING])
    header = (
        "",
        "rank",
        "win rate [95%]",
        "at equal length",
        "strength [95%]",
        "words",
        "unjudged",
    )
    said = [f"{posts_of(found['posts'])}, the same for all."]
    said += [CAPTION] if explained else []
    if found["with_pairs"]:
        said.append("Strengths rest on the comparisons of every two systems, too.")
    return Table(header, rows, " ".join(said), strong=True)


def _row(name: str, found: Standing) -> list[str]:
    one = found["systems"][name]
    given = one["win_rate"] is not None and one["unjudged"] <= MOST_UNJUDGED
    return [
        name,
        rank(name, found) if given else MISSING,
        rate(one),
        at_equal_length(one["statistics"]["length_controlled"]) if given else MISSING,
        strength(one["strength"]) if given else MISSING,
        number(one["words"], 1),
        percent(one["unjudged"]),
    ]


def rate(one: dict[str, Any]) -> str:
    """A system's raw win rate with its interval; a dash if too many posts are unjudged."""
    if one["win_rate"] is None or one["unjudged"] > MOST_UNJUDGED:
        return f"{MISSING} ({percent(one['unjudged'])} unjudged)"
    return f"{percent(one['win_rate'])} {interval(one['low'], one['high'])}"


def strength(found: dict[str, Any] | None) -> str:
    """A strength with its interval; why there is none."""
    if found is None or found["estimate"] is None:
        return f"{MISSING} ({found['why']})" if found else MISSING
    bounds = ", ".join(number(found[key]) for key in ("low", "high"))
    return f"{number(found['estimate'])} [{bounds}]"


def rank(name: str, found: Standing) -> str:
    """The places that a system may have: `2` or `2-4`, among the systems that have a rate."""
    better, worse = 0, 0
    compared = {one[key] for one in found["differences"] for key in ("first", "second")} | {name}
    for one in found["differences"]:
        if name not in (one["first"], one["second"]) or one["holm"] >= LEVEL:
            continue
        wins = (one["estimate"] > 0) == (name == one["first"])
        better, worse = better + (not wins), worse + wins
    first, last = better + 1, len(compared) - worse
    return str(first) if first == last else f"{first}-{last}"


def differences(found: Standing, explained: bool = True) -> list[Block]:
    """Each two systems on the same posts; none where there is one system."""
    rows = []
    for one in found["differences"]:
        middle, low, high = (100 * one[key] for key in ("estimate", "low", "high"))
        shown = f"{middle:+.1f} points [{low:+.1f}, {high:+.1f}]"
        names = f"{one['first']} less {one['second']}"
        rows.append([names, shown, p_value(one["p_value"]), p_value(one["holm"])])
    if not rows:
        return []
    caption = (
        "Differences of raw win rates on the same posts: bootstrap over posts, not corrected; the"
        " p-value of a paired randomisation test, and the same after Holm's correction"
        f"{f' for all {len(rows)} of them' if len(rows) > 1 else ', which leaves one as it is'}."
    )
    header = ("", "difference [95%]", "p-value", "after Holm")
    return [Details("Each two systems", [Table(header, rows, caption if explained else "")])]


def figure(found: Standing, name: str = "win-rate") -> list[Block]:
    """The win rates with their intervals; none where no system has one."""
    drawn = [
        (system, plots.OTHER, one["win_rate"], one["low"], one["high"])
        for system, one in found["systems"].items()
        if one["win_rate"] is not None and one["unjudged"] <= MOST_UNJUDGED
    ]
    if not drawn:
        return []
    panel, high = plots.win_rates(drawn), max(0.8, ROW_HEIGHT * len(drawn))
    caption = "Bars are 95% intervals over the posts; the dashed line is even with the reference."
    parts = [plots.alone(panel, f"{name}0", 1.75, high)]
    return [Figure(name, caption, plots.together([panel], 1.75, high), parts)]


def leads(found: Standing) -> str:
    """Which system leads, where it stands to the reference, and whether it beats the next surely.

    Of one system: whether it beats the reference, loses to it, or cannot be told from it.
    """
    given = [name for name in found["systems"] if rank_given(found, name)]
    if not given:
        return "No system has a rate: too many comparisons had no verdict."
    best = found["systems"][given[0]]
    stands = beside_reference(best)
    if len(found["systems"]) == 1:
        return f"{given[0]} {stands}: {rate(best)}."
    first = f"{given[0]} leads with {rate(best)}"
    if len(given) == 1:
        return f"{first}, the only one with a rate. It {stands}."
    tests = {one["second"]: one for one in found["differences"] if one["first"] == given[0]}
    if given[1] in tests and tests[given[1]]["holm"] < LEVEL:
        return f"{first} and is surely better than the next, {given[1]}. It {stands}."
    same = [name for name, one in tests.items() if one["holm"] >= LEVEL]
    next_to = f"is not told apart from {', '.join(same or given[1:2])}"
    return f"{first}, but {next_to}. It {stands}."


def beside_reference(one: dict[str, Any]) -> str:
    """What the interval of a system's win rate says of it and the reference."""
    if one["low"] > NO_GUESS:
        return "surely beats the reference"
    if one["high"] < NO_GUESS:
        return "surely LOSES to the reference"
    return "cannot be told from the reference"


def rank_given(found: Standing, name: str) -> bool:
    """Whether so few posts of a system are unjudged that its rate may be given."""
    one = found["systems"][name]
    return bool(one["win_rate"] is not None and one["unjudged"] <= MOST_UNJUDGED)


def left_out(found: Standing) -> list[Block]:
    """A line on the posts that some system lacks."""
    if not found["left_out"]:
        return []
    one = found["left_out"] == 1
    lacking = f"{posts_of(found['left_out'])} {'is' if one else 'are'} left out of the table"
    return [Text(f"{lacking}, because some system has no summary of {'it' if one else 'them'}.")]


def side_by_side(standings: Mapping[str, Standing]) -> Table:
    """The raw win rate of each system by each judge; systems in the first judge's order."""
    first = next(iter(standings.values()))
    rows = [
        [name, *(rate(one["systems"][name]) for one in standings.values())]
        for name in first["systems"]
    ]
    caption = "Raw win rate against the reference by each judge, on the same posts."
    return Table(("", *standings), rows, caption, strong=True)
