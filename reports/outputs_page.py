"""The page of summaries that existed already: who is preferred, and whether to believe the judge.

    python -m reports.outputs_page --preset outputs --set outputs.file=outputs.jsonl

is the stage `report` of a run that judges given summaries, and writes what `reports.run_page`
writes for the others: the page, headline.txt and numbers.json.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from eval.stats.formulas import holm
from eval.win_rate import names_of_pair
from reports.parts import plots, run_report, sentences
from reports.parts.blocks import Block, Table, Text
from reports.parts.cells import Number
from reports.parts.collect import Record, judged_row
from reports.parts.run_report import Report, text_table
from reports.parts.words import Row, at_equal_length, judge, percent, posts_of, rate, share, whole
from reports.sections import calibration, judging, made_with, samples
from stages.config.judge import MOST_UNJUDGED

LEVEL = 0.05  # a corrected p-value below it counts as a difference


def report(record: Record, path: Path) -> Report:
    """The report of given summaries."""
    # The given names: where no file can have them.
    numbers = judged_row(record) | {"given_names": record.results("summaries").get("given_names")}
    wins = record.results("win_rate")
    return Report(
        title=f"Judged: {record.name}",
        blocks=blocks(record, numbers, wins),
        numbers=numbers,
        headline=headline(numbers, wins, path),
        without_the_data=True,  # the posts may be others' words
    )


write_report = partial(run_report.write_report, make=report)


def blocks(record: Record, numbers: Row, wins: Row) -> list[Block]:
    """The page, from the result down to the hashes."""
    drawn = [
        (name, plots.OTHER, row["win_rate"], row["low"], row["high"])
        for name, row in in_order(wins).items()
        if has_rate(row)
    ]
    return [
        sentences.lead(answer(wins), sentences.distrust([numbers])),
        table(numbers, wins),
        *plots.win_rate_figure(drawn),
        *sentences.against(sentences.caveats(numbers)),
        *_given_names(numbers),
        *samples.blocks(record),
        *judging.blocks(record, numbers),
        *run_report.prompts([record.settings["judge"]]),
        *calibration.blocks(record),
        *made_with.settings_tables(record.settings, record.preset),
        *made_with.provenance(record),
    ]


def has_rate(system: Row) -> bool:
    """Whether so few of a system's posts are unjudged that its rate may be given."""
    return bool(system["win_rate"] is not None and system["unjudged"] <= MOST_UNJUDGED)


def in_order(wins: Row) -> dict[str, Row]:
    """What the win rates hold of each system, the best raw rate first."""
    worth = {name: row["win_rate"] or 0.0 for name, row in wins["policies"].items()}
    return {name: wins["policies"][name] for name in sorted(worth, key=worth.__getitem__)[::-1]}


def rates(numbers: Row, wins: Row) -> dict[str, list[Number]]:
    """Each system's raw win rate and that at equal length, best first; a dash where too many posts
    are unjudged.
    """
    cells = {}
    for name, system in in_order(wins).items():
        at_length = system["statistics"]["length_controlled"] if has_rate(system) else None
        cells[name] = [rate(numbers, name), at_equal_length(at_length)]
    return cells


def table(numbers: Row, wins: Row) -> Table:
    """All systems, best first."""
    systems = wins["policies"]
    rows = [
        [name, *cells, whole(systems[name]["posts"]), percent(systems[name]["unjudged"])]
        for name, cells in rates(numbers, wins).items()
    ]
    caption = (
        "Best raw win rate first. Win rate: share of the system's judged posts on which its summary"
        " is preferred to the reference, a tie counting half. At equal length: what a model of"
        " order and length leaves; it stands beside the raw rate and not in its place. What the"
        " first paragraph claims holds after Holm's correction for all systems and pairs."
    )
    header = ("", "win rate [95%]", "at equal length", "posts", "unjudged")
    return Table(header, rows, caption, strong=True)


def leads(wins: Row) -> str:
    """Which system leads, which others it is not reliably better than, and where it stands to the
    reference; p-values are corrected after Holm for all systems, and for all pairs of them.
    """
    rated = {name: system for name, system in in_order(wins).items() if has_rate(system)}
    if not rated:
        return "No system has a rate: too many comparisons had no verdict."
    first, *others = rated
    best, corrected = rated[first], holm([system["p_value"] for system in rated.values()])
    win_rate = share(best["win_rate"], best["low"], best["high"])
    stands = f"{win_rate}, and {beside_reference(best, corrected[0])}"
    if not others:
        return f"{first} has {stands}."
    pairs = {frozenset(names_of_pair(name)): gap for name, gap in wins["differences"].items()}
    pairs = {names: gap for names, gap in pairs.items() if names <= {*rated}}
    p_values = holm([gap["p_value"] for gap in pairs.values()])
    apart = {names for names, p in zip(pairs, p_values, strict=True) if p < LEVEL}
    same = [name for name in others if frozenset((first, name)) not in apart]
    lead = f"is inconclusive over {', '.join(same)}" if same else "is reliable"
    return f"{first} leads with {stands}. Its lead {lead}."


def beside_reference(system: Row, corrected: float) -> str:
    """What a system's interval says of it and the reference, where the p-value corrected for the
    number of systems bears it out: the best of many equal ones stands above by chance.
    """
    if corrected < LEVEL and not system["low"] <= sentences.NO_GUESS <= system["high"]:
        above = system["low"] > sentences.NO_GUESS
        return f"reliably {'beats' if above else 'LOSES to'} the reference"
    return "is inconclusive against the reference"


def _given_names(numbers: Row) -> list[Block]:
    """What a file calls the systems whose names no file of ours can have."""
    names = numbers.get("given_names") or {}
    names_given = ", ".join(f"{safe_name} is {name}" for safe_name, name in names.items())
    return [Text(f"Names that no file can have are replaced: {names_given}.")] if names else []


def answer(wins: Row) -> str:
    """Who leads, and what was judged."""
    count = len(wins["policies"])
    many = f"{count} systems'" if count > 1 else "one system's"
    return (
        f"{leads(wins)} We judged {many} summaries of {posts_of(wins['posts'])} as they are:"
        " no run here wrote them. Each was compared with the reference in both orders."
    )


def headline(numbers: Row, wins: Row, path: Path) -> str:
    """The result for a terminal of 80 columns; ends with the page's path."""
    systems = rates(numbers, wins)
    names = shortened([*systems], 22)
    rows = [[name, *cells] for name, cells in zip(names, systems.values(), strict=True)]
    lines = text_table(["", "win rate [95%]", "at equal length"], rows)
    title = f"{numbers['name']}: {posts_of(wins['posts'])}, judged by {judge(numbers)}"
    return run_report.headline(title, [lines], leads(wins), sentences.caveats(numbers), path)


def shortened(names: Sequence[str], width: int) -> list[str]:
    """The names in at most `width` characters; a cut one ends with its number among them."""
    ends = [f"…#{number}" for number in range(1, len(names) + 1)]
    return [
        name if len(name) <= width else name[: width - len(end)] + end
        for name, end in zip(names, ends, strict=True)
    ]
