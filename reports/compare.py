"""The page that compares policies of finished runs with the first of them.

    python -m reports.compare --runs tiny:ppo tiny:sft tiny/55513:dpo

writes runs/reports/compare-<names>.md and .html; `public/` there has the page without other
people's texts. Everything was judged against the references before, so no judge is asked. The text
of the page is `templates/compare.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reports import about_runs, render
from reports.entries import (
    BETTER,
    WORSE,
    Changes,
    DifferingSetting,
    Entry,
    Paired,
    change_of,
    compare,
    differing_settings,
    read_entries,
)
from reports.formats import MISSING, percent, points, text_table
from reports.gains import gains_of, gold_over_kl
from reports.plots import (
    Bar,
    Figure,
    color_of,
    difference_bar,
    differences,
    figure,
    win_rates,
)
from reports.pooled_rates import pool
from reports.posts import judged_posts, side_by_side
from reports.results import Interval, RunResult
from reports.samples import (
    NUMBER_OF_SAMPLES,
    Sample,
    WantedFacts,
    first_example,
    samples_from,
    wanted_facts,
)
from reports.scores import gains_by_cut_off, gains_by_question
from reports.verdicts import Comparison, Verdict, Word, verdicts
from stages.config.error_messages import Parser, in_one_line

MOST_NAMED_SETTINGS = 3  # of an entry, in the opening
MOST_LISTED_SEEDS = 6  # whose differences a cell lists
MOST_EXPLAINED_ROWS = 5  # whose differences the first paragraph has
MOST_UNCLEAR_NAMES = 3  # of policies without a clear difference, in the title
TITLE_KIND_OF = {
    Word.BETTER: "better",
    Word.WORSE: "worse",
    Word.NO_DIFFERENCE: "no difference",
    Word.INCONCLUSIVE: "inconclusive",
}
MORE_OFTEN = "more often in every seed"
LESS_OFTEN = "less often in every seed"
TITLE_KINDS = (
    "better",
    "worse",
    MORE_OFTEN,
    LESS_OFTEN,
    "no difference",
    "inconclusive",
    "many unclear",
    "unknown",
)


@dataclass(frozen=True)
class TitlePart:
    """The entries with one verdict."""

    kind: str
    """One of TITLE_KINDS."""
    labels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SeedRow:
    """One run of an entry."""

    run: str
    seed: int
    win_rate: Interval | None
    unjudged: float


@dataclass(frozen=True, kw_only=True)
class EntryRow:
    """Everything that the page says about one entry."""

    label: str
    policy: str
    entry: str
    """How a command names it."""
    seeds: tuple[SeedRow, ...]
    most_seeds: int
    """Of all entries."""
    posts: int
    """On which its first seed was judged."""

    win_rate: Interval | None
    """Over seeds and posts, as on the page about sizes; of one seed over posts."""
    unjudged: float
    at_equal_length: Interval | None
    """Over the same."""
    is_extrapolated: bool

    comparison: Comparison | None
    """With the first entry; None for that one itself."""
    verdict: Verdict | None
    changes: Changes | None

    score: float | None
    kl: float | None
    tokens: float | None
    rouge_l: float | None
    eos_rate: float | None

    @property
    def has_fewer_seeds(self) -> bool:
        """Whether another entry has more seeds."""
        return len(self.seeds) < self.most_seeds

    @property
    def is_single_seed(self) -> bool:
        """Whether it has one seed where another entry has several."""
        return len(self.seeds) == 1 and self.most_seeds > 1

    @property
    def marked_label(self) -> str:
        """The label, with the number of seeds if others have more."""
        if not self.has_fewer_seeds:
            return self.label
        return f"{self.label} ({len(self.seeds)} of {self.most_seeds} seeds)"

    @property
    def seed_rates(self) -> list[float]:
        """The win rate of each seed that has one."""
        return [seed.win_rate.estimate for seed in self.seeds if seed.win_rate]

    @property
    def agrees_in_every_seed(self) -> bool:
        """Whether it is inconclusive, although every seed has a difference of the same sign."""
        if self.verdict is None or self.comparison is None:
            return False
        return self.verdict.word is Word.INCONCLUSIVE and self.comparison.every_seed_agrees

    @property
    def wrote_the_same(self) -> bool:
        """Whether all its summaries are those of the first entry, word for word."""
        return self.changes is not None and self.changes.are_none


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """How the run of an entry was set up differently from that of the first one."""

    label: str
    settings: tuple[DifferingSetting, ...]
    """Each has the value of the first entry, and then the other one."""


@dataclass(frozen=True, kw_only=True)
class ComparedPosts:
    """The posts of one seed that all entries wrote about."""

    seed: int
    count: int
    changed: int
    """Posts whose verdict is better or worse than the first entry's."""
    samples: list[Sample]
    """Without the example; first those whose verdict changed, in the order of the data."""
    example: Sample | None
    """The first post that is fit to open the page."""
    facts: WantedFacts | None
    """What the readers of the example want to know, if it is a built-in post."""


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdicts and its path."""
    parser = Parser(description="compare policies of finished runs")
    parser.add_argument("--runs", nargs="+", default=[], help="name[/seed][:policy], two or more")
    parser.add_argument("--judge", default="", help="the judge, if several have judged the runs")
    arguments = parser.parse_args(argv)
    print(write_page(arguments.runs, arguments.judge), end="")


def write_page(texts: Sequence[str], judge: str = "") -> str:
    """Write the page about the entries that texts name, and return its text for the terminal.

    Raises UserError if the entries cannot be compared.
    """
    entries, left_out = read_entries(texts, judge)
    base = entries[0]
    pairs = [compare(entry, base) for entry in entries[1:]]
    rows = ranked(rows_of(entries, pairs))
    base_row = next(row for row in rows if row.comparison is None)
    runs = [run for entry in entries for run in entry.runs]
    settings = differing_settings({entry.label: entry.runs for entry in entries})
    path = about_runs.write_page(
        "compare.md",
        stem=page_stem(entries),
        names=list(dict.fromkeys(entry.name for entry in entries)),
        runs=runs,
        numbers=rows,
        run_name=common_run_name(entries),
        rows=rows,
        base=base_row,
        title_parts=title_parts(rows),
        main_figure=main_figure(rows, base.label),
        most_listed_seeds=MOST_LISTED_SEEDS,
        most_explained_rows=MOST_EXPLAINED_ROWS,
        critic_runs=_different([run for x in entries if x.policy == "ppo" for run in x.runs]),
        left_out=left_out,
        gain_runs=[
            (run, gains_by_question(run), gains_by_cut_off(run)) for run in _different(runs)
        ],
        gains=gains_of(entries),
        gold_over_kl=gold_over_kl(entries),
        posts=compared_posts(entries),
        settings=settings,
        run_differences=what_differs(entries),
        most_named_settings=MOST_NAMED_SETTINGS,
        labels=[entry.label for entry in entries],
    )
    return terminal_text(rows, base_row, path)


def page_stem(entries: Sequence[Entry]) -> str:
    """Return the name of the page's files, which lists the policies if all are of one run."""
    run_name = common_run_name(entries)
    if run_name:
        names = [run_name, *(entry.policy for entry in entries)]
    else:
        names = [entry.text for entry in entries]
    return about_runs.stem_about("compare", names)


