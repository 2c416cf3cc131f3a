"""Policies of finished runs beside the first of them: by how much they differ, and on which posts.

`reports.compare_page` puts it into words. An entry is named as `eval.versus` names a side; without
a seed it is all finished seeds of the run, which are paired seed by seed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.rates.formulas import Interval
from eval.versus import parts_of
from eval.win_rate import PairedInterval, Scores, paired_difference, win_rate
from reports.parts.collect import Record, find_runs, policies_of
from reports.parts.compared import mean_scores, over_seeds
from reports.parts.sample_rows import BETTER, WORSE, Row, change, post_rows
from reports.parts.verdict import MISSING, shown
from stages.settings.config import UserError
from stages.settings.judge import MOST_UNJUDGED

Posts = dict[str, Row]
"""Post id -> its row, with the one side that is compared."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A policy of some seeds of a run, with what it wrote and what was said of it."""

    name: str
    seed: str
    """The one that was asked for; empty: all."""
    policy: str
    runs: list[Record]
    posts: list[Posts]
    """Of each run."""

    @property
    def label(self) -> str:
        """How pages and commands name it."""
        return f"{self.name}{'/' if self.seed else ''}{self.seed}:{self.policy}"

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    def place_of(self, seed: int) -> int:
        """Which of its runs has a seed; the first if none has it."""
        return self.seeds.index(seed) if seed in self.seeds else 0

    @property
    def unjudged(self) -> float:
        """The largest share of posts without a verdict, of all its runs."""
        return max(
            sum(score is None for score in scores.values()) / len(scores)
            for scores in self.scores()
        )

    def scores(self) -> list[Scores]:
        """The score of each post, of each run."""
        return [points_of(posts) for posts in self.posts]

    @property
    def rate(self) -> Interval | None:
        """The win rate over the posts, as a mean over seeds; None if too much is unjudged."""
        return None if self.unjudged > MOST_UNJUDGED else win_rate(mean_scores(self.scores()))


@dataclass(frozen=True, kw_only=True)
class Against:
    """An entry beside the first one."""

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
    def over_seeds(self) -> tuple[float, float] | None:
        """95% interval of the mean difference over seeds."""
        return over_seeds(self.each) if self.each else None

    @property
    def is_clear(self) -> bool:
        """Whether the intervals over seeds and over posts leave out 0, both on one side."""
        if self.together is None or self.over_seeds is None:
            return False
        low, high = self.over_seeds
        return min(low, self.together.low) > 0 or max(high, self.together.high) < 0


def collect(texts: Sequence[str], judge: str = "") -> tuple[list[Entry], list[str]]:
    """What some texts name, and a line on each seed that is left out.

    Raises UserError where fewer than two are named, or one names nothing that has finished.
    """
    if len(set(texts)) < 2:
        raise UserError('name two or more to compare, such as RUNS="tiny:ppo tiny:sft"')
    entries: list[Entry] = []
    left_out: list[str] = []
    for text in dict.fromkeys(texts):
        entry, lines = read_entry(text, judge)
        if entry.label not in (entry_before.label for entry_before in entries):
            entries.append(entry)
        left_out += lines
    if len(entries) < 2:
        raise UserError(
            f"{' and '.join(texts)} are all {entries[0].label}: name two policies or runs"
        )
    return entries, list(dict.fromkeys(left_out))


def read_entry(text: str, judge: str = "") -> tuple[Entry, list[str]]:
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
    posts = [{row["id"]: row for row in post_rows(run, [policy])} for run in runs]
    return Entry(name=name, seed=seed, policy=policy, runs=runs, posts=posts), left_out


def against(entry: Entry, first: Entry) -> Against:
    """An entry beside the first. Raises UserError where they have no seed or post in common."""
    pairs = pairs_of(entry, first)
    sides = [(entry.posts[own], first.posts[theirs]) for own, theirs in pairs]
    for posts, others in sides:
        check_posts(entry, first, posts, others)
    scores = [(points_of(posts), points_of(others)) for posts, others in sides]
    own, theirs = zip(*scores, strict=True)
    judged = max(entry.unjudged, first.unjudged) <= MOST_UNJUDGED
    both = [
        (posts[post]["sides"][0], others[post]["sides"][0])
        for posts, others in sides
        for post in posts
        if post in others
    ]
    return Against(
        entry=entry,
        first=first,
        pairs=pairs,
        together=paired_difference(mean_scores(own), mean_scores(theirs)) if judged else None,
        each=[paired_difference(*sides_scores).estimate for sides_scores in scores]
        if judged
        else [],
        changes=Counter(change(other["verdict"], side["verdict"]) for side, other in both),
        alike=sum(side["text"] == other["text"] for side, other in both),
        written=len(both),
    )


