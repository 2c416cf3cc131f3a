"""The page of one run: what came out, against what, how sure, and everything it was made with.

    python -m reports.run_page --preset tiny --seed 44413

writes into runs/<name>/seed<k>/report/<judge>/: <name>-seed<k>.md and .html, the plots of the
Markdown page, headline.txt (the result tables for the terminal) and numbers.json (the run's row).
`public/` holds the page once more without the texts of real data: `make publish` takes that one.
"""

from pathlib import Path

from reports.parts import paper, plots, run_report, sentences
from reports.parts.collect import Record, judged_row, numbers_of
from reports.parts.page import Block, Details, Heading, Note, Table, Text
from reports.parts.run_report import Report, hashes, text_table
from reports.parts.words import (
    MISSING,
    STRENGTH,
    Row,
    above_sft,
    accuracy,
    counted,
    judge,
    named,
    number,
    percent,
    rate,
    whole,
)
from reports.sections import calibration, curves, judging, made_with, samples, scores
from stages.settings.config import Config

MOST_GROUPS = 12
RM_GROUPS = (
    ("by_split", "split"),
    ("by_strength", STRENGTH),
    ("by_batch", "batch"),
    ("by_policies", "pair of policies"),
)


def main(argv: list[str] | None = None) -> None:
    """Write and print the report of one finished run."""
    run_report.print_report(argv, "report one run", report)


def write_report(config: Config) -> str:
    """Write the page and the headline of one finished run; returns the headline.

    Raises UserError, with the make command to run, if a stage is missing or stale.
    """
    return run_report.write_report(config, report)


def report(record: Record, path: Path) -> Report:
    """The report of a run, or of a policy that others trained."""
    if record.is_released:
        numbers = judged_row(record) | {"name": record.name, "seed": record.seed}
        shown, text = released_blocks(record, numbers), released_headline(numbers, path)
    else:
        numbers = numbers_of(record)
        shown, text = blocks(record), headline(numbers, path)
    return Report(
        title=f"Run {record.name}, seed {record.seed}",
        blocks=shown,
        numbers=numbers,
        headline=text,
        without_the_data=record.has_real_texts,
    )


def blocks(record: Record) -> list[Block]:
    """The page, from the result down to the hashes."""
    numbers = numbers_of(record)
    return [
        Text(" ".join(sentences.opening(numbers)), lead=True),
        *(Note(caveat) for caveat in sentences.caveats(numbers)),
        *_result(numbers),
        *_beside_the_paper(numbers),
        *scores.blocks(record),
        *scores.spread_blocks(record),
        *judging.blocks(record, numbers),
        *calibration.blocks(record),
        Heading("What was trained"),
        Text(sentences.what_was_trained(numbers)),
        *curves.blocks(record),
        *_reward_model(record),
        *curves.dpo_blocks(record),
        *samples.blocks(record),
        *samples.training_blocks(record),
        *made_with.from_hub(record.results("base")),
        *made_with.lengths(record.results("base")["tokens"], record.settings["data"]),
        *made_with.rows(record.results("base")),
        *made_with.settings_tables(record.settings, record.preset),
        *made_with.provenance(record, hashes(record)),
    ]


def released_blocks(record: Record, numbers: Row) -> list[Block]:
    """The page of a policy that others trained: what there is of the other page."""
    return [
        *made_with.summary(record, numbers),
        *(Note(caveat) for caveat in sentences.judged_caveats(numbers)),
        Heading("Result"),
        _result_table(numbers),
        *scores.blocks(record),
        *judging.blocks(record, numbers),
        *calibration.blocks(record),
        *samples.blocks(record),
        *made_with.lengths(record.results("base")["tokens"], record.settings["data"]),
        *made_with.settings_tables(record.settings, record.preset),
        *made_with.provenance(record, hashes(record)),
    ]


def released_headline(numbers: Row, path: Path) -> str:
    """The result of a released policy for a terminal of 80 columns; ends with the page's path."""
    title = f"{numbers['name']}: {whole(numbers['posts'])} held-out posts, judged by"
    return run_report.headline(
        f"{title} {judge(numbers)}", _tables(numbers), "", sentences.judged_caveats(numbers), path
    )


def headline(numbers: Row, path: Path) -> str:
    """The result for a terminal of 80 columns; its last line is the page's path."""
    title = f"{numbers['name']}, seed {numbers['seed']}: {whole(numbers['posts'])} held-out posts,"
    pairs = f"{percent(numbers['accuracy'])} of {whole(numbers['pairs'])} held-out pairs right"
    return run_report.headline(
        f"{title} judged by {judge(numbers)}",
        _tables(numbers),
        f"{sentences.beats_sft(numbers)}. Reward model: {pairs}.",
        sentences.caveats(numbers),
        path,
    )


def _tables(numbers: Row) -> list[list[str]]:
    return [text_table(*result_rows(numbers)), text_table(*judging.short_rows(numbers))]


