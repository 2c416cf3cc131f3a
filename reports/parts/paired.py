"""Policies of finished runs beside another one, seed by seed and on the same posts.

An entry is named `name[/seed][:policy]`; without a seed it is all finished seeds of the run.
`reports.compare_page` and `reports.ablations_page` put it into words.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from eval.rates.formulas import CONFIDENCE, Interval, holm, mean_of_seeds, p_of_seeds
from eval.scores import Scores
from eval.win_rate import PairedInterval, paired_difference, win_rate
from reports.parts import plots
from reports.parts.blocks import Block
from reports.parts.cells import MISSING, Number
from reports.parts.collect import Record, explained_by_critic, find_runs, judged_row, policies_of
from reports.parts.sample_views import SCORES, by_id, change, verdict_of
from reports.parts.words import Row, named, shown
from stages.settings.checks import UserError
from stages.settings.judge import MOST_UNJUDGED

DEFAULT_POLICY = "ppo"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A policy of some seeds of a run, with what it wrote and how it was judged."""

    name: str
    seed: str = ""
    """The one that was named; empty: all."""
    policy: str
    runs: list[Record]
    of_one_run: bool = False
    """Whether all entries of the page are policies of one run, which the title names."""

    @property
    def run(self) -> str:
        """The run, and the seed if one was named."""
        return f"{self.name}{'/' if self.seed else ''}{self.seed}"

    @property
    def side(self) -> str:
        """How commands name it."""
        return f"{self.run}:{self.policy}"

    @property
    def label(self) -> str:
        """How pages name it."""
        return named(self.policy) if self.of_one_run else self.side

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    @property
    def critics(self) -> list[Row]:
        """What a note on the critic is made from, of each run; a policy may have none."""
        ppo = self.policy == "ppo"
        folders = [run.folders.get(self.policy) if ppo else None for run in self.runs]
        return [
            {"name": self.label, "explained_by_critic": explained_by_critic(folder)}
            for folder in folders
        ]

    def place_of(self, seed: int) -> int:
        """Which of its runs has a seed; the first if none has it."""
        return self.seeds.index(seed) if seed in self.seeds else 0

    @cached_property
    def written(self) -> list[dict[str, Row]]:
        """The summary of each post, of each run."""
        return [by_id(run.rows("summaries", f"{self.policy}.jsonl")) for run in self.runs]

    @cached_property
    def post_of(self) -> dict[str, str]:
        """Id -> the first id with the same text."""
        rows = [row for run in self.runs for row in run.rows("win_rate", SCORES)]
        return {row["id"]: row.get("post") or row["id"] for row in rows}

    @cached_property
    def scores(self) -> list[Scores]:
        """The score of each post, of each run; None if it is unjudged."""
        return [
            {
                row["id"]: row["score"]
                for row in run.rows("win_rate", SCORES)
                if row["policy"] == self.policy
            }
            for run in self.runs
        ]

    def mean(self, key: str) -> float | None:
        """The mean over its runs of a number of its summaries; None where one has none."""
        values = [judged_row(run)[f"{self.policy}/{key}"] for run in self.runs]
        return None if None in values else fmean(values)

    @property
    def unjudged(self) -> float:
        """The largest share of posts without a verdict, of all its runs."""
        shares = [[score is None for score in scores.values()] for scores in self.scores]
        return max(fmean(lacking) for lacking in shares)

    @property
    def rate(self) -> Interval | None:
        """The win rate over the posts, as a mean over seeds; None if too much is unjudged."""
        if self.unjudged > MOST_UNJUDGED:
            return None
        return win_rate(mean_scores(self.scores), self.post_of)


