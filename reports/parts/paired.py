"""Policies of finished runs beside another one, seed by seed and on the same posts.

An entry is named `name[/seed][:policy]`; without a seed it is all finished seeds of the run.
`posts_frame` is what every comparison is made from: one row for each judged post of a policy.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import pandas as pd

from eval.scores import Scores
from eval.stats.formulas import CONFIDENCE, Interval, holm, mean_of_seeds, p_of_seeds
from eval.win_rate import PairedInterval, paired_difference, win_rate
from reports.parts.collect import Record, find_runs, judged_row, policies_of
from reports.parts.words import Row, named, shown
from stages.config.checks import UserError
from stages.config.judge import MOST_UNJUDGED

DEFAULT_POLICY = "ppo"
WON, EVEN, LOST, UNJUDGED = "won", "even", "lost", "unjudged"
BETTER, WORSE, FAILING, UNCHANGED = "better", "worse", "both lose", "unchanged"
UNCLEAR = "inconclusive"  # beside better and worse, of a policy
CHANGES = (BETTER, WORSE, FAILING, UNCHANGED, UNJUDGED)
HEIGHTS = {LOST: 0, EVEN: 1, WON: 2}
WRITTEN = {
    "query": "query",
    "summary": "summary",
    "proxy": "score",
    "length": "tokens",
    "kl": "kl",
    "ends": "has_eos",
    **{key: key for key in ("reference", "reference_tokens", "reference_score")},
}


def posts_frame(run: Record, policy: str) -> pd.DataFrame:
    """A row for each post that was judged of a policy, in the order of the judgements.

    seed; post: its id; text: the first id with an equal text; policy; score: of both orders in
    [0, 1], NaN unjudged; verdict; proxy, gold: scores of the run's own reward model and of the one
    that judged; length: tokens; kl: log-ratio to SFT, nats; query, summary, reference; ends: by
    itself. NaN or None where something is not known.
    """
    scores = run.rows("win_rate", "post_scores.jsonl")
    judged = [row for row in scores if row["policy"] == policy]
    written = {row["id"]: row for row in run.rows("summaries", f"{policy}.jsonl")}
    gold = run.rows("judge", "gold_scores.jsonl")
    golds = {row["id"]: row["score"] for row in gold if row["policy"] == policy}
    rows = [
        {
            "seed": run.seed,
            "post": row["id"],
            "text": row.get("post") or row["id"],
            "policy": policy,
            "score": row["score"],
            "verdict": verdict_of(row["score"]),
            "gold": golds.get(row["id"]),
            **{to: written.get(row["id"], {}).get(key) for to, key in WRITTEN.items()},
        }
        for row in judged
    ]
    columns = ["seed", "post", "text", "policy", "score", "verdict", "gold", *WRITTEN]
    return pd.DataFrame(rows, columns=columns).astype(
        {"score": float, "gold": float, "proxy": float}
    )


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """The rows of a frame by the names of its columns."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def verdict_of(score: float | None) -> str:
    """What both orders say together; a judge that contradicts itself has said even."""
    if score is None:
        return UNJUDGED
    return EVEN if score == 0.5 else WON if score > 0.5 else LOST


def change(before: str, after: str) -> str:
    """How one verdict stands to another on the same post."""
    if UNJUDGED in (before, after):
        return UNJUDGED
    if before == after:
        return FAILING if after == LOST else UNCHANGED
    return BETTER if HEIGHTS[after] > HEIGHTS[before] else WORSE


def side_by_side(frames: Sequence[pd.DataFrame]) -> list[list[Row]]:
    """For each post that all frames have its row in every frame, in the order of the first."""
    first, *others = ({row["post"]: row for row in rows_of(x)} for x in frames)
    both = [post for post in first if all(post in other for other in others)]
    return [[rows[post] for rows in (first, *others)] for post in both]


def scores_of(posts: pd.DataFrame, column: str = "score") -> Scores:
    """Each post's mean over the seeds, in the order of the first seed; None if a seed lacks it."""
    groups = posts.groupby("post", sort=False)[column]
    means = groups.mean().where(groups.count() == posts["seed"].nunique())
    return {str(post): None if mean != mean else float(mean) for post, mean in means.items()}


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

    @cached_property
    def posts(self) -> pd.DataFrame:
        """The posts of all its runs."""
        return pd.concat([posts_frame(run, self.policy) for run in self.runs], ignore_index=True)

    def mean(self, key: str) -> float | None:
        """The mean over its runs of a number of its summaries; None where one has none."""
        values = [judged_row(run)[f"{self.policy}/{key}"] for run in self.runs]
        return None if None in values else fmean(values)

    @property
    def unjudged(self) -> float:
        """The largest share of posts without a verdict, of all its runs."""
        return float(self.posts["score"].isna().groupby(self.posts["seed"]).mean().max())

    @property
    def rate(self) -> Interval | None:
        """The win rate over the posts, as a mean over seeds; None if too much is unjudged."""
        if self.unjudged > MOST_UNJUDGED:
            return None
        return win_rate(scores_of(self.posts), texts_of(self.posts))