def pairs_of(entry: Entry, first: Entry) -> list[tuple[int, int]]:
    """The runs with the same seed; two single runs are a pair whatever their seeds."""
    if len(entry.runs) == len(first.runs) == 1:
        return [(0, 0)]
    shared = [seed for seed in entry.seeds if seed in first.seeds]
    if not shared:
        raise UserError(f"{entry.label} and {first.label} have no seed in common: name one of each")
    return [(entry.seeds.index(seed), first.seeds.index(seed)) for seed in shared]


def check_posts(entry: Entry, first: Entry, posts: Posts, others: Posts) -> None:
    """Raise UserError unless posts of both have one text, and some are in both."""
    shared = [post for post in posts if post in others]
    if not shared:
        raise UserError(f"the posts differ: {entry.label} and {first.label} have none in common")
    for post in shared:
        if posts[post]["post"] != others[post]["post"]:
            raise UserError(
                f"the posts differ: {post} has another text in {entry.label} than in {first.label}"
            )


def points_of(posts: Posts) -> dict[str, float | None]:
    """The score of each post."""
    return {post: row["sides"][0]["points"] for post, row in posts.items()}


def changed_posts(entries: Sequence[Entry]) -> list[Row]:
    """The posts of all entries in the order of the data, with a side of each, of one seed.

    Each side after the first says how its verdict stands to the first's.
    """
    first, *others = entries
    seed = first.seeds[0]
    sides = [first.posts[0], *(entry.posts[entry.place_of(seed)] for entry in others)]
    rows = []
    for post, row in sides[0].items():
        if not all(post in posts for posts in sides):
            continue
        told = [posts[post]["sides"][0] for posts in sides]
        changes = [change(told[0]["verdict"], side["verdict"]) for side in told[1:]]
        marked = [side | {"change": name} for side, name in zip(told[1:], changes, strict=True)]
        rows.append(row | {"sides": [told[0], *marked]})
    return rows


def some_of_each(rows: Sequence[Row], others: int, changed: int, rest: int) -> list[Row]:
    """The first posts that changed for each of the `others`, then the first that did not.

    At most `changed` and `rest`; the places are shared out evenly.
    """
    share = changed // others
    wanted: set[str] = set()
    for side in range(1, others + 1):
        own = [row["id"] for row in rows if flipped(row["sides"][side])]
        wanted |= set(own[:share])
    kept = [row for row in rows if row["id"] in wanted]
    return [*kept, *[row for row in rows if not flips(row)][:rest]]


def flips(row: Row) -> bool:
    """Whether a verdict on a post changed for better or worse."""
    return any(map(flipped, row["sides"]))


def flipped(side: Row) -> bool:
    """Whether this side's verdict is better or worse than the first's."""
    return side.get("change") in (BETTER, WORSE)


def settings_apart(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """The settings that are not alike -> their values, one an entry; a dash where it has none.

    A section is compared between the entries that have it: not every run has an optional stage.
    """
    held = [values_of(entry) for entry in entries]
    names = dict.fromkeys(name for values in held for name in values)
    sections = [{section for section, _ in values} for values in held]
    differing = {}
    for section, key in names:
        values = [entry_values.get((section, key), MISSING) for entry_values in held]
        told = {value for value, own in zip(values, sections, strict=True) if section in own}
        if len(told) > 1:
            differing[f"{section}.{key}"] = values
    return differing


def values_of(entry: Entry) -> dict[tuple[str, str], str]:
    """Every setting of an entry's runs, by section and field, as a page shows it."""
    shown_values: dict[tuple[str, str], dict[str, None]] = {}
    for run in entry.runs:
        for section, values in run.settings.items():
            for key, value in values.items():
                shown_values.setdefault((section, key), {})[shown(f"{section}.{key}", value)] = None
    return {name: ", ".join(values) for name, values in shown_values.items()}


def mean_curve(runs: Sequence[Record], stage: str, key: str) -> list[dict[str, Any]]:
    """A metric of a stage as rows `step` and `key`, as the mean of the runs that have it."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rows(stage) if stage in run.manifests else []:
            if row.get(key) is not None:
                by_step.setdefault(row["step"], []).append(row[key])
    most = max(map(len, by_step.values()), default=0)
    return [
        {"step": step, key: sum(values) / most}
        for step, values in sorted(by_step.items())
        if len(values) == most
    ]
