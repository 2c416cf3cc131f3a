"""The page of policies of finished runs beside the first of them.

    python -m reports.compare_page --runs tiny:ppo tiny:sft tiny/55513:dpo

writes compare-<a>-<b>-....md and .html to runs/reports/; `public/` there holds the page once more
without the texts of real data. Everything was judged against the references before: nothing is
asked here.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import cycle, islice
from pathlib import Path

from reports.parts import gained, page, paired, plots, sentences, words
from reports.parts.cells import MISSING, Number
from reports.parts.collect import judged_row
from reports.parts.page import Block, Heading, Table, Text
from reports.parts.paired import Entry, Paired, beside, read_entries, settings_apart
from reports.parts.run_report import stem_about, write_about_runs
from reports.parts.sample_views import (
    BETTER,
    FAILING,
    UNCHANGED,
    UNJUDGED,
    WORSE,
    change,
    post_rows,
)
from reports.parts.words import Row, in_points, number, p_value, percent, whole
from reports.sections.samples import samples
from reports.sections.scores import gain_notes

SHOWN = 5  # posts
CHANGES = {
    BETTER: "better",
    WORSE: "worse",
    FAILING: "both lose",
    UNCHANGED: "unchanged",
    UNJUDGED: "unjudged",
}


def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdicts and its path."""
    parser = page.arguments("policies of finished runs side by side")
    parser.add_argument("--runs", nargs="+", default=[], help="name[/seed][:policy], two or more")

    def write(args: Namespace) -> str:
        path, conclusions = write_page(args.runs, args.judge)
        return page.for_terminal(conclusions, path)

    page.print_page(write, parser, argv)


def write_page(texts: Sequence[str], judge: str = "") -> tuple[Path, list[str]]:
    """Write the page about what some texts name; its path and its verdicts.

    Raises UserError where they cannot be pairs.
    """
    entries, left_out = read_entries(texts, judge)
    sides = [entry.side for entry in entries]
    about, heading = sides, ""
    if len({entry.run for entry in entries}) == 1:
        entries = [replace(entry, of_one_run=True) for entry in entries]
        about, heading = [entries[0].run, *(x.policy for x in entries)], f"{entries[0].run}: "
    first, *others = entries
    pairs = [beside(entry, first) for entry in others]
    title = f"{heading}{first.label} beside {', '.join(entry.label for entry in others)}"
    content = blocks(entries, pairs, left_out)
    records = [run for entry in entries for run in entry.runs]
    names = list(dict.fromkeys(entry.name for entry in entries))
    path = write_about_runs(stem_about("compare", about), title, content, names, records)
    return path, [conclusion(pair) for pair in pairs]


def blocks(
    entries: Sequence[Entry], pairs: Sequence[Paired], left_out: Sequence[str]
) -> list[Block]:
    """The page: who wins, results, each pair, changed posts, settings, curves, each seed."""
    rows = [judged_row(run) for entry in entries for run in entry.runs]
    unsure = [not pair.seeds_agree for pair in pairs if pair.over_seeds]
    seeds = "seeds could explain it" if unsure and all(unsure) else ""
    lone = "one pair of policies" if len(pairs) == 1 else "one seed of each"
    single = lone if all(len(pair.each) == 1 for pair in pairs) else seeds
    return [
        sentences.lead(
            answer(entries, pairs), gained.sentence(entries), sentences.distrust(rows, single)
        ),
        results(entries, pairs),
        *picture(entries),
        *sentences.against([*caveats(entries), *left_out]),
        Heading("Each beside the first"),
        *(Text(conclusion(pair)) for pair in pairs),
        *gained.table(entries),
        *gained.over_kl(entries, colors_of(entries)),
        summaries(entries, pairs),
        each_seed(entries),
        Heading("Changed posts"),
        *posts(entries),
        Heading("Settings that differ"),
        settings(entries),
    ]


