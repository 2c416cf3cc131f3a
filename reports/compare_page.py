"""The page of policies of finished runs beside the first of them.

    python -m reports.compare_page --runs tiny:ppo tiny:sft tiny/55513:dpo

writes compare-<a>-<b>-....md and .html to runs/reports/; `public/` there holds the page once more
without the texts of real data. Everything was judged against the references before: nothing is
asked here.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import cycle, islice

from reports.parts import gained, page, paired, plots, sentences, words
from reports.parts.blocks import Block, Heading, Table, Text
from reports.parts.cells import MISSING, Number
from reports.parts.collect import judged_row
from reports.parts.paired import (
    BETTER,
    CHANGES,
    WORSE,
    Entry,
    Paired,
    beside,
    change,
    posts_frame,
    read_entries,
    settings_apart,
    side_by_side,
)
from reports.parts.run_report import stem_about, write_about_runs
from reports.parts.words import Row, in_points, number, p_value, percent, whole
from reports.sections.samples import samples
from reports.sections.scores import gain_notes

SHOWN = 5  # posts


def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdicts and its path."""
    parser = page.arguments("policies of finished runs side by side")
    parser.add_argument("--runs", nargs="+", default=[], help="name[/seed][:policy], two or more")
    page.print_page(lambda args: write_page(args.runs, args.judge), parser, argv)


def write_page(texts: Sequence[str], judge: str = "") -> str:
    """Write the page about what some texts name; its verdicts for the terminal.

    Raises UserError where they cannot be pairs.
    """
    entries, left_out = read_entries(texts, judge)
    about, heading = [entry.side for entry in entries], ""
    if len({entry.run for entry in entries}) == 1:
        entries = [replace(entry, of_one_run=True) for entry in entries]
        about, heading = [entries[0].run, *(x.policy for x in entries)], f"{entries[0].run}: "
    first, *others = entries
    pairs = [beside(entry, first) for entry in others]
    title = f"{heading}{title_of(entries, pairs)}"
    content = blocks(entries, pairs, left_out)
    records = [run for entry in entries for run in entry.runs]
    names = list(dict.fromkeys(entry.name for entry in entries))
    path = write_about_runs(stem_about("compare", about), title, content, names, records)
    verdicts = paired.verdicts(pairs)
    return page.for_terminal([*map(conclusion, pairs, verdicts)], path)


