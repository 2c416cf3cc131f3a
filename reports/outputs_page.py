"""The page of summaries that existed already: who is preferred, and whether to believe the judge.

    python -m reports.outputs_page --preset outputs --set outputs.file=outputs.jsonl

is the stage `report` of a run that judges given summaries, and writes what `reports.run_page`
writes for the others: the page, headline.txt and numbers.json.
"""

from functools import partial
from pathlib import Path

from eval.standings import has_rate, standings
from eval.win_rate import summary_texts
from reports.parts import run_report, sentences
from reports.parts.collect import Record, judged_row
from reports.parts.page import Block, Heading, Text
from reports.parts.run_report import Report, hashes
from reports.parts.words import Row, at_equal_length, judge, posts_of
from reports.sections import calibration, judging, made_with, samples, systems
from stages.driving.start import run_stage
from stages.running.progress import shortened


def main(argv: list[str] | None = None) -> None:
    """Write and print the report."""
    print(run_stage("report", write_report, argv, "report summaries that existed already"), end="")


def report(record: Record, path: Path) -> Report:
    """The report of given summaries."""
    numbers = judged_row(record) | {"name": record.name, "seed": record.seed}
    summaries = record.results("summaries")  # where the file had such systems
    numbers |= {key: summaries.get(key) for key in ("reference_system", "given_names")}
    numbers |= {"differences": {}}  # the table of systems has them, corrected for their number
    judgements = record.rows("judge", "judgements.jsonl")
    standing = standings(judgements, summary_texts(record.folders["summaries"]))
    return Report(
        title=f"Judged: {record.name}",
        blocks=blocks(record, numbers, standing),
        numbers=numbers | {"standings": standing},
        headline=headline(numbers, standing, path),
        without_the_data=True,  # the posts may be others' words
    )


write_report = partial(run_report.write_report, make=report)


def blocks(record: Record, numbers: Row, standing: Row) -> list[Block]:
    """The page, from the result down to the hashes."""
    return [
        sentences.lead(answer(numbers, standing), sentences.distrust([numbers])),
        systems.table(standing),
        *systems.figure(standing),
        *sentences.against(caveats(numbers)),
        Heading("All pairs of systems"),
        *systems.left_out(standing),
        *_given_names(numbers),
        *systems.differences(standing),
        *samples.blocks(record),
        *judging.blocks(record, numbers),
        *run_report.prompts([record.settings["judge"]]),
        *calibration.blocks(record),
        *made_with.settings_tables(record.settings, record.preset),
        *made_with.provenance(record, hashes(record)),
    ]


def caveats(numbers: Row) -> list[str]:
    """What to hold against the numbers; that the reference is a system comes first."""
    system = numbers.get("reference_system")
    if not system:
        return sentences.judged_caveats(numbers)
    place = (
        f"The reference is the system {system}. The controls are made from its summaries, whose"
        " worth is not known: a judge that fails them may have read well."
    )
    return [place, *sentences.judged_caveats(numbers)]


def _given_names(numbers: Row) -> list[Block]:
    """What a file calls the systems whose names no file of ours can have."""
    names = numbers.get("given_names") or {}
    names_given = ", ".join(f"{ours} is {given}" for ours, given in names.items())
    return [Text(f"Names that no file can have are replaced: {names_given}.")] if names else []


def answer(numbers: Row, standing: Row) -> str:
    """Who leads, and what was judged."""
    count = len(standing["systems"])
    many = f"{count} systems'" if count > 1 else "one system's"
    system = numbers.get("reference_system")
    which = f" which is the system {system}," if system else ""
    return (
        f"{systems.leads(standing)} We judged {many} summaries of {_posts(standing)} as they are:"
        f" no run here wrote them. Each was compared with the reference,{which} in"
        " both orders."
    )


def _posts(standing: Row) -> str:
    """How many posts the rates rest on, and of how many where some system lacks others."""
    if not standing["left_out"]:
        return posts_of(standing["posts"])
    everything = standing["posts"] + standing["left_out"]
    return f"{posts_of(standing['posts'])} that all have (of {everything:,})"


def headline(numbers: Row, standing: Row, path: Path) -> str:
    """The result for a terminal of 80 columns; ends with the page's path."""
    names = shortened(list(standing["systems"]), 22)
    lines = [f"  {'':22} {'win rate [95%]':22} at equal length"]
    for name, system in zip(names, standing["systems"].values(), strict=True):
        length = system["statistics"]["length_controlled"] if has_rate(system) else None
        line = f"  {name:22} {systems.rate(system):22} {at_equal_length(length)}"
        lines.append(line[:80].rstrip())
    title = f"{numbers['name']}: {_posts(standing)}, judged by {judge(numbers)}"
    leads = systems.leads(standing)
    return run_report.headline(title, [lines], leads, caveats(numbers), path)


if __name__ == "__main__":
    main()
