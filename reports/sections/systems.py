"""Several systems on the same posts: their table, their differences, and in one sentence who leads.

A standing is what `eval.standings.standings` finds by one judge.
"""

from collections.abc import Mapping

from eval.standings import has_rate, has_strength
from reports.parts import plots
from reports.parts.page import Block, Details, Table, Text
from reports.parts.sentences import NO_GUESS
from reports.parts.words import (
    MISSING,
    Row,
    at_equal_length,
    in_points,
    number,
    p_value,
    percent,
    plain,
    posts_of,
    share,
    unjudged_share,
)

LEVEL = 0.05  # a corrected p-value below it counts as a difference
CAPTION = (
    "Rank: what is possible when only differences count that hold after"
    " Holm's correction for all pairs of systems (5%). Win rate: share of posts on which the"
    " summary is preferred to the reference, a tie counting half. At equal length: what a model of"
    " order and length leaves; it stands beside the raw rate and not in its place. EXTRAPOLATED:"
    " few posts have texts of nearly equal length, so the model answers and not the data. Strength:"
    " Bradley-Terry, in logits above the reference, a logistic model clustered by post."
)


def table(standing: Row, explained: bool = True) -> Table:
    """All systems and the reference, best first; `explained`: with what the columns mean."""
    rows = [_row(name, standing) for name in standing["systems"]]
    words = number(standing["reference_words"], 1)
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
    first = "Best raw win rate first."
    if standing["with_pairs"]:
        first = "Strongest first: strengths rest on the comparisons of all pairs of systems, too."
    sentences = [f"{posts_of(standing['posts'])}, the same for all. {first}"]
    sentences += [CAPTION] if explained else []
    return Table(header, rows, " ".join(sentences), strong=True)


def _row(name: str, standing: Row) -> list[str]:
    system = standing["systems"][name]
    given = has_rate(system)
    return [
        name,
        rank(name, standing) if given else MISSING,
        rate(system),
        at_equal_length(system["statistics"]["length_controlled"]) if given else MISSING,
        strength(system["strength"]) if given else MISSING,
        number(system["words"], 1),
        percent(system["unjudged"]),
    ]


def rate(system: Row) -> str:
    """A system's raw win rate with its interval; a dash if too many posts are unjudged."""
    if not has_rate(system):
        return unjudged_share(system["unjudged"])
    return share(system["win_rate"], system["low"], system["high"])


def strength(logits: Row | None) -> str:
    """A strength with its interval; why there is none."""
    lacking = logits is not None and logits["estimate"] is None
    return f"{MISSING} ({logits['why']})" if logits and lacking else plain(logits)


def rank(name: str, standing: Row) -> str:
    """The places that a system may have: `2` or `2-4`, among the systems that have a rate."""
    better, worse = 0, 0
    compared = {pair[key] for pair in standing["differences"] for key in ("first", "second")} | {
        name
    }
    for pair in standing["differences"]:
        if name not in (pair["first"], pair["second"]) or pair["holm"] >= LEVEL:
            continue
        wins = (pair["estimate"] > 0) == (name == pair["first"])
        better, worse = better + (not wins), worse + wins
    first, last = better + 1, len(compared) - worse
    return str(first) if first == last else f"{first}-{last}"


def differences(standing: Row, explained: bool = True) -> list[Block]:
    """All pairs of systems on the same posts; none where there is one system."""
    by_strength = standing["with_pairs"]
    rows = [
        [
            f"{pair['first']} - {pair['second']}",
            _difference(pair) if by_strength else in_points(pair),
            p_value(pair["p_value"]),
            p_value(pair["holm"]),
        ]
        for pair in standing["differences"]
    ]
    if not rows:
        return []
    first = (
        "Differences of strengths, in logits, with intervals that are not corrected (where a system"
        " won or lost everything, its rate head to head and a randomisation test); the p-value"
        if by_strength
        else "Differences of raw win rates on the same posts: bootstrap over posts, not corrected;"
        " the p-value of a paired randomisation test"
    )
    caption = (
        f"{first}, and the same after Holm's correction"
        f"{f' for all {len(rows)} of them' if len(rows) > 1 else ', which leaves one as it is'}."
    )
    header = ("", "difference [95%]", "p-value", "after Holm")
    table_ = Table(header, rows, caption if explained else "")
    return [*matrix(standing), Details("All pairs of systems", [table_])]