def result_rows(numbers: Row) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the result table, for the page and for the terminal."""
    header = ["", "win rate [95%]", "ROUGE-L", "tokens", "EOS", "RM score", "KL"]
    reference = ["reference", MISSING, MISSING, number(numbers["reference/tokens"], 1), MISSING]
    rows = [[*reference, number(numbers["reference/score"]), MISSING]]
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
    rates = [
        (
            named(policy),
            plots.color_of(policy),
            *(numbers[f"{policy}/{key}"] for key in ("win_rate", "low", "high")),
        )
        for policy in numbers["policies"]
        if numbers[f"{policy}/win_rate"] is not None
    ]
    caption = (
        "Bars are 95% intervals over the posts; the dashed line is even with the reference."
        f" {named(numbers['policy'])} against SFT on the same posts: {above_sft(numbers)}."
        " Another seed can differ by more than these intervals, which speak of the posts only."
    )
    if len(rates) < len(numbers["policies"]):
        caption += " A policy with too many posts unjudged has no rate, so it is not drawn."
    return [
        Heading("Result"),
        _result_table(numbers),
        plots.figure("win-rate", caption, [plots.win_rates(rates)], wide=1.75, high=0.8),
    ]


def _result_table(numbers: Row) -> Table:
    header, rows = result_rows(numbers)
    caption = (
        f"{whole(numbers['posts'])} held-out posts, judged by {judge(numbers)}. Win rate:"
        " share of posts on which the summary is preferred to the reference, a tie counting half."
        " EOS: share of the summaries that end by themselves. RM score: the reward model's,"
        " where references of the training posts average 0. KL: nats per summary from SFT, over"
        " the last 5% of the updates, at least one."
    )
    return Table(header, rows, caption, strong=True)


def _beside_the_paper(numbers: Row) -> list[Block]:
    title = Heading("Beside the paper")
    if not paper.is_comparable(numbers["preset"]):
        reason = "with this preset neither the model nor the judge is the paper's"
        return [title, Text(f"The paper's numbers are not comparable with this run: {reason}.")]
    header, rows = paper.beside({"this run": numbers})
    made: list[Block] = [title, Table(header, rows, paper.caption())]
    if paper.size_of(numbers["preset"]) is None:
        made.append(Text(f"The paper has no run of the size of {numbers['preset']}."))
    labels = Table(("label", "meaning"), paper.labels())
    return [*made, Details("How far to trust the paper's numbers", [labels])]


def _reward_model(record: Record) -> list[Block]:
    results = record.results("rm")
    text = (
        f"On held-out comparisons the reward model ranks {accuracy(results)}"
        f" of {whole(results['pairs'])} pairs as the labellers did (loss"
        f" {number(results['loss'], 3)})."
    )
    tables = [_group_table(record, key, what) for key, what in RM_GROUPS if results[key]]
    if results["cnndm"]:
        news = results["cnndm"]
        cells = ["CNN/DM", counted(news), whole(news["pairs"])]
        tables.append(Table(("news articles", "accuracy [95%]", "pairs"), [cells]))
    names = {"rm": "the reward model", "dpo": "DPO's implicit reward"}
    scorers = {
        names[scorer]: record.results(scorer) for scorer in names if scorer in record.manifests
    }
    entry = paper.load()["rm_calibration"]
    size = paper.size_of(record.preset)
    shares = entry["share"].get(size, ())
    start, width = entry["first_center"], entry["bin_width"]
    theirs = [(start + width * index, share) for index, share in enumerate(shares)]
    caption = (
        "Calibration: share of pairs ranked right by the gap between their scores (dots grow with"
        " the number of pairs), beside what the sigmoid of the gap promises."
    )
    drawn = plots.calibration(results["calibration"], theirs)
    return [
        Heading("Reward model"),
        Text(text),
        *scores.length_blocks(scorers),
        *tables,
        plots.figure("calibration", caption, [drawn], wide=1.4, high=1.2),
        _normalization(record),
    ]


def _group_table(record: Record, key: str, what: str) -> Table:
    groups = record.results("rm")[key]
    names = sorted(groups, key=_natural)
    caption = ""
    if len(names) > MOST_GROUPS and key == "by_policies":
        names = sorted(names, key=lambda name: (-groups[name]["pairs"], name))[:MOST_GROUPS]
        caption = f"The {MOST_GROUPS} most frequent of {len(groups)}."
    rows = [[n, counted(groups[n]), whole(groups[n]["pairs"])] for n in names]
    header = [what, "accuracy [95%]", "pairs"]
    size = paper.size_of(record.preset)
    if key == "by_strength":
        caption = "1: slightly better, 4: far better."
    if key == "by_strength" and size:
        theirs = paper.load()["rm_accuracy_by_confidence"]["mean"]
        header.append(f"paper {size.upper()}")
        points = (theirs.get(str(5 + int(name)), {}) for name in names)
        rows = [
            [*cells, percent(shares.get(size))] for cells, shares in zip(rows, points, strict=True)
        ]
        caption += " The paper's: where the second summary was chosen (its confidence 6 to 9)."
    return Table(header, rows, caption)


def _natural(name: str) -> tuple[str, int, str]:
    digits = "".join(letter for letter in name if letter.isdigit())
    return name.rstrip("0123456789"), int(digits or 0), name


def _normalization(record: Record) -> Table:
    results = record.results("normalize")
    share = percent(results["padding_difference_over_0.01"])
    keys = ("mean_before", "std", "minimum", "maximum", "mean_after", "standard_error")
    header = (
        "references|mean before|spread|lowest|highest|mean after|standard error"
        "|moved by padding|by over 0.01"
    )
    what = f"{results['references']:,} of the training posts"
    cells = [
        *(number(results[key], 3) for key in keys),
        f"{results['padding_difference_mean']:.1e}",
    ]
    caption = (
        "Normalization: the mean score of the reference summaries is taken off, so that a summary"
        " as good as a person's scores about 0. Padding on the other side should move nothing."
    )
    return Table(header.split("|"), [[what, *cells, share]], caption)


if __name__ == "__main__":
    main()
