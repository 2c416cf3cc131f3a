"""The page of policies of finished runs beside the first of them.

    python -m reports.compare_page --runs tiny:ppo tiny:sft tiny/55513:dpo

writes compare-<a>-<b>-....md and .html to runs/reports/; `public/` there holds the page once more
without the texts of real data. Everything was judged against the references before: nothing is
asked here. `reports.versus_page` shows two policies that were judged against each other.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from reports.parts import page, plots, verdict
from reports.parts.blocks import Figure
from reports.parts.collect import Record, judged_row
from reports.parts.comparison import (
    Against,
    Entry,
    against,
    changed_posts,
    collect,
    flips,
    mean_curve,
    settings_apart,
    some_of_each,
)
from reports.parts.page import PUBLIC, Block, Heading, Note, Table, Text
from reports.parts.run_report import note_sources
from reports.parts.sample_browser import SampleBrowser, fitting
from reports.parts.sample_rows import BETTER, FAILING, UNCHANGED, UNJUDGED, WORSE
from reports.parts.verdict import MISSING, number, p_value, percent, whole
from reports.sections.samples import sample, without_the_data
from stages.running.files import read_json, write_json
from stages.settings.config import TOY, UserError, fail

MOST_CHANGED, MOST_OTHERS = 200, 100  # posts on the page
SHOWN = 4  # changed posts that stand where no script runs
COLORS = (plots.SFT, plots.PPO, plots.RM, plots.PAPER, plots.OTHER)
CHANGES = {
    BETTER: "better",
    WORSE: "worse",
    FAILING: "both lose",
    UNCHANGED: "unchanged",
    UNJUDGED: "unjudged",
}
# Stage -> its curves; those of a stage are drawn where two entries have curves of their own.
CURVES: dict[str, tuple[tuple[str, str], ...]] = {
    "sft": (("loss/train", "SFT loss, nats per token"),),
    "rm": (("accuracy/train", "RM accuracy on training pairs"),),
    "ppo": (
        ("objective/scores", "PPO: reward-model score"),
        ("objective/kl", "PPO: KL from SFT, nats per summary"),
        ("objective/rlhf_reward", "PPO: score less KL penalty"),
        ("policy/response_length", "PPO: length, tokens"),
        ("policy/eos_rate", "PPO: responses that end"),
        ("objective/entropy", "PPO: entropy, nats"),
        ("loss/value_avg", "PPO: value loss"),
        ("val/explained_variance", "PPO: explained variance"),
    ),
    "dpo": (("loss/train", "DPO loss"), ("rewards/margins", "DPO margin, reward units")),
}
SHARES = ("accuracy/train", "policy/eos_rate")


def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdicts and its path."""
    parser = argparse.ArgumentParser(description="policies of finished runs side by side")
    parser.add_argument("--runs", nargs="+", default=[], help="name[/seed][:policy], two or more")
    parser.add_argument("--judge", default="", help="where runs were judged by several")
    args = parser.parse_args(argv)
    try:
        path, conclusions = write_page(args.runs, args.judge)
    except UserError as error:
        fail(error)
    print(page.for_terminal(conclusions, path))


def write_page(texts: Sequence[str], judge: str = "") -> tuple[Path, list[str]]:
    """Write the page about what some texts name; its path and its verdicts.

    Raises UserError where they cannot be compared.
    """
    entries, left_out = collect(texts, judge)
    first, *others = entries
    compared = [against(entry, first) for entry in others]
    stem = "-".join(
        ["compare", *(entry.label.replace("/", "-").replace(":", "-") for entry in entries)]
    )
    title = f"{first.label} beside {', '.join(entry.label for entry in others)}"
    made = blocks(entries, compared, left_out)
    folder = page.beside_the_runs()
    path = page.write(folder, stem, title, made)
    records = [run for entry in entries for run in entry.runs]
    if any(is_real(run) for run in records):
        (folder / PUBLIC).mkdir(exist_ok=True)
        page.write(folder / PUBLIC, stem, title, without_the_data(made))
    labels = " ".join(entry.label for entry in entries)
    names = list(dict.fromkeys(entry.name for entry in entries))
    note_sources(path, "compare", names, records)
    note = path.with_suffix(".json")
    write_json(note, read_json(note) | {"command": f'make compare RUNS="{labels}"'})
    return path, [conclusion(pair) for pair in compared]


def is_real(run: Record) -> bool:
    """Whether posts and references are others' words."""
    return run.settings.get("data", {}).get("source") != TOY or "base" not in run.manifests


