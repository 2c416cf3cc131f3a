"""Model sizes side by side, and beside the paper: does RLHF work better with a larger model?

    python -m reports.scaling_page --names tiny-s tiny tiny-l

takes all finished seeds of these runs and writes runs/reports/scaling-<names>.md and .html, called
scaling-ladder where the runs are the built-in ladder of presets. The page checks, against what the
runs recorded, that the sizes differ in nothing but the base model.
"""

from collections.abc import Sequence

import pandas as pd

from reports.parts import page, sentences
from reports.parts.blocks import Block, Heading, Text
from reports.parts.collect import Record, find_all
from reports.parts.paired import rows_of
from reports.parts.run_report import stem_about, write_about_runs
from reports.scaling import answers, beside_paper, details
from reports.scaling.measures import RULE, SizeVerdict, frame_of, size_verdicts
from stages.pipeline.grid import LADDER


def main(argv: list[str] | None = None) -> None:
    """Write the comparison and print its verdict."""
    parser = page.arguments("compare model sizes")
    parser.add_argument("--names", nargs="+", required=True, help="runs, one a size")
    page.print_page(lambda args: write_page(args.names, args.judge), parser, argv)


def write_page(names: Sequence[str], judge: str) -> str:
    """Write the page of some runs; its verdicts for the terminal."""
    names = list(dict.fromkeys(names))
    records, left_out = find_all(names, judge)
    verdicts = size_verdicts(frame_of(records))
    title = answers.title(verdicts)
    stem = stem_about("scaling", ladder_of(names) or names)
    path = write_about_runs(stem, title, blocks(records, left_out), names, records)
    return page.for_terminal([f"{title}.", answers.answer(verdicts)], path)


def ladder_of(names: Sequence[str]) -> list[str]:
    """`ladder` and the name of its study, where runs are the built-in ladder in any order."""
    smallest = min(LADDER, key=len)  # every other preset's name begins with it
    study = min(names, key=len).removeprefix(smallest)
    return [f"ladder{study}"] if {f"{preset}{study}" for preset in LADDER} == set(names) else []


def blocks(records: list[Record], left_out: Sequence[str] = ()) -> list[Block]:
    """The page: the answer for each size and its plot, then what it rests on."""
    frame = frame_of(records)
    verdicts, several = size_verdicts(frame), frame["name"].nunique() > 1
    paper_numbers, unlike = beside_paper.rows(records, frame), details.alike(records, frame)
    notes = [*answers.called_out_lines(verdicts), *details.caveats(frame), *unlike]
    content = [
        sentences.lead(answers.answer(verdicts), distrust(frame, verdicts, bool(unlike))),
        answers.answers_table(verdicts),
        *answers.win_rate_figure(frame, paper_numbers),
        *sentences.against([*notes, *details.not_comparable(paper_numbers), *left_out]),
    ]
    if several:
        content += [Heading("Does it grow with size?"), details.growth_table(frame)]
    content += [
        Heading("Seeds and posts apart"),
        Text(RULE),
        details.spreads_table(frame),
        details.seeds_table(frame),
        Heading("Over-optimisation"),
        *answers.over_optimisation(frame),
        *details.paper_blocks(paper_numbers),
        Heading("Everything measured"),
        details.measured_table(frame),
    ]
    return content


def distrust(frame: pd.DataFrame, verdicts: Sequence[SizeVerdict], unlike: bool) -> str:
    """What to distrust, in a few words."""
    collapsed = pd.concat([size.called_out["collapsed"] for size in verdicts])
    counts = {"COLLAPSED": collapsed.sum(), "fell behind": (~collapsed.astype(bool)).sum()}
    reasons = [f"{count} of {len(frame)} seeds {what}" for what, count in counts.items() if count]
    reasons += ["the sizes are NOT alike"] if unlike else []
    reasons += ["one seed"] if any(size.seeds == 1 for size in verdicts) else []
    return sentences.distrust(rows_of(frame), *reasons)


if __name__ == "__main__":
    main()
