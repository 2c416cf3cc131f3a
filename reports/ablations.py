"""One switch at a time: what each ablation does to a preset, over seeds.

    python -m reports.ablations --preset tiny --ablations critic-sft dropout

takes the finished seeds of run `tiny` and of runs `tiny-critic-sft`, ... and writes
reports/generated/ablations-tiny.md and .html. An ablation is compared with the preset on the same
posts and from the same SFT and reward model, seed by seed. How far posts and how far seeds could
move a difference is shown apart.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import pandas as pd

from eval.statistics import mean_of_seeds
from eval.win_rate import Scores, paired_difference
from reports import page, verdict
from reports.collect import Record, find_runs, row
from reports.page import Block, Heading, Note, Table, Text
from reports.verdict import number, percent
from stages.ablations import ABLATIONS
from stages.config import UserError, fail

MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("ppo/win_rate", "win rate", percent),
    ("kl", "KL, nats", partial(number, digits=2)),
    ("ppo/tokens", "tokens", partial(number, digits=1)),
    ("eos_rate", "EOS at 0.7", percent),
)
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One ablation beside the preset: rows of numbers, and differences in win rate by seed."""

    name: str
    what: str
    rows: list[dict[str, Any]]
    differences: dict[int, float]
    """Seed -> difference of the win rate on the same posts, a fraction; a seed on which too many
    posts have no verdict, on either side, is not among them."""
    posts: tuple[float, float] | None
    """95% interval of the mean difference over posts, the seeds held fixed; None without seeds."""


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its lines."""
    parser = argparse.ArgumentParser(description="what each switch does, over seeds")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--ablations", nargs="*", default=list(ABLATIONS))
    args = parser.parse_args(argv)
    try:
        default, others, left_out = collect(args.preset, args.ablations)
    except UserError as error:
        fail(error)
    title = f"Ablations of preset {args.preset}"
    path = page.write(
        f"ablations-{args.preset}", title, blocks(args.preset, default, others, left_out)
    )
    print("\n".join((*(conclusion(one) for one in others), f"report: {path}")))


def collect(
    preset: str, names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Compared], list[str]]:
    """The preset's rows, the ablations with a finished seed, and a line on what is left out.

    Raises UserError where a name is unknown or the preset has no finished run.
    """
    unknown = [name for name in names if name not in ABLATIONS]
    if unknown:
        raise UserError(f"no ablation {unknown[0]!r}: known are {', '.join(ABLATIONS)}")
    default, left_out = find_runs(preset)
    others = []
    for name in names:
        runs, out = find_runs(f"{preset}-{name}")
        left_out += out
        others.append(compare(name, default, runs))
    return [numbers(one) for one in default], others, left_out


def compare(name: str, default: Sequence[Record], runs: Sequence[Record]) -> Compared:
    """An ablation beside the preset, on the seeds that both have. Raises UserError without one."""
    by_seed = {one.seed: one for one in default}
    common = [one for one in runs if one.seed in by_seed]
    if not common:
        raise UserError(
            f"ablation {name} has no seed in common with its preset: run make ablations"
        )
    given = [one for one in common if has_rate(one) and has_rate(by_seed[one.seed])]
    pairs = {one.seed: (scores(one), scores(by_seed[one.seed])) for one in given}
    return Compared(
        name=name,
        what=ABLATIONS[name].what,
        rows=[numbers(one) for one in common],
        differences={seed: paired_difference(*pairs[seed]).estimate for seed in pairs},
        posts=over_posts(list(pairs.values())),
    )


def has_rate(record: Record) -> bool:
    """Whether so few posts are unjudged that the rate of PPO's summaries may be given."""
    return row(record)["ppo/win_rate"] is not None


def over_posts(pairs: Sequence[tuple[Scores, Scores]]) -> tuple[float, float] | None:
    """95% interval over posts of the mean difference of all seeds; None without seeds."""
    if not pairs:
        return None
    mine, presets = zip(*pairs, strict=True)
    together = paired_difference(mean_scores(mine), mean_scores(presets))
    return together.low, together.high


def numbers(record: Record) -> dict[str, Any]:
    """One run's row, with what ablations look at beside it."""
    ppo = record.results("ppo")
    return row(record) | {"eos_rate": ppo["policy/eos_rate"], "kl": ppo["objective/kl_k1"]}


def scores(record: Record) -> Scores:
    """The score of each post's PPO summary."""
    rows = record.rows("win_rate", "post_scores.jsonl")
    return {one["id"]: one["score"] for one in rows if one["policy"] == "ppo"}


def mean_scores(sides: Sequence[Scores]) -> Scores:
    """Each post's mean over the seeds; None where a seed has no verdict on it."""
    found: dict[str, float | None] = {}
    for post in sides[0]:
        values = [side.get(post) for side in sides]
        judged = [value for value in values if value is not None]
        found[post] = fmean(judged) if len(judged) == len(values) else None
    return found


def blocks(
    preset: str, default: list[dict[str, Any]], others: list[Compared], left_out: Sequence[str]
) -> list[Block]:
    """The page: conclusions, the table of means, each seed, what it does and does not show."""
    return [
        Text(summary(others), lead=True),
        *(Text(conclusion(one)) for one in others),
        *(Note(note) for note in (*caveats(default, others), *left_out)),
        Heading("Means over seeds"),
        means_table(default, others),
        Heading("Each seed"),
        seeds_table(default, others),
        Heading("What this does and does not show"),
        *(Text(one) for one in limits(preset, default)),
    ]