def texts_of(posts: pd.DataFrame) -> dict[str, str]:
    """Id -> the first id with the same text."""
    return dict(zip(posts["post"], posts["text"], strict=True))


@dataclass(frozen=True, kw_only=True)
class Paired:
    """An entry beside the first one, on the seeds and posts of both."""

    entry: Entry
    first: Entry
    runs: list[Record]
    """The runs of the entry that are compared."""
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
        return mean_of_seeds(self.each)

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


def corrected(pairs: Sequence[Paired]) -> list[float]:
    """The p-value of each pair after Holm's correction."""
    return holm([pair.p_value for pair in pairs])


def verdicts(pairs: Sequence[Paired]) -> list[str]:
    """How each entry stands to the first, also after Holm's correction."""
    kinds = []
    for pair, p in zip(pairs, corrected(pairs), strict=True):
        is_told = pair.stands and pair.together is not None and p < 1 - CONFIDENCE
        above = pair.together is not None and pair.together.low > 0
        kinds.append((BETTER if above else WORSE) if is_told else UNCLEAR)
    return kinds


def beside(entry: Entry, first: Entry) -> Paired:
    """An entry beside the first: the same seeds, or two single runs whatever their seeds.

    Raises UserError where they have no seed or post in common, or a post has two texts.
    """
    others = first.posts
    if len(entry.runs) == len(first.runs) == 1:
        others = others.assign(seed=entry.seeds[0])
    elif not {*entry.seeds} & {*first.seeds}:
        raise UserError(f"{entry.label} and {first.label} have no seed in common: name one of each")
    both = entry.posts.merge(others, on=["seed", "post"], suffixes=("", "_first"))
    if both.empty:
        raise UserError(f"the posts differ: {entry.label} and {first.label} have none in common")
    for post in both.loc[both["query"].fillna("") != both["query_first"].fillna(""), "post"]:
        raise UserError(
            f"the posts differ: {post} has another text in {entry.label} than in {first.label}"
        )
    together, each = None, []
    if max(entry.unjudged, first.unjudged) <= MOST_UNJUDGED:
        sides = scores_of(both), scores_of(both, "score_first")
        together = paired_difference(*sides, texts_of(both))
        gaps = both["score"] - both["score_first"]
        each = gaps.groupby(both["seed"], sort=False).mean().tolist()
    texts = both.dropna(subset=["summary", "summary_first"])
    verdicts = zip(both["verdict_first"], both["verdict"], strict=True)
    return Paired(
        entry=entry,
        first=first,
        runs=[run for run in entry.runs if run.seed in {*both["seed"]}],
        together=together,
        each=each,
        changes=Counter(change(before, after) for before, after in verdicts),
        alike=int((texts["summary"] == texts["summary_first"]).sum()),
        written=len(texts),
    )


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
    parts = re.fullmatch(r"([^:/]+)(?:/(?:seed)?(\d+))?(?::(.*))?", text)
    if parts is None:
        raise UserError(f"{text!r} names no side: write name[/seed][:policy], such as tiny:ppo")
    return parts[1], parts[2] or "", parts[3] or DEFAULT_POLICY


def read_entry(text: str, judge: str) -> tuple[Entry, list[str]]:
    """The entry that `name[/seed][:policy]` names. Raises UserError where it is not there."""
    name, seed, policy = parts_of(text)
    runs, left_out = find_runs(name, judge)
    if seed:
        runs = [run for run in runs if run.seed == int(seed)]
        left_out = []
    if not runs:
        raise UserError(f"{text}: seed {seed} of {name} has not finished: run `make eval` for it")
    having = [run for run in runs if policy in policies_of(run)]
    if not having:
        there = ", ".join(policies_of(runs[0]))
        raise UserError(f"{text}: run {name} has no policy {policy}: it has {there}")
    lacking = [run.seed for run in runs if run not in having]
    left_out += [f"{name} seed{at} is left out: it has no policy {policy}." for at in lacking]
    return Entry(name=name, seed=seed, policy=policy, runs=having), left_out


def settings_apart(
    groups: Mapping[str, Sequence[Record]], free: Sequence[str] = ()
) -> pd.DataFrame:
    """The settings that are not alike, a row each and a column a group; NaN where it has none.

    `free`: sections (`memory`) and fields (`base.hidden_size`) that may differ. A section is
    compared between the groups that have it: not every run has an optional stage.
    """
    columns = {}
    for title, runs in groups.items():
        held: dict[str, dict[str, None]] = {}
        for section, values in (item for run in runs for item in run.settings.items()):
            for key, value in values.items():
                name = f"{section}.{key}"
                if section not in free and name not in free:
                    held.setdefault(name, {})[shown(name, value)] = None
        columns[title] = pd.Series({name: ", ".join(texts) for name, texts in held.items()})
    table = pd.DataFrame(columns)
    return table[table.nunique(axis=1) > 1]