def common_run_name(entries: Sequence[Entry]) -> str:
    """Return the run of all entries; empty if there are several."""
    names = {entry.run_name for entry in entries}
    return names.pop() if len(names) == 1 else ""


# -- the numbers -----------------------------------------------------------------------------------


def rows_of(entries: Sequence[Entry], pairs: Sequence[Paired]) -> list[EntryRow]:
    """Return a row for each entry; `pairs` compare all but the first with the first."""
    paired = dict(zip((pair.entry.label for pair in pairs), pairs, strict=True))
    found = verdicts([pair.comparison for pair in pairs])
    verdict_of = dict(zip(paired, found, strict=True))
    most_seeds = max(len(entry.runs) for entry in entries)
    rows = []
    for entry in entries:
        pair = paired.get(entry.label)
        at_equal_length, is_extrapolated = rate_at_equal_length(entry)
        rows.append(
            EntryRow(
                label=entry.label,
                policy=entry.policy,
                entry=entry.text,
                seeds=tuple(_seed_row(run, entry.policy) for run in entry.runs),
                most_seeds=most_seeds,
                posts=entry.runs[0].posts,
                win_rate=win_rate_of(entry),
                unjudged=entry.unjudged,
                at_equal_length=at_equal_length,
                is_extrapolated=is_extrapolated,
                comparison=pair.comparison if pair else None,
                verdict=verdict_of.get(entry.label),
                changes=pair.changes if pair else None,
                score=entry.mean(lambda result: result.score),
                kl=entry.mean(lambda result: result.kl),
                tokens=entry.mean(lambda result: result.tokens),
                rouge_l=entry.mean(lambda result: result.rouge_l),
                eos_rate=entry.mean(lambda result: result.eos_rate),
            )
        )
    return rows