@dataclass(frozen=True, kw_only=True)
class Paired:
    """An entry beside the first one, on the seeds and posts of both."""

    entry: Entry
    first: Entry
    pairs: list[tuple[int, int]]
    """Which run of the entry stands beside which of the first."""
    together: PairedInterval | None
    """The difference of the win rates over posts; None if too much is unjudged."""
    each: list[float]
    """The difference of each pair."""
    changes: Counter[str]
    """How many verdicts are better, worse, ..., over all pairs."""
    alike: int
    """Summaries that are alike word for word."""
    written: int
    """Summaries in all pairs."""

    @property
    def runs(self) -> list[Record]:
        """The runs of the entry that are compared."""
        return [self.entry.runs[own] for own, _ in self.pairs]

    @property
    def over_seeds(self) -> tuple[float, float] | None:
        """95% interval of the mean difference over seeds."""
        return mean_of_seeds(self.each)

    @property
    def seeds_agree(self) -> bool:
        """Whether the interval over seeds leaves out 0."""
        return self.over_seeds is not None and not self.over_seeds[0] <= 0 <= self.over_seeds[1]

    @property
    def is_clear(self) -> bool:
        """Whether the intervals over seeds and over posts leave out 0, both on one side."""
        if self.together is None or self.over_seeds is None or self.alike == self.written:
            return False
        low, high = self.over_seeds
        return min(low, self.together.low) > 0 or max(high, self.together.high) < 0

    @property
    def stands(self) -> bool:
        """Whether the posts tell the two apart; of several pairs, whether the seeds do, too."""
        posts = self.together is not None and (self.together.low > 0 or self.together.high < 0)
        return posts if len(self.each) == 1 else self.is_clear

    @property
    def p_value(self) -> float:
        """Of no difference: over posts; of several pairs the larger one of that and the seeds',
        because both have to tell the two apart. 1 without a rate.
        """
        if self.together is None or self.alike == self.written:
            return 1.0
        return max(self.together.p_value, p_of_seeds(self.each) if len(self.each) > 1 else 0.0)


def above_first(pairs: Sequence[Paired]) -> int:
    """How many entries are told apart from the first and above it, also after Holm's correction."""
    corrected = holm([pair.p_value for pair in pairs])
    return sum(
        pair.stands and pair.together is not None and pair.together.low > 0 and p < 1 - CONFIDENCE
        for pair, p in zip(pairs, corrected, strict=True)
    )


def mean_scores(sides: Sequence[Scores]) -> Scores:
    """Each post's mean over the seeds; None if a seed has no verdict on it."""
    means: dict[str, float | None] = {}
    for post in sides[0]:
        values = [side.get(post) for side in sides]
        judged = [value for value in values if value is not None]
        means[post] = fmean(judged) if len(judged) == len(values) else None
    return means


def picture(name: str, what: str, each: Mapping[str, Sequence[float]]) -> list[Block]:
    """The mean difference of each with its interval over seeds; none where nothing has a rate.

    `each`: its name -> the differences of its seeds. `what` says from what they differ.
    """
    rows: list[tuple[str, float, float | None, float | None]] = []
    for label, values in each.items():
        if values:
            low, high = mean_of_seeds(values) or (None, None)
            ends = (low and 100 * low, high and 100 * high)
            rows.append((label, 100 * fmean(values), ends[0], ends[1]))
    caption = "Mean over seeds; bars are 95% t intervals over seeds, where seeds differ."
    panel = plots.differences(f"Win rate, {what}", rows)
    return [plots.figure(name, caption, [panel], 1.75, plots.tall(rows))] if rows else []


def read_entries(texts: Sequence[str], judge: str = "") -> tuple[list[Entry], list[str]]:
    """What some texts name, and a line on each seed that is left out.

    Raises UserError where fewer than two are named, or one names nothing that has finished.
    """
    if len(set(texts)) < 2:
        raise UserError('name two or more to compare, such as RUNS="tiny:ppo tiny:sft"')
    entries: dict[str, Entry] = {}
    left_out: list[str] = []
    for text in dict.fromkeys(texts):
        entry, lines = read_entry(text, judge)
        entries.setdefault(entry.side, entry)
        left_out += lines
    if len(entries) < 2:
        raise UserError(
            f"{' and '.join(texts)} are all {next(iter(entries))}: name two policies or runs"
        )
    return list(entries.values()), list(dict.fromkeys(left_out))


def parts_of(text: str) -> tuple[str, str, str]:
    """Name, seed and policy that `name[/seed][:policy]` names; no seed is empty, `/seed1` is 1.

    Raises UserError for what cannot be read so.
    """
    run, _, policy = text.partition(":")
    name, slash, seed = run.partition("/")
    seed = seed.removeprefix("seed")
    if not name or (slash and not seed.isdigit()):
        raise UserError(f"{text!r} names no side: write name[/seed][:policy], such as tiny:ppo")
    return name, seed, policy or DEFAULT_POLICY