def _difference(pair: Row) -> str:
    """A difference of strengths, or the rate head to head that stands for it."""
    if not pair["by_rate"]:
        return plain(pair)
    return f"{share(*(0.5 + pair[key] for key in ('estimate', 'low', 'high')))} head to head"


def matrix(standing: Row) -> list[Block]:
    """How often each system is preferred to each other; none where nobody compared them."""
    if not standing["with_pairs"]:
        return []
    rates = standing["head_to_head"]
    rows = [
        [name, *(percent(of[other]["estimate"]) if other in of else MISSING for other in rates)]
        for name, of in rates.items()
    ]
    caption = (
        "Head to head: the share of posts on which the row's summary is preferred to the column's,"
        " a tie counting half. A strength has all of them in it, and the reference."
    )
    return [Table(("", *rates), rows, caption)]


def figure(standing: Row, name: str = "win-rate") -> list[Block]:
    """The win rates with their intervals; none where no system has one."""
    drawn = [
        (system, plots.OTHER, values["win_rate"], values["low"], values["high"])
        for system, values in standing["systems"].items()
        if has_rate(values)
    ]
    return [*plots.win_rate_figure(drawn, name)]


def leads(standing: Row) -> str:
    """Which system leads, where it stands to the reference, and whether it beats the next reliably.

    Of one system: whether it beats the reference, loses to it, or is inconclusive against it. The
    leader is that of the rates, or of the strengths where all pairs were compared.
    """
    given = [name for name, system in standing["systems"].items() if has_rate(system)]
    if not given:
        return "No system has a rate: too many comparisons had no verdict."
    best = standing["systems"][given[0]]
    stands = beside_reference(best, standing["with_pairs"])
    if len(standing["systems"]) == 1:
        return f"{given[0]} {stands}: {rate(best)}."
    first = f"{given[0]} leads with {rate(best)}"
    if standing["with_pairs"] and has_strength(best):
        first = f"{given[0]} leads by strength, {strength(best['strength'])} logits"
    if len(given) == 1:
        return f"{first}, the only one with a rate. It {stands}."
    tests = {pair["second"]: pair for pair in standing["differences"] if pair["first"] == given[0]}
    same = [name for name, x in tests.items() if x["holm"] >= LEVEL or x["estimate"] <= 0]
    if given[1] in tests and given[1] not in same:
        return f"{first} and is reliably better than the next, {given[1]}. It {stands}."
    next_to = f"its lead over {', '.join(same or given[1:2])} is inconclusive"
    return f"{first}, but {next_to}. It {stands}."


def beside_reference(system: Row, by_strength: bool = False) -> str:
    """What a system's interval says of it and the reference, where the p-value corrected for the
    number of systems bears it out: the best of many equal ones stands above by chance. Where there
    is no strength, the interval of the rate speaks.
    """
    by_strength = by_strength and has_strength(system)
    bounds, even = (system["strength"], 0.0) if by_strength else (system, NO_GUESS)
    if system.get("holm", 1.0) < LEVEL and not bounds["low"] <= even <= bounds["high"]:
        return f"reliably {'beats' if bounds['low'] > even else 'LOSES to'} the reference"
    return "is inconclusive against the reference"


def left_out(standing: Row) -> list[Block]:
    """A line on the posts that some system lacks."""
    if not standing["left_out"]:
        return []
    single = standing["left_out"] == 1
    lacking = f"{posts_of(standing['left_out'])} {'is' if single else 'are'} left out of the table"
    return [Text(f"{lacking}, because some system has no summary of {'it' if single else 'them'}.")]


def side_by_side(standings: Mapping[str, Row]) -> Table:
    """The raw win rate of each system by each judge; systems in the first judge's order."""
    first = next(iter(standings.values()))
    rows = [
        [name, *(rate(standing["systems"][name]) for standing in standings.values())]
        for name in first["systems"]
    ]
    caption = "Raw win rate against the reference by each judge, on the same posts."
    return Table(("", *standings), rows, caption, strong=True)
