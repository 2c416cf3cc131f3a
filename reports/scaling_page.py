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
from reports.parts.collect import MEMORY_KNOBS, Record, find_all
from reports.parts.paired import rows_of, settings_apart
from reports.parts.run_report import stem_about, write_about_runs
from reports.scaling import answers, beside_paper, details
from reports.scaling.measures import RULE, SizeVerdict, frame_of, size_verdicts, sizes
from stages.driving.grid import LADDER

# What may differ between sizes: the base model itself, and how batches are cut.
BASE = ("base.checkpoint", "base.hidden_size", "base.num_layers", "base.num_heads")
FREE = (*MEMORY_KNOBS, *BASE)


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
    paper_numbers, unlike = beside_paper.rows(records, frame), alike(records, frame)
    notes = [*answers.called_out_lines(verdicts), *caveats(frame), *unlike]
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


def caveats(frame: pd.DataFrame) -> list[str]:
    """What to hold against the comparison."""
    rows = rows_of(frame)
    lines = sentences.notes_of_judges(rows)
    if not frame["pretrained"].all():
        lines.append(
            "Models without pretraining are among these: this is a test of the pipeline, not of"
            " the paper's claim."
        )
    few = [name for name, seeds in sizes(frame) if len(seeds) < 2]
    if few:
        lines.append(f"One seed only: {', '.join(few)}. How much seeds differ there is unknown.")
    lines += sentences.critic_notes(rows)
    for row in rows:
        lines += [f"{row['name']} seed {row['seed']}: {line}" for line in sentences.unjudged(row)]
    return lines


def alike(records: list[Record], frame: pd.DataFrame) -> list[str]:
    """A warning for each way in which the sizes differ but should not."""
    different = settings_apart({f"{x.name}/{x.seed}": [x] for x in records}, FREE)
    warnings = [
        f"The sizes are NOT alike: {name} differs ({' / '.join(sorted({*row.dropna()}))})."
        for name, row in different.iterrows()
    ]
    for column, what in (("judge", "The judge"), ("posts", "The number of posts judged")):
        if frame[column].nunique() > 1:
            values = " / ".join(str(value) for value in frame[column].unique())
            warnings.append(f"{what} differs between the runs ({values}).")
    if len({frozenset(seeds["seed"]) for _, seeds in sizes(frame)}) > 1:
        warnings.append("The sizes were run with different seeds.")
    return warnings


if __name__ == "__main__":
    main()
