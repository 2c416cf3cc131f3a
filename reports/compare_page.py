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
        path, said = write_page(args.runs, args.judge)
    except UserError as error:
        fail(error)
    print(page.for_terminal(said, path))


def write_page(texts: Sequence[str], judge: str = "") -> tuple[Path, list[str]]:
    """Write the page about what some texts name; its path and its verdicts.

    Raises UserError where they cannot be compared.
    """
    entries, left_out = collect(texts, judge)
    first, *others = entries
    compared = [against(one, first) for one in others]
    stem = "-".join(
        ["compare", *(one.label.replace("/", "-").replace(":", "-") for one in entries)]
    )
    title = f"{first.label} beside {', '.join(one.label for one in others)}"
    made = blocks(entries, compared, left_out)
    folder = page.beside_the_runs()
    path = page.write(folder, stem, title, made)
    records = [run for one in entries for run in one.runs]
    if any(is_real(run) for run in records):
        (folder / PUBLIC).mkdir(exist_ok=True)
        page.write(folder / PUBLIC, stem, title, without_the_data(made))
    asked = " ".join(one.label for one in entries)
    names = list(dict.fromkeys(one.name for one in entries))
    note_sources(path, "compare", names, records)
    note = path.with_suffix(".json")
    write_json(note, read_json(note) | {"command": f'make compare RUNS="{asked}"'})
    return path, [conclusion(one) for one in compared]


def is_real(run: Record) -> bool:
    """Whether posts and references are others' words."""
    return run.settings.get("data", {}).get("source") != TOY or "base" not in run.manifests


def blocks(
    entries: Sequence[Entry], compared: Sequence[Against], left_out: Sequence[str]
) -> list[Block]:
    """The page: conclusions, results, changed posts, settings, curves, each seed."""
    lead, *more = (conclusion(one) for one in compared)
    return [
        Text(lead, lead=True),
        *(Text(one) for one in more),
        *(Note(one) for one in (*caveats(entries), *left_out)),
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


def conclusion(one: Against) -> str:
    """How an entry stands to the first, as far as the posts and the seeds tell."""
    name, first = one.entry.label, one.first.label
    if one.together is None:
        return f"{name}: too many posts have no verdict for a difference from {first}."
    if one.alike == one.written:
        return f"{name} wrote what {first} wrote, word for word, on all {whole(one.written)} posts."
    told = "cannot be told from"
    if one.together.low > 0:
        told = "is preferred to the references more often than"
    if one.together.high < 0:
        told = "is preferred to the references less often than"
    return (
        f"{name} {told} {first}: {points(one)}, {p_value(one.together.p_value)}; better on"
        f" {whole(one.changes[BETTER])}, worse on {whole(one.changes[WORSE])} of"
        f" {whole(one.written)} summaries. {seeds(one)}"
    )


def seeds(one: Against) -> str:
    """What the seeds say of a difference."""
    if len(one.each) == 1:
        return "That is one pair of policies; it says nothing about other seeds."
    each = ", ".join(f"{100 * value:+.1f}" for value in one.each)
    told = "more than seeds could explain" if one.is_clear else "seeds could explain it"
    return f"By seed: {each}; {told}."


def points(one: Against) -> str:
    """The difference with its interval over posts; a dash if there is none."""
    if one.together is None:
        return MISSING
    middle, low, high = (
        100 * value for value in (one.together.estimate, one.together.low, one.together.high)
    )
    return f"{middle:+.1f} points [{low:+.1f}, {high:+.1f}]"


def caveats(entries: Sequence[Entry]) -> list[str]:
    """What to hold against the comparison."""
    rows = [judged_row(run) for one in entries for run in one.runs]
    said = [each(row) for each in (verdict.judge_flags, verdict.judge_note) for row in rows]
    notes = list(dict.fromkeys(note for note in said if note))
    if len({(row["judge"], row["posts"]) for row in rows}) > 1:
        notes.append("The runs were not judged alike: judge or number of posts differ.")
    return notes


def results(entries: Sequence[Entry], compared: Sequence[Against]) -> Table:
    """A row an entry: its win rate, and by how much it differs from the first."""
    first = entries[0].label
    header = ["", "win rate [95%]", f"less {first} [95%]", "p-value", "over seeds [95%]"]
    rows = [[first, rate(entries[0]), MISSING, MISSING, MISSING]]
    for one in compared:
        p = p_value(one.together.p_value if one.together else None)
        over = one.over_seeds
        spread = f"[{100 * over[0]:+.1f}, {100 * over[1]:+.1f}]" if over else MISSING
        rows.append([one.entry.label, rate(one.entry), points(one), p, spread])
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
    rows = [[one.label, *measured(one)] for one in entries]
    return Table(header, rows, caption, name="measures")


def rate(entry: Entry) -> str:
    """The win rate with its interval over posts; a dash if too much is unjudged."""
    found = entry.rate
    if found is None:
        return f"{MISSING} ({percent(entry.unjudged)} unjudged)"
    return f"{percent(found.estimate)} {verdict.interval(found.low, found.high)}"


def measured(entry: Entry) -> list[str]:
    """Score, KL, length, ROUGE-L and EOS as means over the runs."""
    written = [run.results("summaries")["policies"][entry.policy] for run in entry.runs]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    distances = [distance(run, entry.policy) for run in entry.runs]
    score, tokens, rouge, ends = (
        mean([one[key] for one in written]) for key in ("score", "tokens", "rougeL", "eos_rate")
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
            one.entry.label,
            *(whole(one.changes[name]) for name in CHANGES),
            percent(one.alike / one.written),
        ]
        for one in compared
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
    names = [one.label for one in entries]
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
    found = settings_apart(entries)
    if not found:
        return Text("No setting differs.")
    rows = [[name, *values] for name, values in found.items()]
    return Table(["setting", *(one.label for one in entries)], rows, name="settings")


def curves(entries: Sequence[Entry]) -> list[Block]:
    """The metrics of training, one line an entry, where two entries learned apart."""
    panels = []
    for stage, wanted in CURVES.items():
        learned = {
            one.runs[0].folders[stage]: (one, COLORS[place % len(COLORS)])
            for place, one in reversed(list(enumerate(entries)))
            if stage in one.runs[0].manifests and stage in ("sft", "rm", one.policy)
        }
        for key, title in wanted:
            lines = [
                plots.curve(mean_curve(one.runs, stage, key), key, one.label, color)
                for one, color in reversed(learned.values())
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
    for one in entries:
        for run in one.runs:
            found = judged_row(run)
            made = run.manifests[one.policy if one.policy in run.manifests else "summaries"]
            version = made["code_version"]
            rows.append([one.label, verdict.rate(found, one.policy), str(run.seed), version])
    return Table(["", "win rate [95%]", "seed", "code"], rows, name="seeds")


if __name__ == "__main__":
    main()
