"""Policies that are compared: which they are, and what they are like next to each other.

An entry is named `name[/seed][:policy]`, such as `tiny:ppo` or `tiny/55513:dpo`. Without a seed it
is all finished seeds of the run. Two entries are compared seed by seed and on the same posts.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from statistics import fmean

import pandas as pd

from eval.scores import Scores
from eval.win_rate import paired_difference, win_rate
from reports.formats import MISSING
from reports.posts import EVEN, LOST, UNJUDGED, WON, judged_posts, texts_of
from reports.provenance import shown
from reports.results import Interval, PolicyResult, RunResult, find_runs, title_of
from reports.verdicts import Comparison
from stages.config.errors import UserError
from stages.config.judge import MOST_UNJUDGED

DEFAULT_POLICY = "ppo"
BETTER = "better"
WORSE = "worse"
BOTH_LOSE = "both lose"
UNCHANGED = "unchanged"
VERDICT_ORDER = (LOST, EVEN, WON)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A policy in some seeds of a run, with what it wrote and how it was judged."""

    name: str
    """The run's."""
    policy: str
    runs: tuple[RunResult, ...]
    """One for each seed; each has the policy."""
    label: str
    """How the page calls the entry everywhere."""
    seed: str = ""
    """The seed that was named; empty for all seeds."""

    @property
    def run_name(self) -> str:
        """The run, and the seed if one was named."""
        return f"{self.name}/{self.seed}" if self.seed else self.name

    @property
    def text(self) -> str:
        """How a command names the entry."""
        return f"{self.run_name}:{self.policy}"

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    @property
    def results(self) -> list[PolicyResult]:
        """What each run found about the policy."""
        return [run.policies[self.policy] for run in self.runs]

    @cached_property
    def posts(self) -> pd.DataFrame:
        """The judged posts of all its runs, as `reports.posts.judged_posts` returns them."""
        frames = [judged_posts(run, self.policy) for run in self.runs]
        return pd.concat(frames, ignore_index=True)

    @cached_property
    def unjudged(self) -> float:
        """The share of posts without a verdict, in the seed with the most of them."""
        shares = self.posts["score"].isna().groupby(self.posts["seed"]).mean()
        return float(shares.max())

    @cached_property
    def win_rate(self) -> Interval | None:
        """The win rate over posts, each the mean of its seeds; None if too many have no verdict."""
        if self.unjudged > MOST_UNJUDGED:
            return None
        rate = win_rate(mean_scores(self.posts, "score"), texts_of(self.posts))
        return Interval(estimate=rate.estimate, low=rate.low, high=rate.high)

    def mean(self, number_of: Callable[[PolicyResult], float | None]) -> float | None:
        """Return the mean over seeds of a number; None if a seed does not have it."""
        numbers = [number_of(result) for result in self.results]
        values = [value for value in numbers if value is not None]
        return fmean(values) if len(values) == len(numbers) else None


@dataclass(frozen=True, kw_only=True)
class Changes:
    """How verdicts and summaries on the same posts differ from the base's, over all seeds."""

    better: int
    """Posts with a better verdict."""
    worse: int
    both_lose: int
    unchanged: int
    unjudged: int
    identical: int
    """Pairs of summaries that are the same word for word."""
    summaries: int
    """Pairs of summaries."""

    @property
    def are_none(self) -> bool:
        """Whether every summary is the base's, word for word."""
        return self.identical == self.summaries


@dataclass(frozen=True, kw_only=True)
class Paired:
    """An entry compared with another one, on the seeds and posts that both have."""

    entry: Entry
    base: Entry
    runs: tuple[RunResult, ...]
    """The runs of the entry that are compared."""
    comparison: Comparison
    """The difference of the win rates, for `reports.verdicts`."""
    changes: Changes


@dataclass(frozen=True)
class DifferingSetting:
    """A setting that is not the same in all groups of runs."""

    name: str
    values: tuple[str, ...]
    """Of each group; a dash if it has no such setting."""


# -- reading entries -------------------------------------------------------------------------------