def blocks(
    entries: Sequence[Entry], compared: Sequence[Against], left_out: Sequence[str]
) -> list[Block]:
    """The page: conclusions, results, changed posts, settings, curves, each seed."""
    lead, *more = (conclusion(pair) for pair in compared)
    return [
        Text(lead, lead=True),
        *(Text(sentence) for sentence in more),
        *(Note(caveat) for caveat in (*caveats(entries), *left_out)),
        Heading("Results"),
        results(entries, compared),
        changes(compared),
        measures(entries),
        Heading("Changed posts"),
        *posts(entries),
        Heading("Settings that differ"),
        settings(entries),
        *curves(entries),
        Heading("Each seed"),
        each_seed(entries),
    ]


def conclusion(pair: Against) -> str:
    """How an entry stands to the first, as far as the posts and the seeds tell."""
    name, first = pair.entry.label, pair.first.label
    if pair.together is None:
        return f"{name}: too many posts have no verdict for a difference from {first}."
    if pair.alike == pair.written:
        return (
            f"{name} wrote what {first} wrote, word for word, on all {whole(pair.written)} posts."
        )
    told = "cannot be told from"
    if pair.together.low > 0:
        told = "is preferred to the references more often than"
    if pair.together.high < 0:
        told = "is preferred to the references less often than"
    return (
        f"{name} {told} {first}: {points(pair)}, {p_value(pair.together.p_value)}; better on"
        f" {whole(pair.changes[BETTER])}, worse on {whole(pair.changes[WORSE])} of"
        f" {whole(pair.written)} summaries. {seeds(pair)}"
    )


def seeds(pair: Against) -> str:
    """What the seeds say of a difference."""
    if len(pair.each) == 1:
        return "That is one pair of policies; it says nothing about other seeds."
    each = ", ".join(f"{100 * value:+.1f}" for value in pair.each)
    told = "more than seeds could explain" if pair.is_clear else "seeds could explain it"
    return f"By seed: {each}; {told}."


def points(pair: Against) -> str:
    """The difference with its interval over posts; a dash if there is none."""
    if pair.together is None:
        return MISSING
    middle, low, high = (
        100 * value for value in (pair.together.estimate, pair.together.low, pair.together.high)
    )
    return f"{middle:+.1f} points [{low:+.1f}, {high:+.1f}]"


def caveats(entries: Sequence[Entry]) -> list[str]:
    """What to hold against the comparison."""
    rows = [judged_row(run) for entry in entries for run in entry.runs]
    warnings = [each(row) for each in (verdict.judge_flags, verdict.judge_note) for row in rows]
    notes = list(dict.fromkeys(note for note in warnings if note))
    if len({(row["judge"], row["posts"]) for row in rows}) > 1:
        notes.append("The runs were not judged alike: judge or number of posts differ.")
    return notes


def results(entries: Sequence[Entry], compared: Sequence[Against]) -> Table:
    """A row an entry: its win rate, and by how much it differs from the first."""
    first = entries[0].label
    header = ["", "win rate [95%]", f"less {first} [95%]", "p-value", "over seeds [95%]"]
    rows = [[first, rate(entries[0]), MISSING, MISSING, MISSING]]
    for pair in compared:
        p = p_value(pair.together.p_value if pair.together else None)
        over = pair.over_seeds
        spread = f"[{100 * over[0]:+.1f}, {100 * over[1]:+.1f}]" if over else MISSING
        rows.append([pair.entry.label, rate(pair.entry), points(pair), p, spread])
    caption = (
        "Win rate against the references, and its difference on the same posts: intervals over"
        " posts with the seeds held fixed, and the p-value of a paired randomisation test; beside"
        " it Student's t over the seeds. Several seeds: means."
    )
    return Table(header, rows, caption, strong=True, name="results")


def measures(entries: Sequence[Entry]) -> Table:
    """A row an entry: what its summaries are like."""
    header = ["", "RM score", "KL, nats", "tokens", "ROUGE-L", "EOS"]
    caption = (
        "Means over posts and seeds. RM score: by the run's own reward model; scores of two reward"
        " models do not compare. KL: from SFT, over the last 5% of PPO's updates, at least one."
        " EOS: summaries that end by themselves."
    )
    rows = [[entry.label, *measured(entry)] for entry in entries]
    return Table(header, rows, caption, name="measures")


def rate(entry: Entry) -> str:
    """The win rate with its interval over posts; a dash if too much is unjudged."""
    interval = entry.rate
    if interval is None:
        return f"{MISSING} ({percent(entry.unjudged)} unjudged)"
    return f"{percent(interval.estimate)} {verdict.interval(interval.low, interval.high)}"