def ranked(rows: Sequence[EntryRow]) -> list[EntryRow]:
    """Return the rows, the highest win rate first, and those without a rate last."""
    return sorted(rows, key=lambda row: -row.win_rate.estimate if row.win_rate else 1.0)


def win_rate_of(entry: Entry) -> Interval | None:
    """Return the win rate over seeds and posts; None if too many posts have no verdict."""
    if entry.win_rate is None:
        return None
    by_seed = [replace(entry, runs=(run,)).win_rate for run in entry.runs]
    pooled = pool([rate for rate in by_seed if rate is not None])
    return pooled.interval if pooled else None


def rate_at_equal_length(entry: Entry) -> tuple[Interval | None, bool]:
    """Return the win rate at equal length, over seeds and posts, and whether it extrapolates.

    It is None if a seed has none, or if too many posts have no verdict.
    """
    rates = []
    is_extrapolated = False
    for result in entry.results:
        at_length = result.at_equal_length
        if entry.win_rate is None or at_length is None or at_length.rate is None:
            return None, False
        rates.append(at_length.rate)
        is_extrapolated = is_extrapolated or at_length.is_extrapolated
    pooled = pool(rates)
    return pooled.interval if pooled else None, is_extrapolated


def title_parts(rows: Sequence[EntryRow]) -> list[TitlePart]:
    """Return which entries have which verdict; many without a clear one are only counted."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in TITLE_KINDS}
    for row in rows:
        if row.verdict is not None:
            by_kind[_title_kind(row, row.verdict)].append(row.marked_label)

    unclear = by_kind["no difference"] + by_kind["inconclusive"]
    if len(unclear) > MOST_UNCLEAR_NAMES:
        by_kind["no difference"] = []
        by_kind["inconclusive"] = []
        by_kind["many unclear"] = unclear
    return [TitlePart(kind, tuple(labels)) for kind, labels in by_kind.items() if labels]


def _title_kind(row: EntryRow, verdict: Verdict) -> str:
    if verdict.interval is None:
        return "unknown"
    if row.agrees_in_every_seed:
        return MORE_OFTEN if verdict.interval.estimate > 0 else LESS_OFTEN
    return TITLE_KIND_OF[verdict.word]


def _seed_row(run: RunResult, policy: str) -> SeedRow:
    result = run.policies[policy]
    return SeedRow(run=run.name, seed=run.seed, win_rate=result.win_rate, unjudged=result.unjudged)


def _different(runs: Sequence[RunResult]) -> list[RunResult]:
    return list({(run.name, run.seed): run for run in runs}.values())


def what_differs(entries: Sequence[Entry]) -> list[RunDifference]:
    """Return how the runs of other entries were set up differently from that of the first one."""
    base = entries[0]
    rows = []
    for entry in entries[1:]:
        if entry.name == base.name:
            continue
        groups = {base.label: base.runs, entry.label: entry.runs}
        # These sections change no policy: memory settings split batches, the others are of judging.
        settings = differing_settings(groups, ignored=["memory", "eval", "checks"])
        if settings:
            rows.append(RunDifference(label=entry.label, settings=tuple(settings)))
    return rows


# -- posts and figures -----------------------------------------------------------------------------


def compared_posts(entries: Sequence[Entry]) -> ComparedPosts:
    """Return the posts of the first entry's first seed, those first whose verdict changed.

    An entry without that seed takes part with its first one.
    """
    seed = entries[0].seeds[0]
    frames = []
    for entry in entries:
        same_seed = [run for run in entry.runs if run.seed == seed]
        run = same_seed[0] if same_seed else entry.runs[0]
        frames.append(judged_posts(run, entry.policy))

    changed: list[Sample] = []
    unchanged: list[Sample] = []
    samples = samples_from(frames, authors=[entry.label for entry in entries])
    has_real_texts = any(run.has_real_texts for entry in entries for run in entry.runs)
    example = first_example(samples, has_real_texts)  # the page has it once
    for sample, rows in zip(samples, side_by_side(frames), strict=True):
        changes = {change_of(rows[0]["verdict"], row["verdict"]) for row in rows[1:]}
        is_changed = not changes.isdisjoint((BETTER, WORSE))
        (changed if is_changed else unchanged).append(sample)
    return ComparedPosts(
        seed=seed,
        count=len(samples),
        changed=len(changed),
        samples=[x for x in (*changed, *unchanged) if x is not example][:NUMBER_OF_SAMPLES],
        example=example,
        facts=wanted_facts(example, has_real_texts),
    )


def main_figure(rows: Sequence[EntryRow], base: str) -> Figure | None:
    """Draw the win rates, and the differences from the first entry with what decides on them."""
    rates = [
        Bar(
            label=f"{row.label}\n(1 seed)" if row.is_single_seed else row.label,
            color=color_of(row.policy),
            value=row.win_rate.estimate,
            interval=(row.win_rate.low, row.win_rate.high),
            seeds=tuple(row.seed_rates) if len(row.seed_rates) > 1 else (),
            is_of_one_seed=row.is_single_seed,
        )
        for row in rows
        if row.win_rate is not None
    ]
    gaps = []
    for row in rows:
        by_seed = row.comparison.by_seed if row.comparison else ()
        bar = difference_bar(row.label, color_of(row.policy), row.verdict, by_seed)
        if bar is not None:
            gaps.append(bar)
    panels = []
    if rates:
        panels.append(win_rates("Win rate", rates))
    if gaps:
        panels.append(differences(f"Difference from {base}", gaps, x_label="percentage points"))
    return figure("win-rate", panels)


def terminal_text(rows: Sequence[EntryRow], base: EntryRow, path: Path) -> str:
    """Return the verdicts for a terminal; the last line is the path of the page."""
    header = ("", "win rate [95%]", f"minus {base.label}", "verdict")
    table = []
    for row in rows:
        rate = percent(row.win_rate)
        if row.win_rate is None:
            rate = f"{MISSING} ({percent(row.unjudged)} unjudged)"
        gap = points(row.verdict.interval).replace(" points", "") if row.verdict else MISSING
        table.append((row.label, rate, gap, row.verdict.word.value if row.verdict else MISSING))
    return render.fill_text(
        "compare_terminal.txt",
        rows=rows,
        base=base,
        title_parts=title_parts(rows),
        result_table=text_table(header, table),
        path=path,
    )


if __name__ == "__main__":
    main()