def read_entries(texts: Sequence[str], judge: str = "") -> tuple[list[Entry], list[str]]:
    """Return the entries that texts name, and a line about each seed that is left out.

    Raises UserError if fewer than two entries are named, or one names nothing that has finished.
    """
    if len(set(texts)) < 2:
        raise UserError('name two or more policies to compare, such as RUNS="tiny:ppo tiny:sft"')
    runs_by_name: dict[str, tuple[list[RunResult], list[str]]] = {}
    entries: dict[str, Entry] = {}
    left_out: list[str] = []
    for text in texts:
        name, seed, policy = parse_entry(text)
        if name not in runs_by_name:
            runs_by_name[name] = find_runs(name, judge)
        runs, lines = runs_by_name[name]
        if seed:
            runs = _runs_of_seed(runs, text, name, seed)
            lines = []
        entry, without_policy = _entry(runs, text, name, seed, policy)
        entries.setdefault(entry.text, entry)
        left_out += [*lines, *without_policy]
    if len(entries) < 2:
        only = next(iter(entries))
        raise UserError(f"{' and '.join(texts)} are all {only}: name two policies or runs")
    return _labelled(list(entries.values())), list(dict.fromkeys(left_out))


def parse_entry(text: str) -> tuple[str, str, str]:
    """Return name, seed and policy of `name[/seed][:policy]`; the seed is empty if none is named.

    Raises UserError for any other text.
    """
    parts = re.fullmatch(r"([^:/]+)(?:/(?:seed)?(\d+))?(?::(.*))?", text)
    if parts is None:
        raise UserError(f"{text!r} names no policy: write name[/seed][:policy], such as tiny:ppo")
    return parts[1], parts[2] or "", parts[3] or DEFAULT_POLICY


def _runs_of_seed(runs: Sequence[RunResult], text: str, name: str, seed: str) -> list[RunResult]:
    of_seed = [run for run in runs if run.seed == int(seed)]
    if not of_seed:
        raise UserError(f"{text}: seed {seed} of {name} has not finished: run `make eval` for it")
    return of_seed


def _entry(
    runs: Sequence[RunResult], text: str, name: str, seed: str, policy: str
) -> tuple[Entry, list[str]]:
    """Return the entry of the runs that have the policy, and a line about the other runs."""
    with_policy = [run for run in runs if policy in run.policies]
    if not with_policy:
        known = ", ".join(runs[0].policies)
        raise UserError(f"{text}: run {name} has no policy {policy}: it has {known}")
    without = [str(run.seed) for run in runs if policy not in run.policies]
    left_out = []
    if without:
        left_out.append(f"{name} has no policy {policy} in seed {', '.join(without)}.")
    title = title_of(policy, list(with_policy[0].policies))
    entry = Entry(name=name, seed=seed, policy=policy, runs=tuple(with_policy), label=title)
    return entry, left_out


def _labelled(entries: Sequence[Entry]) -> list[Entry]:
    """Add to each label that several entries share what tells their runs apart.

    Runs called after the first one, as ablations are, go by the rest of their name: `PPO` and
    `PPO (dropout)` of the runs `tiny` and `tiny-dropout`.
    """
    uses = Counter(entry.label for entry in entries)
    first = entries[0].run_name
    others = [entry.run_name for entry in entries if entry.run_name != first]
    are_called_after_first = all(name.startswith(f"{first}-") for name in others)
    labelled = []
    for entry in entries:
        run_name = entry.run_name
        if are_called_after_first:
            run_name = run_name.removeprefix(first).removeprefix("-")
        if uses[entry.label] > 1 and run_name:
            entry = replace(entry, label=f"{entry.label} ({run_name})")
        labelled.append(entry)
    return labelled


# -- comparing entries -----------------------------------------------------------------------------


def compare(entry: Entry, base: Entry) -> Paired:
    """Compare an entry with another: seed by seed, or two single runs whatever their seeds.

    Raises UserError if they have no seed or post in common, or if a post has two texts.
    """
    both = _posts_of_both(entry, base)
    changes = _changes(both)
    return Paired(
        entry=entry,
        base=base,
        runs=tuple(run for run in entry.runs if run.seed in set(both["seed"])),
        comparison=_comparison(entry, base, both, is_same_text=changes.are_none),
        changes=changes,
    )