def read_entry(text: str, judge: str) -> tuple[Entry, list[str]]:
    """The entry that `name[/seed][:policy]` names. Raises UserError where it is not there."""
    name, seed, policy = parts_of(text)
    runs, left_out = find_runs(name, judge)
    if seed:
        runs = [run for run in runs if run.seed == int(seed)]
        left_out = []
    if not runs:
        raise UserError(f"{text}: seed {seed} of {name} has not finished: run `make eval` for it")
    lacking = [run for run in runs if policy not in policies_of(run)]
    if len(lacking) == len(runs):
        there = ", ".join(policies_of(runs[0]))
        raise UserError(f"{text}: run {name} has no policy {policy}: it has {there}")
    left_out += [
        f"{name} seed{run.seed} is left out: it has no policy {policy}." for run in lacking
    ]
    runs = [run for run in runs if run not in lacking]
    return Entry(name=name, seed=seed, policy=policy, runs=runs), left_out


def beside(entry: Entry, first: Entry) -> Paired:
    """An entry beside the first. Raises UserError where they have no seed or post in common."""
    pairs = pairs_of(entry, first)
    written = [(entry.written[own], first.written[other]) for own, other in pairs]
    for posts, others in written:
        check_posts(entry, first, posts, others)
    scores = [(entry.scores[own], first.scores[other]) for own, other in pairs]
    judged = max(entry.unjudged, first.unjudged) <= MOST_UNJUDGED
    own_scores, first_scores = (mean_scores(sides) for sides in zip(*scores, strict=True))
    texts = [
        (posts[post]["summary"], others[post]["summary"])
        for posts, others in written
        for post in posts
        if post in others
    ]
    return Paired(
        entry=entry,
        first=first,
        pairs=pairs,
        together=paired_difference(own_scores, first_scores, entry.post_of) if judged else None,
        each=[paired_difference(*sides).estimate for sides in scores] if judged else [],
        changes=Counter(
            change(verdict_of(others[post]), verdict_of(posts[post]))
            for posts, others in scores
            for post in posts
            if post in others
        ),
        alike=sum(text == other for text, other in texts),
        written=len(texts),
    )


def pairs_of(entry: Entry, first: Entry) -> list[tuple[int, int]]:
    """The runs with the same seed; two single runs are a pair whatever their seeds."""
    if len(entry.runs) == len(first.runs) == 1:
        return [(0, 0)]
    shared = [seed for seed in entry.seeds if seed in first.seeds]
    if not shared:
        raise UserError(f"{entry.label} and {first.label} have no seed in common: name one of each")
    return [(entry.seeds.index(seed), first.seeds.index(seed)) for seed in shared]


def check_posts(entry: Entry, first: Entry, posts: dict[str, Row], others: dict[str, Row]) -> None:
    """Raise UserError unless posts of both have one text, and some are in both."""
    shared = [post for post in posts if post in others]
    if not shared:
        raise UserError(f"the posts differ: {entry.label} and {first.label} have none in common")
    for post in shared:
        if posts[post]["query"] != others[post]["query"]:
            raise UserError(
                f"the posts differ: {post} has another text in {entry.label} than in {first.label}"
            )


def settings_apart(entries: Sequence[Entry]) -> dict[str, list[str | Number]]:
    """The settings that are not alike -> their values, one an entry; a dash where it has none.

    A section is compared between the entries that have it: not every run has an optional stage.
    """
    held = [values_of(entry) for entry in entries]
    differing = {}
    for section, key in dict.fromkeys(name for values in held for name in values):
        values = [own.get((section, key), MISSING) for own in held]
        having = [value for value, own in zip(values, held, strict=True) if _has(own, section)]
        if len(set(having)) > 1:
            differing[f"{section}.{key}"] = values
    return differing


def _has(values: dict[tuple[str, str], str], section: str) -> bool:
    return any(name == section for name, _ in values)


def values_of(entry: Entry) -> dict[tuple[str, str], str]:
    """Every setting of an entry's runs, by section and field, as a page shows it."""
    shown_values: dict[tuple[str, str], dict[str, None]] = {}
    for run in entry.runs:
        for section, values in run.settings.items():
            for key, value in values.items():
                text = shown(f"{section}.{key}", value)
                shown_values.setdefault((section, key), {})[text] = None
    return {name: ", ".join(values) for name, values in shown_values.items()}
