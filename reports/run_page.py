"""The page of one run: what came out, against what, how sure, and everything it was made with.

    python -m reports.run_page --preset tiny --seed 44413

writes into runs/<name>/seed<k>/report/<judge>/: <name>-seed<k>.md and .html, the plots of the
Markdown page, headline.txt (the result tables for the terminal) and numbers.json (the run's row).
`public/` holds the page once more without the texts of real data: `make publish` takes that one.
"""

from functools import partial
from pathlib import Path

from reports.parts import plots, run_report, sentences
from reports.parts.blocks import Block, Heading, Table, Text
from reports.parts.cells import MISSING
from reports.parts.collect import Record, judged_row, numbers_of
from reports.parts.run_report import Report, text_table
from reports.parts.words import Row, at_equal_length, judge, named, number, percent, rate, whole
from reports.sections import calibration, curves, judging, made_with, reward, samples, scores


def report(record: Record, path: Path) -> Report:
    """The report of a run, or of a policy that others trained."""
    return Report(
        title=f"{record.name}, seed {record.seed}: {sentences.wins_of(row_of(record))}",
        blocks=blocks(record),
        numbers=row_of(record),
        headline=headline(row_of(record), path),
        without_the_data=record.has_real_texts,
    )


write_report = partial(run_report.write_report, make=report)


def row_of(record: Record) -> Row:
    """The run's numbers; of a policy that others trained those of the evaluation."""
    return judged_row(record) if record.is_released else numbers_of(record)


def blocks(record: Record) -> list[Block]:
    """The page, from the result down to the hashes; of others' policy what there is of it."""
    numbers, released = row_of(record), record.is_released
    return [
        made_with.summary(record, numbers) if released else sentences.opening(numbers),
        *_result(numbers),
        *samples.example(record),
        *sentences.against([*sentences.caveats(numbers), *scores.gain_notes(record)]),
        *_summaries(record, numbers),
        *scores.on_the_way(record),
        *([Text(made_with.scored_by(record))] if released else []),
        *samples.blocks(record),
        *judging.blocks(record, numbers),
        *run_report.prompts([record.settings["judge"]]),
        *calibration.blocks(record),
        *([] if released else _training(record, numbers)),
        *made_with.data(record),
        *made_with.settings_tables(record.settings, record.preset),
        *made_with.provenance(record),
    ]


def _training(record: Record, numbers: Row) -> list[Block]:
    """The sections on what was trained."""
    return [
        Heading("Learning curves"),
        Text(f"{sentences.what_was_trained(numbers)} {plots.BAND}"),
        *curves.blocks(record),
        *reward.blocks(record),
    ]


def headline(numbers: Row, path: Path) -> str:
    """The result for a terminal of 80 columns; its last line is the page's path."""
    title = f"{numbers['name']}, seed {numbers['seed']}: {whole(numbers['posts'])} held-out posts,"
    title += f" judged by {judge(numbers)}"
    sentence = ""
    if "accuracy" in numbers:
        pairs = "no pairs to rank"
        if numbers["pairs"]:
            right, count = percent(numbers["accuracy"]), whole(numbers["pairs"])
            pairs = f"{right} of {count} held-out pairs right"
        scorer = numbers["taken"] or "Reward model"
        sentence = f"{sentences.beats_sft(numbers)}. {scorer}: {pairs}."
    tables = [text_table(*result_rows(numbers)), text_table(*judging.short_rows(numbers))]
    return run_report.headline(title, tables, sentence, sentences.caveats(numbers), path)


def result_rows(numbers: Row) -> tuple[list[str], list[list[object]]]:
    """Header and rows of the result table, for the page and for the terminal."""
    header = ["", "win rate [95%]", "ROUGE-L", "tokens", "EOS", "RM score", "KL"]
    reference = ["reference", MISSING, MISSING, number(numbers["reference/tokens"], 1), MISSING]
    rows: list[list[object]] = [[*reference, number(numbers["reference/score"]), MISSING]]
    for policy in numbers["policies"]:
        rows.append(
            [
                named(policy),
                rate(numbers, policy),
                number(numbers[f"{policy}/rougeL"], 3),
                number(numbers[f"{policy}/tokens"], 1),
                percent(numbers[f"{policy}/eos_rate"]),
                number(numbers[f"{policy}/score"]),
                number(numbers[f"{policy}/kl"], 1),
            ]
        )
    return header, rows


def _result(numbers: Row) -> list[Block]:
    """The first screen's table and picture."""
    policies = numbers["policies"]
    rated = [policy for policy in policies if numbers[f"{policy}/win_rate"] is not None]
    rows = []
    for policy in policies:
        counts = [whole(numbers[f"{policy}/{key}"]) for key in ("wins", "ties", "losses")]
        at_length = numbers[f"{policy}/statistics"]["length_controlled"]
        length = at_equal_length(at_length) if policy in rated else MISSING
        tokens = number(numbers[f"{policy}/tokens"], 1)
        rows.append([named(policy), *counts, rate(numbers, policy), length, tokens])
    caption = (
        f"{whole(numbers['posts'])} held-out posts against the reference, which has"
        f" {number(numbers['reference/tokens'], 1)} tokens; a tie counts half. 95% intervals over"
        " the posts: another seed can differ by more."
    )
    header = ("", "won", "tied", "lost", "win rate [95%]", "at equal length [95%]", "tokens")
    drawn = [
        (
            named(policy),
            plots.color_of(policy),
            *(numbers[f"{policy}/{key}"] for key in ("win_rate", "low", "high")),
        )
        for policy in rated
    ]
    if len(rated) < len(policies):
        caption += " A policy with too many posts unjudged has no rate, so it is not drawn."
    return [Table(header, rows, caption, strong=True, name="result"), *plots.win_rate_figure(drawn)]


def _summaries(record: Record, numbers: Row) -> list[Block]:
    """What the summaries are like: the measures, and proxy beside gold."""
    header, rows = result_rows(numbers)
    caption = (
        "Means over the held-out posts. EOS: share of the summaries that end by themselves. RM"
        " score: the reward model's, where references of the training posts average 0. KL: nats per"
        " summary from SFT, over the last 5% of the updates, at least one."
    )
    without_rate = [header[0], *header[2:]]
    return [
        Heading("The summaries"),
        Table(without_rate, [[row[0], *row[2:]] for row in rows], caption, name="summaries"),
        *scores.blocks(record),
    ]