def by_rate(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, the highest win rate first; those without one last."""
    return sorted(entries, key=lambda entry: -entry.rate.estimate if entry.rate else 1.0)


def answer(entries: Sequence[Entry], pairs: Sequence[Paired]) -> str:
    """Who wins, by how much, and whether at equal length too."""
    if any(pair.together is None for pair in pairs):
        return " ".join(conclusion(pair) for pair in pairs)
    best, *others = by_rate(entries)
    lengths = f"at equal length {at_length(best)} against {at_length(others[0])}"
    lengths = lengths.replace(str(MISSING), "not known")
    if len(pairs) > 1:
        above = paired.above_first(pairs)
        several = [len(pair.each) > 1 for pair in pairs]
        seeds_too = " and, where there are several, the seeds" if any(several) else ""
        seeds_too = " and the seeds" if all(several) else seeds_too
        return (
            f"Of {len(entries)} policies {best.label} wins most often against the references,"
            f" {rate(best)}; {others[0].label} is next, {rate(others[0])}; {lengths}."
            f" {above} of {len(pairs)} are above {entries[0].label} by the posts"
            f"{seeds_too}, after Holm's correction."
        )
    (pair,) = pairs
    if pair.alike == pair.written or pair.together is None:
        return conclusion(pair)
    sign = -1 if best is pair.first else 1
    middle, low, high = (sign * end + 0.0 for end in astuple(pair.together)[:3])  # never -0.0
    gap = str(in_points({"estimate": middle, "low": min(low, high), "high": max(low, high)}))
    if pair.over_seeds:
        ends = sorted(sign * end for end in pair.over_seeds)
        gap += f" over posts, {words.bounds_in_points((ends[0], ends[1]))} over seeds"
    above = pair.stands and min(low, high) > 0
    verb = "reliably wins more often than" if above else "is not reliably above"
    return f"Against the references {best.label} {verb} {others[0].label}: {gap}; {lengths}."


def at_length(entry: Entry) -> Number:
    """The win rate at equal length, of several seeds their mean; a dash if too much is unjudged."""
    lengths = [
        judged_row(run)[f"{entry.policy}/statistics"]["length_controlled"] for run in entry.runs
    ]
    known = [length["estimate"] for length in lengths if length["estimate"] is not None]
    if entry.rate is None or len(known) < len(lengths):
        return MISSING
    if len(lengths) == 1:
        return words.at_equal_length(lengths[0])
    extrapolated = any(length["extrapolated"] for length in lengths)
    mean = percent(sum(known) / len(known))
    return replace(mean, note="EXTRAPOLATED") if extrapolated else mean


def colors_of(entries: Sequence[Entry]) -> list[str]:
    """A colour for each entry: that of its policy where all policies differ."""
    named = [plots.color_of(entry.policy) for entry in entries]
    return named if len(set(named)) == len(named) else [*islice(cycle(plots.COLORS), len(named))]


def picture(entries: Sequence[Entry]) -> list[Block]:
    """The win rates with their intervals over posts; none where no entry has one."""
    colors = dict(zip((entry.label for entry in entries), colors_of(entries), strict=True))
    drawn = [
        (entry.label, colors[entry.label], *astuple(entry.rate)[:3])
        for entry in by_rate(entries)
        if entry.rate
    ]
    return [*plots.win_rate_figure(drawn)]


def conclusion(pair: Paired) -> str:
    """How an entry stands to the first, as far as the posts and the seeds tell."""
    name, first = pair.entry.label, pair.first.label
    if pair.together is None:
        return f"{name}: too many posts have no verdict for a difference from {first}."
    if pair.alike == pair.written:
        return (
            f"{name} wrote what {first} wrote, word for word, on all {whole(pair.written)} posts."
        )
    verdict = f"{name} against {first} is inconclusive"
    if pair.together.low > 0:
        verdict = f"{name} is preferred to the references more often than {first}"
    if pair.together.high < 0:
        verdict = f"{name} is preferred to the references less often than {first}"
    return (
        f"{verdict}: {in_points(pair.together)}, {p_value(pair.together.p_value)}; better on"
        f" {whole(pair.changes[BETTER])}, worse on {whole(pair.changes[WORSE])} of"
        f" {whole(pair.written)} summaries. {seeds(pair)}"
    )


def seeds(pair: Paired) -> str:
    """What the seeds say of a difference."""
    if len(pair.each) == 1:
        return "That is one pair of policies; it says nothing about other seeds."
    each = ", ".join(f"{100 * value:+.1f}" for value in pair.each)
    spread = "more than seeds could explain" if pair.seeds_agree else "seeds could explain it"
    if pair.over_seeds is None:
        spread = "no spread, which other seeds might show"
    return f"By seed: {each}; {spread}."


def caveats(entries: Sequence[Entry]) -> list[str]:
    """What to hold against the comparison."""
    rows = [judged_row(run) for entry in entries for run in entry.runs]
    critics = [row for entry in entries for row in entry.critics]
    cut = sentences.cut_off({entry.label: entry.mean("eos_rate") for entry in entries})
    runs = {(run.name, run.seed): run for entry in entries for run in entry.runs}
    gains = [
        f"{name}, seed {seed}: {note}"
        for (name, seed), run in runs.items()
        for note in gain_notes(run)
    ]
    return [*sentences.notes_of_runs(rows, critics), *cut, *gains]


def results(entries: Sequence[Entry], pairs: Sequence[Paired]) -> Table:
    """A row an entry, the winner first: its win rate, and by how much it differs from the first."""
    first = entries[0].label
    header = ["", "win rate [95%]", "at equal length", f"difference from {first} [95%]", "p-value"]
    pair_of = {pair.entry.label: pair for pair in pairs}
    rows = []
    for entry in by_rate(entries):
        pair, cells = pair_of.get(entry.label), [MISSING] * 3
        if pair:
            gap = pair.together
            gap_cells = (in_points(gap), p_value(gap.p_value)) if gap else (MISSING, MISSING)
            cells = [*gap_cells, words.bounds_in_points(pair.over_seeds)]
        rows.append([entry.label, rate(entry), at_length(entry), *cells])
    caption = (
        "Win rate against the references; differences are of the same posts. Of several seeds a"
        " number is the mean. Intervals are over posts, with the seeds held fixed, in the last"
        " column Student's t over seeds; the p-value is that of a paired randomisation test, not"
        " corrected."
    )
    return Table([*header, "over seeds [95%]"], rows, caption, strong=True, name="results")


def rate(entry: Entry) -> Number:
    """The win rate with its interval over posts; a dash if too much is unjudged."""
    interval = entry.rate
    return words.estimate(interval) if interval else words.unjudged_share(entry.unjudged)


def measured(entry: Entry) -> list[Number]:
    """Score, KL, length, ROUGE-L and EOS as means over the runs."""
    cells = [number(entry.mean("score")), number(entry.mean("kl"), 1)]
    cells += [number(entry.mean("tokens"), 1), number(entry.mean("rougeL"), 3)]
    return [*cells, percent(entry.mean("eos_rate"))]


def summaries(entries: Sequence[Entry], pairs: Sequence[Paired]) -> Table:
    """A row an entry: what its summaries are like, and how many verdicts changed."""
    first, header = entries[0].label, ["RM score", "KL, nats", "tokens", "ROUGE-L", "EOS"]
    rows: list[list[object]] = [[first, *measured(entries[0]), *[MISSING] * (len(CHANGES) + 1)]]
    for pair in pairs:
        counts = [whole(pair.changes[name]) for name in CHANGES]
        alike = percent(pair.alike / pair.written)
        rows.append([pair.entry.label, *measured(pair.entry), *counts, alike])
    caption = (
        "Means over posts and seeds. RM score: by the run's own reward model; scores of two reward"
        " models do not compare. KL: from SFT, over the last 5% of PPO's updates, at least one."
        f" EOS: summaries that end by themselves. Then verdicts on the same posts beside {first}:"
        " better and worse changed, of both lose the reference is preferred to both. Alike:"
        " summaries that are the same word for word."
    )
    return Table(["", *header, *CHANGES.values(), "alike"], rows, caption, name="summaries")


def posts(entries: Sequence[Entry]) -> list[Block]:
    """The first posts: those whose verdict changed, and others after them."""
    everything, names = changed_posts(entries), [entry.label for entry in entries]
    text = (
        f"The verdict became better or worse than that of {names[0]} on"
        f" {whole(sum(map(flips, everything)))} of {whole(len(everything))} posts. The first of"
        f" these stand here, in the order of the data, and then others. Seed {entries[0].seeds[0]},"
        " or the first of a run that lacks it."
    )
    first = sorted(everything, key=lambda row: not flips(row))[:SHOWN]
    return [Text(text), *samples(first, names)]


def changed_posts(entries: Sequence[Entry]) -> list[Row]:
    """The posts of all entries in the order of the data, with a side of each, of one seed.

    Each side after the first says how its verdict stands to the first's.
    """
    seed = entries[0].seeds[0]
    sides = [
        {row["id"]: row for row in post_rows(entry.runs[entry.place_of(seed)], [entry.policy])}
        for entry in entries
    ]
    rows = []
    for post, row in sides[0].items():
        if not all(post in posts for posts in sides):
            continue
        first, *others = (posts[post]["sides"][0] for posts in sides)
        marked = [side | {"change": change(first["verdict"], side["verdict"])} for side in others]
        rows.append(row | {"sides": [first, *marked]})
    return rows


def flips(row: Row) -> bool:
    """Whether a verdict on a post is better or worse than that of the first policy."""
    return any(side.get("change") in (BETTER, WORSE) for side in row["sides"])


def settings(entries: Sequence[Entry]) -> Block:
    """A row a setting that is not alike."""
    rows = [[name, *values] for name, values in settings_apart(entries).items()]
    header = ["setting", *(entry.label for entry in entries)]
    return Table(header, rows, name="settings") if rows else Text("No setting differs.")


def each_seed(entries: Sequence[Entry]) -> Table:
    """One row a run, with its interval over posts."""
    rows = [
        [entry.label, words.rate(judged_row(run), entry.policy), str(run.seed)]
        for entry in entries
        for run in entry.runs
    ]
    return Table(["", "win rate [95%]", "seed"], rows, name="seeds")


if __name__ == "__main__":
    main()