def blocks(
    entries: Sequence[Entry], pairs: Sequence[Paired], left_out: Sequence[str]
) -> list[Block]:
    """The page: who wins, results, each pair, each seed, changed posts, settings."""
    rows = [judged_row(run) for entry in entries for run in entry.runs]
    single = "one seed of each" if all(len(pair.each) == 1 for pair in pairs) else ""
    ordered = by_rate(entries)
    colors = dict(zip((entry.label for entry in entries), colors_of(entries), strict=True))
    drawn = [(x.label, colors[x.label], *astuple(x.rate)[:3]) for x in ordered if x.rate]
    return [
        sentences.lead(answer(ordered, pairs), sentences.distrust(rows, single)),
        results(ordered, pairs),
        *plots.win_rate_figure(drawn),
        *sentences.against([*caveats(entries), *left_out]),
        Heading("Each beside the first"),
        *(Text(x) for x in map(conclusion, pairs, paired.verdicts(pairs)) if len(pairs) > 1),
        differences(pairs),
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


def title_of(entries: Sequence[Entry], pairs: Sequence[Paired]) -> str:
    """How often the best and the first win, and who is shown to be better than whom."""
    ordered, first = by_rate(entries), entries[0].label
    two = dict.fromkeys([ordered[0].label, first, ordered[1].label])
    rates = {x.label: percent(x.rate.estimate) for x in ordered if x.rate}
    won = ", ".join([f"{label} {rates[label]}" for label in two if label in rates][:2])
    kinds: dict[str, list[str]] = {BETTER: [], WORSE: [], paired.UNCLEAR: []}
    for pair, verdict in zip(pairs, paired.verdicts(pairs), strict=True):
        kinds.setdefault(verdict, []).append(pair.entry.label)
    ends = {BETTER: f"better than {first}", WORSE: f"worse than {first}"}
    stands = [f"{words.listed(labels)} {ends.get(x, x)}" for x, labels in kinds.items() if labels]
    return "; ".join([f"{won} against the references"] * bool(won) + stands)


def answer(ordered: Sequence[Entry], pairs: Sequence[Paired]) -> str:
    """Who wins, whether that is reliable, and whether at equal length too.

    `ordered`: the highest win rate first.
    """
    lengths = ", ".join(f"{entry.label} {at_length(entry)}" for entry in ordered[:2])
    if len(pairs) == 1:
        return f"{conclusion(pairs[0], *paired.verdicts(pairs))} At equal length: {lengths}."
    (best, second), above = ordered[:2], paired.verdicts(pairs).count(BETTER)
    return (
        f"Of {len(ordered)} policies {best.label} wins most often against the references,"
        f" {rate(best)}; {second.label} is next, {rate(second)}; at equal length: {lengths}."
        f" {above} of {len(pairs)} are above {pairs[0].first.label} by the posts and, where there"
        " are several, the seeds, after Holm's correction."
    )


def at_length(entry: Entry) -> Number:
    """The win rate at equal length, of several seeds their mean; a dash if too much is unjudged."""
    rows = [judged_row(run)[f"{entry.policy}/statistics"] for run in entry.runs]
    lengths = [row["length_controlled"] for row in rows]
    known = [length["estimate"] for length in lengths if length["estimate"] is not None]
    if entry.rate is None or len(known) < len(lengths):
        return MISSING
    if len(lengths) == 1:
        return words.at_equal_length(lengths[0])
    note = "EXTRAPOLATED" if any(length["extrapolated"] for length in lengths) else ""
    return replace(percent(sum(known) / len(known)), note=note)


def colors_of(entries: Sequence[Entry]) -> list[str]:
    """A colour for each entry: that of its policy where all policies differ."""
    own = [plots.color_of(entry.policy) for entry in entries]
    return own if len(set(own)) == len(own) else [*islice(cycle(plots.COLORS), len(own))]


def conclusion(pair: Paired, verdict: str) -> str:
    """How an entry stands to the first by its verdict, and what the posts and the seeds tell."""
    name, first = pair.entry.label, pair.first.label
    if pair.together is None:
        return f"{name}: too many posts have no verdict for a difference from {first}."
    if pair.alike == pair.written:
        return f"{name} and {first} wrote the same, word for word: {whole(pair.written)} summaries."
    stands = f"{name} against {first} is {verdict}"
    if verdict != paired.UNCLEAR:
        more = "more" if verdict == BETTER else "less"
        stands = f"{name} is preferred to the references {more} often than {first}"
    seeds = "one pair of policies, which says nothing about other seeds"
    if len(pair.each) > 1:
        over = words.bounds_in_points(pair.over_seeds) if pair.over_seeds else "no spread"
        gaps = (str(Number(100 * gap, 1, signed=True)) for gap in pair.each)
        seeds = f"by seed {', '.join(gaps)}, over seeds {over}"
    return (
        f"{stands}: {in_points(pair.together)}, {p_value(pair.together.p_value)}; better on"
        f" {whole(pair.changes[BETTER])}, worse on {whole(pair.changes[WORSE])} of"
        f" {whole(pair.written)} summaries; {seeds}."
    )


def caveats(entries: Sequence[Entry]) -> list[str]:
    """What to hold against the comparison."""
    own = {x.label: {} if x.policy == "ppo" else {"explained_by_critic": None} for x in entries}
    rows = [
        judged_row(run) | {"name": entry.label} | own[entry.label]
        for entry in entries
        for run in entry.runs
    ]
    cut = sentences.cut_off({entry.label: entry.mean("eos_rate") for entry in entries})
    runs = {(run.name, run.seed): run for entry in entries for run in entry.runs}
    gains = [
        f"{name}, seed {seed}: {note}"
        for (name, seed), run in runs.items()
        for note in gain_notes(run)
    ]
    return [*sentences.notes_of_runs(rows), *cut, *gains]


def results(ordered: Sequence[Entry], pairs: Sequence[Paired]) -> Table:
    """A row an entry, the winner first: its verdict, win rate, difference and cut-off texts."""
    first, over = pairs[0].first.label, "[95% over posts]"
    header = ["", "verdict", f"win rate {over}", "at equal length"]
    header += [f"difference from {first} {over}", "cut off"]
    known = dict(zip((pair.entry.label for pair in pairs), paired.verdicts(pairs), strict=True))
    gaps = {pair.entry.label: pair.together for pair in pairs}
    rows = []
    for entry in ordered:
        gap, ends = gaps.get(entry.label), entry.mean("eos_rate")
        length = replace(at_length(entry), low=None, high=None)
        cells = [rate(entry), length, in_points(gap) if gap else MISSING]
        cut_off = percent(None if ends is None else 1 - ends)
        rows.append([entry.label, known.get(entry.label, MISSING), *cells, cut_off])
    caption = (
        f"Verdict: better or worse than {first} by the posts and, where there are several, the"
        " seeds, after Holm's correction for all policies here. Win rates are against the"
        " references, differences on the same posts; of several seeds a number is the mean. Cut"
        " off: summaries that do not end by themselves."
    )
    return Table(header, rows, caption, strong=True, name="verdicts")


def differences(pairs: Sequence[Paired]) -> Table:
    """A row a pair: its difference over seeds, and the p-values behind the verdict."""
    corrected = paired.corrected(pairs)
    rows = [
        [x.entry.label, words.bounds_in_points(x.over_seeds), p_value(x.p_value), p_value(after)]
        for x, after in zip(pairs, corrected, strict=True)
    ]
    caption = (
        "Student's t interval over seeds; a dash: one seed. The p-value is that of a paired"
        " randomisation test over posts or, where it is larger, of the t test over seeds."
    )
    first = pairs[0].first.label
    header = ["", f"difference from {first} [95% over seeds]", "p-value", "after Holm's correction"]
    return Table(header, rows, caption, name="differences")


def rate(entry: Entry) -> Number:
    """The win rate with its interval over posts; a dash if too much is unjudged."""
    interval = entry.rate
    return words.estimate(interval) if interval else words.unjudged_share(entry.unjudged)


def summaries(entries: Sequence[Entry], pairs: Sequence[Paired]) -> Table:
    """A row an entry: what its summaries are like, and how many verdicts changed."""
    pair_of = {pair.entry.label: pair for pair in pairs}
    rows = []
    for entry in entries:
        cells = [number(entry.mean("score")), number(entry.mean("kl"), 1)]
        cells += [number(entry.mean("tokens"), 1), number(entry.mean("rougeL"), 3)]
        pair, changes = pair_of.get(entry.label), [MISSING] * (len(CHANGES) + 1)
        if pair:
            counts = [whole(pair.changes[name]) for name in CHANGES]
            changes = [*counts, percent(pair.alike / pair.written)]
        rows.append([entry.label, *cells, percent(entry.mean("eos_rate")), *changes])
    caption = (
        "Means over posts and seeds. RM score: by the run's own reward model; scores of two reward"
        " models do not compare. KL: from SFT, over the last 5% of PPO's updates, at least one."
        " EOS: summaries that end by themselves. Then verdicts on the same posts beside"
        f" {entries[0].label}: better and worse changed, of both lose the reference is preferred to"
        " both. Alike: summaries that are the same word for word."
    )
    header = ["", "RM score", "KL, nats", "tokens", "ROUGE-L", "EOS", *CHANGES, "alike"]
    return Table(header, rows, caption, name="summaries")


def each_seed(entries: Sequence[Entry]) -> Table:
    """One row a run, with its interval over posts."""
    rows = [
        [entry.label, words.rate(judged_row(run), entry.policy), str(run.seed)]
        for entry in entries
        for run in entry.runs
    ]
    return Table(["", "win rate [95%]", "seed"], rows, name="seeds")


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


def changed_posts(entries: Sequence[Entry]) -> list[list[Row]]:
    """The posts of all entries in the order of the data: of each the entries' rows, of one seed.

    Each row has in `change` how its verdict stands to the first's.
    """
    seed = entries[0].seeds[0]
    runs = [next((x for x in entry.runs if x.seed == seed), entry.runs[0]) for entry in entries]
    frames = [posts_frame(run, x.policy) for run, x in zip(runs, entries, strict=True)]
    return [
        [row | {"change": change(rows[0]["verdict"], row["verdict"])} for row in rows]
        for rows in side_by_side(frames)
    ]


def flips(rows: Sequence[Row]) -> bool:
    """Whether a verdict on a post changed for better or worse."""
    return any(row["change"] in (BETTER, WORSE) for row in rows)


def settings(entries: Sequence[Entry]) -> Block:
    """A row a setting that is not alike."""
    table = settings_apart({x.label: x.runs for x in entries}).fillna(str(MISSING)).reset_index()
    rows = table.to_numpy().tolist()
    header = ["setting", *(entry.label for entry in entries)]
    return Table(header, rows, name="settings") if rows else Text("No setting differs.")


if __name__ == "__main__":
    main()
