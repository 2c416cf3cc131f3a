"""One switch at a time: what each ablation does to a run, over seeds.

    python -m reports.ablations_page --name tiny --ablations critic-sft dropout

takes the finished seeds of run `tiny` and of runs `tiny-critic-sft`, ... and writes
runs/reports/ablations-tiny.md and .html. An ablation is compared with the run on the same
posts and from the same SFT and reward model, seed by seed. The page shows apart how far posts and
how far seeds could move a difference.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pandas as pd

from reports.parts import page, verdict
from reports.parts.collect import Record
from reports.parts.compared import Compared, collect, numbers, over_seeds
from reports.parts.page import Block, Heading, Note, Table, Text
from reports.parts.run_report import note_sources
from reports.parts.verdict import MISSING, number, percent, whole
from stages.settings.config import UserError, fail
from stages.settings.presets import ABLATIONS

MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("ppo/win_rate", "win rate", percent),
    ("kl", "KL, nats", partial(number, digits=2)),
    ("ppo/tokens", "tokens", partial(number, digits=1)),
    ("eos_rate", "EOS sampled", percent),
)
DEFAULT = "default"


def main(argv: list[str] | None = None) -> None:
    """Write the page and print its lines."""
    parser = argparse.ArgumentParser(description="what each switch does, over seeds")
    parser.add_argument("--name", required=True, help="the run that ablations are compared with")
    parser.add_argument("--ablations", nargs="*", default=list(ABLATIONS))
    parser.add_argument("--judge", default="", help="where runs were judged by several")
    args = parser.parse_args(argv)
    try:
        default, others, left_out = collect(args.name, args.ablations, args.judge)
    except UserError as error:
        fail(error)
    title = f"Ablations of run {args.name}"
    made = blocks(args.name, default, others, left_out)
    path = page.write(page.beside_the_runs(), f"ablations-{args.name}", title, made)
    records = [*default, *(run for ablation in others for run in ablation.runs)]
    note_sources(path, "ablations", [args.name], records)
    print(page.for_terminal([summary(others), *map(conclusion, others)], path))


def blocks(
    name: str, default: list[Record], others: list[Compared], left_out: Sequence[str]
) -> list[Block]:
    """The page: conclusions, means, each seed, the switches, what it does and does not show."""
    rows = [numbers(record) for record in default]
    return [
        Text(summary(others), lead=True),
        *(Text(conclusion(ablation)) for ablation in others),
        *(Note(note) for note in (*caveats(rows, others), *left_out)),
        Heading("Means over seeds"),
        means_table(rows, others),
        Heading("Each seed"),
        seeds_table(rows, others),
        Heading("The switches"),
        switches_table(others),
        Heading("What this does and does not show"),
        *(Text(limit) for limit in limits(name, default, others)),
    ]


def summary(others: list[Compared]) -> str:
    """How many switches make a difference that seeds cannot explain, and which change nothing."""
    clear = [ablation.name for ablation in others if ablation.is_clear]
    if clear:
        told = f"{len(clear)} of {len(others)} switches moved the win rate by more than seeds could"
        told += f" explain: {', '.join(clear)}."
    elif all(len(ablation.differences) == 1 for ablation in others):
        told = f"One seed only: whether a switch matters ({len(others)} were tried) is not known."
    else:
        told = f"No switch of {len(others)} moved the win rate by more than seeds could explain."
    same = [ablation.name for ablation in others if not ablation.changed]
    return f"{told} No summary at all was changed by {' or '.join(same)}." if same else told


def conclusion(ablation: Compared) -> str:
    """One ablation in a sentence."""
    if not ablation.changed:
        return (
            f"{ablation.name}: changed no summary; all {whole(ablation.written)} are the"
            " default's, word for word."
        )
    each = ", ".join(f"{100 * value:+.1f}" for value in ablation.differences.values())
    told = f"{ablation.name}: {100 * ablation.mean:+.1f} points of win rate (seeds: {each})"
    if len(ablation.differences) == 1:
        return f"{told}; one seed only, which says nothing about seeds."
    doubt = "more than seeds could explain" if ablation.is_clear else "no difference is established"
    return f"{told}; {doubt}."


def points(interval: tuple[float, float] | None) -> str:
    """An interval of a difference, in points; a dash if there is none."""
    return f"[{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]" if interval else MISSING


def switches_table(others: list[Compared]) -> Table:
    """What each switch is and which setting it turns."""
    rows = [
        [ablation.name, ABLATIONS[ablation.name].settings, ABLATIONS[ablation.name].what]
        for ablation in others
    ]
    return Table(("switch", "setting", "what it does; details as the paper numbers them"), rows)


def means_table(default: list[dict[str, Any]], others: list[Compared]) -> Table:
    """A row a switch: means with 95% intervals over seeds, and the difference in win rate."""
    titles = [title for _, title, _ in MEASURED]
    header = ["switch", "less default", "over posts", "over seeds", "changed", *titles]
    rows = [[DEFAULT, *[MISSING] * 4, *_means(default)]]
    for ablation in others:
        cells = [*[MISSING] * 3, "none"]
        if ablation.changed:
            share = percent(ablation.changed / ablation.written)
            cells = [
                f"{100 * ablation.mean:+.1f}",
                points(ablation.posts),
                points(ablation.seeds),
                share,
            ]
        rows.append([ablation.name, *cells, *_means(ablation.rows)])
    caption = (
        "Means over seeds; in brackets 95% intervals (Student's t over the seeds; wide, for there"
        " are few; shares cut at 0 and 100%), none where all seeds give one number: that is no"
        " sign of precision. EOS sampled: responses that ended in the last 5% of PPO's updates, at"
        " least one; KL is of these too. Changed: held-out summaries that are not the default's,"
        " word for word. Less default: points of win rate, on the same posts and from the same SFT"
        " and reward model; its interval over posts with the seeds held fixed, and over seeds."
    )
    return Table(header, rows, caption, strong=True)


def _means(rows: list[dict[str, Any]]) -> list[str]:
    cells = []
    for key, _, form in MEASURED:
        values = [row[key] for row in rows]
        seeds, mean = over_seeds(values), form(fmean(values))
        if seeds and form is percent:  # a share
            seeds = max(0.0, seeds[0]), min(1.0, seeds[1])
        cells.append(f"{mean} [{form(seeds[0])}, {form(seeds[1])}]" if seeds else mean)
    return cells


def seeds_table(default: list[dict[str, Any]], others: list[Compared]) -> Table:
    """One row a run, with its interval over posts."""
    rows = []
    for name, runs in (
        (DEFAULT, default),
        *((ablation.name, ablation.rows) for ablation in others),
    ):
        for run in runs:
            cells = [form(run[key]) for key, _, form in MEASURED[1:]]
            rows.append([name, str(run["seed"]), verdict.rate(run, "ppo"), *cells])
    header = ["switch", "seed", *(title for _, title, _ in MEASURED)]
    return Table(header, rows, "In brackets: 95% intervals over the posts.")


def caveats(default: list[dict[str, Any]], others: list[Compared]) -> list[str]:
    """What to hold against the comparison."""
    frame = pd.DataFrame([*default, *(each for ablation in others for each in ablation.rows)])
    rows = [
        {str(key): value for key, value in values.items()} for values in frame.to_dict("records")
    ]
    warnings = [each(row) for each in (verdict.judge_flags, verdict.judge_note) for row in rows]
    notes = [note for note in dict.fromkeys(warnings) if note]
    if frame["judge"].nunique() > 1 or frame["posts"].nunique() > 1:
        notes.append("The runs were not judged alike: judge or number of posts differ.")
    seeds = {row["seed"] for row in default}
    for ablation in others:
        lacking = sorted(seeds - set(ablation.differences))
        if lacking:
            named = ", ".join(map(str, lacking))
            notes.append(f"{ablation.name} lacks seed {named}, which the default has.")
    unjudged = [
        f"{row['name']} seed {row['seed']}: {line}"
        for row in rows
        for line in verdict.unjudged({**row, "policies": ["ppo"]})
    ]
    return [*notes, *unjudged, *(note for ablation in others for note in ablation.notes)]


def limits(name: str, default: list[Record], others: list[Compared]) -> list[str]:
    """How far the conclusions reach."""
    rows = [numbers(record) for record in default]
    sentences = [
        "It shows what one switch does to this run with everything else at its setting, over"
        f" {len(default)} seeds. It shows no interaction of switches, nothing about other learning"
        " rates, and no difference smaller than its intervals. Each switch is judged by itself at"
        " 95%: the more of them, the likelier that one stands out by chance.",
        eos_limit(default, rows),
    ]
    named = {ablation.name for ablation in others}
    if "no-normalization" in named and shift_cancels(default[0].settings["ppo"]):
        sentences.append(
            "Without reward normalization (no-normalization) one constant is added to every score"
            " and, as the critic starts as the reward model, to every value. With gamma 1 it"
            " cancels in each TD error, reward plus next value less value: within a summary next"
            " value and value both carry it, at the end score and value. So it can matter only"
            " where EOS is missing and a fixed number takes the score's place."
        )
    if not all(row["pretrained"] and row["real_posts"] for row in rows):
        sentences.append(
            f"Run {name} is not a language model on real posts: that a detail makes no"
            " difference here does not say that it makes none at the paper's sizes, nor the"
            " other way round."
        )
    return sentences


def eos_limit(default: list[Record], rows: list[dict[str, Any]]) -> str:
    """How often EOS was missing at all; the EOS trick acts on no other summary."""
    sft, ppo = (fmean(row[f"{policy}/eos_rate"] for row in rows) for policy in ("sft", "ppo"))
    learned = [update["policy/eos_rate"] for record in default for update in record.rows("ppo")]
    return (
        "A missing EOS can only matter where it is missing: of the default's summaries while it"
        f" learned, at least {percent(min(learned))} of every update's end with EOS; of the"
        f" held-out posts', {percent(sft)} by SFT and {percent(ppo)} by PPO."
    )


def shift_cancels(ppo: dict[str, Any]) -> bool:
    """Whether a constant added to all scores and all of the critic's values changes no advantage.

    The score must stand where the critic has a value of the same text, and nothing may scale
    rewards that now have another mean.
    """
    same_start = ppo["critic_init"] == "reward_model" and ppo["gamma"] == 1
    return same_start and ppo["score_at"] == "after_eos" and not ppo["whiten_rewards"]


if __name__ == "__main__":
    main()