def summary(others: list[Compared]) -> str:
    """How many switches make a difference that seeds cannot explain."""
    clear = [one.name for one in others if is_clear(one)]
    if not clear:
        return f"None of the {len(others)} switches moves the win rate by more than seeds could."
    some = f"{len(clear)} of the {len(others)} switches move"
    return f"{some} the win rate by more than seeds could: {', '.join(clear)}."


def is_clear(one: Compared) -> bool:
    """Whether the interval over seeds and the one over posts both leave out 0, on one side."""
    seeds = mean_of_seeds(list(one.differences.values()))
    if seeds is None or one.posts is None:
        return False
    return min(seeds[0], one.posts[0]) > 0 or max(seeds[1], one.posts[1]) < 0


def conclusion(one: Compared) -> str:
    """One ablation in a sentence."""
    values = list(one.differences.values())
    if not values:
        return f"{one.name}: not compared, for too many posts have no verdict."
    mean, seeds = fmean(values), mean_of_seeds(values)
    each = ", ".join(f"{100 * value:+.1f}" for value in values)
    told = f"{one.name}: {100 * mean:+.1f} points of win rate (seeds: {each})"
    if seeds is None:
        return f"{told}; one seed only, which says nothing about seeds."
    doubt = "more than seeds could explain" if is_clear(one) else "no difference is established"
    return f"{told}; {doubt}."


def points(low: float, high: float) -> str:
    """An interval of a difference, in points."""
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"


def means_table(default: list[dict[str, Any]], others: list[Compared]) -> Table:
    """A row a switch: means with 95% intervals over seeds, and the difference in win rate."""
    header = ["switch", *(title for _, title, _ in MEASURED), "less default", "posts", "seeds"]
    rows = [[DEFAULT, *_means(default), "–", "–", "–"]]
    for one in others:
        values = list(one.differences.values())
        seeds = mean_of_seeds(values)
        mean = f"{100 * fmean(values):+.1f}" if values else verdict.MISSING
        intervals = [points(*each) if each else verdict.MISSING for each in (one.posts, seeds)]
        rows.append([one.name, *_means(one.rows), mean, *intervals])
    caption = (
        "Means over seeds; in brackets 95% intervals (Student's t over the seeds; wide, for there"
        " are few). Less default: points of win rate, on the same posts and from the same SFT and"
        " reward model; its interval over posts with the seeds held fixed, and over seeds."
    )
    return Table(header, rows, caption, strong=True)


def _means(rows: list[dict[str, Any]]) -> list[str]:
    cells = []
    for key, _, form in MEASURED:
        values = [one[key] for one in rows if one[key] is not None]
        if not values:
            cells.append(verdict.MISSING)
            continue
        seeds, mean = mean_of_seeds(values), form(fmean(values))
        cells.append(f"{mean} [{form(seeds[0])}, {form(seeds[1])}]" if seeds else mean)
    return cells


def seeds_table(default: list[dict[str, Any]], others: list[Compared]) -> Table:
    """One row a run, with its interval over posts."""
    rows = []
    for name, runs in ((DEFAULT, default), *((one.name, one.rows) for one in others)):
        for one in runs:
            cells = [form(one[key]) for key, _, form in MEASURED[1:]]
            rows.append([name, str(one["seed"]), verdict.rate(one, "ppo"), *cells])
    header = ["switch", "seed", *(title for _, title, _ in MEASURED)]
    return Table(header, rows, "In brackets: 95% intervals over the posts.")


def caveats(default: list[dict[str, Any]], others: list[Compared]) -> list[str]:
    """What to hold against the comparison."""
    frame = pd.DataFrame([*default, *(each for one in others for each in one.rows)])
    rows = [{str(key): value for key, value in one.items()} for one in frame.to_dict("records")]
    said = [each(one) for each in (verdict.judge_flags, verdict.judge_note) for one in rows]
    notes = [note for note in dict.fromkeys(said) if note]
    if frame["judge"].nunique() > 1 or frame["posts"].nunique() > 1:
        notes.append("The runs were not judged alike: judge or number of posts differ.")
    seeds = {one["seed"] for one in default}
    notes += [
        f"{one['name']} seed {one['seed']}: {line}"
        for one in rows
        for line in verdict.unjudged(one)
    ]
    notes += [
        f"{one.name} is not compared on every seed of the default."
        for one in others
        if set(one.differences) != seeds
    ]
    return notes


def limits(preset: str, default: list[dict[str, Any]]) -> list[str]:
    """How far the conclusions reach."""
    sft, ppo = (fmean(one[f"{policy}/eos_rate"] for one in default) for policy in ("sft", "ppo"))
    found = [
        "It shows what one switch does to this preset with everything else at its setting,"
        f" over {len(default)} seeds. It shows no interaction of switches, nothing about other"
        " learning rates, and no difference smaller than its intervals.",
        f"A missing EOS can only matter where it is missing: SFT's summaries end with EOS in"
        f" {percent(sft)}, PPO's in {percent(ppo)} of the held-out posts.",
    ]
    if not all(one["pretrained"] and one["real_posts"] for one in default):
        found.append(
            f"Preset {preset} is not a language model on real posts: that a detail makes no"
            " difference here does not say that it makes none at the paper's sizes, nor the"
            " other way round."
        )
    return found


if __name__ == "__main__":
    main()