def measured(entry: Entry) -> list[str]:
    """Score, KL, length, ROUGE-L and EOS as means over the runs."""
    written = [run.results("summaries")["policies"][entry.policy] for run in entry.runs]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    distances = [distance(run, entry.policy) for run in entry.runs]
    score, tokens, rouge, ends = (
        mean([row[key] for row in written]) for key in ("score", "tokens", "rougeL", "eos_rate")
    )
    cells = [number(score), number(mean(distances), 1), number(tokens, 1), number(rouge, 3)]
    return [*cells, percent(ends)]


def distance(run: Record, policy: str) -> float | None:
    """KL from SFT in nats a summary; known of SFT and PPO."""
    if policy == "ppo" and "ppo" in run.manifests:
        kl: float = run.results("ppo")["objective/kl"]
        return kl
    return 0.0 if policy == "sft" else None


def changes(compared: Sequence[Against]) -> Table:
    """How many verdicts changed, an entry a row."""
    rows = [
        [
            pair.entry.label,
            *(whole(pair.changes[name]) for name in CHANGES),
            percent(pair.alike / pair.written),
        ]
        for pair in compared
    ]
    caption = (
        f"Verdicts on the same posts, beside {compared[0].first.label}: preferred to the reference,"
        " even, or not. Better and worse: it changed. Both lose: the reference is preferred to"
        " both. Alike: summaries that are the same word for word."
    )
    return Table(["", *CHANGES.values(), "alike"], rows, caption, name="changes")


def posts(entries: Sequence[Entry]) -> list[Block]:
    """Posts whose verdict changed, and others after them, to search and sort."""
    everything = changed_posts(entries)
    chosen = some_of_each(everything, len(entries) - 1, MOST_CHANGED, MOST_OTHERS)
    rows = fitting(chosen, MOST_CHANGED + MOST_OTHERS)
    count, there = sum(map(flips, everything)), sum(map(flips, rows))
    others, all_others = len(rows) - there, len(everything) - count
    names = [entry.label for entry in entries]
    text = (
        f"{whole(there)} of the {whole(count)} posts on which a verdict became better or worse than"
        f" that of {names[0]}, and {whole(others)} of the {whole(all_others)} others: each time the"
        f" first in the order of the data. Seed {entries[0].seeds[0]}, or the first of a run that"
        " lacks it."
    )
    few = [sample(at, row, names) for at, row in enumerate(rows[: min(SHOWN, there)], start=1)]
    return [Text(text), SampleBrowser("changed-posts", names, rows, few, shown=1)]


def settings(entries: Sequence[Entry]) -> Block:
    """A row a setting that is not alike."""
    differing = settings_apart(entries)
    if not differing:
        return Text("No setting differs.")
    rows = [[name, *values] for name, values in differing.items()]
    return Table(["setting", *(entry.label for entry in entries)], rows, name="settings")


def curves(entries: Sequence[Entry]) -> list[Block]:
    """The metrics of training, one line an entry, where two entries learned apart."""
    panels = []
    for stage, wanted in CURVES.items():
        learned = {
            entry.runs[0].folders[stage]: (entry, COLORS[place % len(COLORS)])
            for place, entry in reversed(list(enumerate(entries)))
            if stage in entry.runs[0].manifests and stage in ("sft", "rm", entry.policy)
        }
        for key, title in wanted:
            lines = [
                plots.curve(mean_curve(entry.runs, stage, key), key, entry.label, color)
                for entry, color in reversed(learned.values())
            ]
            lines = [line for line in lines if line.values]
            if len(lines) > 1:
                panels.append(plots.lines(title, lines, share=key in SHARES))
    if not panels:
        return []
    parts = [plots.alone(panel, f"curves{place}") for place, panel in enumerate(panels)]
    caption = "Means over the seeds; the band is the range of neighbouring updates."
    figure = Figure("curves", caption, plots.together(panels), parts)
    return [Heading("Learning curves"), figure]


def each_seed(entries: Sequence[Entry]) -> Table:
    """One row a run, with its interval over posts and the code that made it."""
    rows = []
    for entry in entries:
        for run in entry.runs:
            numbers = judged_row(run)
            made = run.manifests[entry.policy if entry.policy in run.manifests else "summaries"]
            version = made["code_version"]
            rows.append([entry.label, verdict.rate(numbers, entry.policy), str(run.seed), version])
    return Table(["", "win rate [95%]", "seed", "code"], rows, name="seeds")


if __name__ == "__main__":
    main()