def _posts_of_both(entry: Entry, base: Entry) -> pd.DataFrame:
    """Return a row for each post and seed of both; the base's columns end in `_base`."""
    base_posts = base.posts
    if len(entry.runs) == len(base.runs) == 1:
        base_posts = base_posts.assign(seed=entry.seeds[0])
    elif not set(entry.seeds) & set(base.seeds):
        raise UserError(
            f"{entry.text} and {base.text} have no seed in common: name one seed of each"
        )
    both = entry.posts.merge(base_posts, on=["seed", "post"], suffixes=("", "_base"))
    if both.empty:
        raise UserError(f"{entry.text} and {base.text} were judged on different posts")
    has_two_texts = both["query"].fillna("") != both["query_base"].fillna("")
    if has_two_texts.any():
        post = both.loc[has_two_texts, "post"].iloc[0]
        raise UserError(
            f"the posts differ: {post} has another text in {entry.text} than in {base.text}"
        )
    return both


def _changes(both: pd.DataFrame) -> Changes:
    verdicts = zip(both["verdict_base"], both["verdict"], strict=True)
    counts = Counter(change_of(before, after) for before, after in verdicts)
    written = both.dropna(subset=["summary", "summary_base"])
    return Changes(
        better=counts[BETTER],
        worse=counts[WORSE],
        both_lose=counts[BOTH_LOSE],
        unchanged=counts[UNCHANGED],
        unjudged=counts[UNJUDGED],
        identical=int((written["summary"] == written["summary_base"]).sum()),
        summaries=len(written),
    )


def _comparison(entry: Entry, base: Entry, both: pd.DataFrame, is_same_text: bool) -> Comparison:
    """Return the difference of the win rates, over posts and by seed."""
    if max(entry.unjudged, base.unjudged) > MOST_UNJUDGED:
        return Comparison(over_posts=None, p_over_posts=1.0, by_seed=())
    if is_same_text:  # any difference is the judge's noise
        nothing = Interval(estimate=0.0, low=0.0, high=0.0)
        by_seed = (0.0,) * both["seed"].nunique()
        return Comparison(over_posts=nothing, p_over_posts=1.0, by_seed=by_seed)

    over_posts = paired_difference(
        mean_scores(both, "score"), mean_scores(both, "score_base"), texts_of(both)
    )
    gaps = both["score"] - both["score_base"]
    gap_of_seed = gaps.groupby(both["seed"], sort=False).mean()
    return Comparison(
        over_posts=Interval(estimate=over_posts.estimate, low=over_posts.low, high=over_posts.high),
        p_over_posts=over_posts.p_value,
        by_seed=tuple(float(gap) for gap in gap_of_seed),
    )


def mean_scores(posts: pd.DataFrame, column: str) -> Scores:
    """Return each post's mean over seeds, in the order of the first seed; None if a seed has none.

    `posts` are rows as `reports.posts.judged_posts` returns them, of one or more seeds.
    """
    by_post = posts.groupby("post", sort=False)[column]
    is_complete = by_post.count() == posts["seed"].nunique()
    means = by_post.mean().where(is_complete)
    return {str(post): None if isnan(mean) else float(mean) for post, mean in means.items()}


def change_of(before: str, after: str) -> str:
    """Return how a verdict on a post changed from one policy to another."""
    if UNJUDGED in (before, after):
        return UNJUDGED
    if before == after:
        return BOTH_LOSE if after == LOST else UNCHANGED
    is_better = VERDICT_ORDER.index(after) > VERDICT_ORDER.index(before)
    return BETTER if is_better else WORSE


def differing_settings(
    groups: Mapping[str, Sequence[RunResult]], ignored: Sequence[str] = ()
) -> list[DifferingSetting]:
    """Return the settings that are not the same in all groups of runs.

    `ignored` are sections (`memory`) and settings (`base.hidden_size`) that may differ. A section
    is compared between the groups that have it, because not every run has every optional stage.
    """
    values: dict[str, dict[str, list[str]]] = {}  # setting -> group -> its different values
    for group, runs in groups.items():
        for run in runs:
            for section, fields in run.settings.items():
                for field, value in fields.items():
                    name = f"{section}.{field}"
                    if section in ignored or name in ignored:
                        continue
                    of_group = values.setdefault(name, {}).setdefault(group, [])
                    written = shown(name, value)
                    if written not in of_group:
                        of_group.append(written)

    rows = []
    for name, by_group in values.items():
        texts = {group: ", ".join(of_group) for group, of_group in by_group.items()}
        if len(set(texts.values())) > 1:
            rows.append(DifferingSetting(name, tuple(texts.get(key, MISSING) for key in groups)))
    return rows
