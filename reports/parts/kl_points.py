"""Points of KL and gold score: from a file of anybody's, or from finished runs.

A run with a KL penalty gives the policies that it ends with, PPO's and its rivals': the gold score
of their held-out summaries, beside the KL of the last updates. One without (`kl_coef=0`), in the
built-in world, gives its training curve: stretches of consecutive updates, whose sampled texts the
world's rule scores. So one run goes from KL 0 far beyond the peak. One seed takes runs of one kind
only.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.rates.overoptimisation import FEWEST, KlPoint, of, ranked_alike, seeds_of, strengths_of
from reports.parts import plots
from reports.parts.collect import Record, numbers_of
from reports.parts.words import Row
from stages.posts.bad_rows import BadRowError
from stages.posts.tables import parsed_rows
from stages.posts.toy import facts_of, score_summary
from stages.running.files import read_lines
from stages.settings.checks import UserError
from stages.settings.sections import EOS_TOKEN

STRETCHES = 12  # of a training curve, beside those at KL 0
NEEDED = ("kl", "gold", "seed")
OPTIONAL = {"proxy_strength": "strength", "proxy": "proxy", "proxy_accuracy": "accuracy"}
COLUMNS = (*NEEDED, *OPTIONAL)


# -- from a file -----------------------------------------------------------------------------------


def read_points(path: Path) -> list[KlPoint]:
    """The points of a CSV file (or JSONL, Parquet) with the columns COLUMNS; others are not read.

    Cells of the columns beside NEEDED may be empty. Raises UserError with file, line and mend for a
    row that is no point, and for a seed with too few KLs to be fitted.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file: correct INPUT=")
    points = [_point(where, row) for where, row in parsed_rows(path)]
    if not points:
        raise UserError(f"{path} holds no points: give rows of {', '.join(NEEDED)}")
    check_points(str(path), points)
    return points


def _point(where: str, row: Row) -> KlPoint:
    missing = [name for name in NEEDED if name not in row]
    if missing:
        has = ", ".join(map(str, row))
        raise BadRowError(where, f"no column {missing[0]}: add or rename it (there are {has})")
    cells = {name: "" if row.get(name) is None else str(row[name]).strip() for name in COLUMNS}
    kl, accuracy = _number(where, cells, "kl"), _given(where, cells, "proxy_accuracy")
    if kl < 0:
        raise BadRowError(where, f"kl is {kl:g}, below 0: give a mean over more samples, or 0")
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise BadRowError(where, f"proxy_accuracy is {accuracy:g}: give a share from 0 to 1")
    if not cells["seed"]:
        raise BadRowError(where, "seed is empty: fill it, or drop the row")
    return KlPoint(
        seed=cells["seed"],
        kl=kl,
        gold=_number(where, cells, "gold"),
        strength=cells["proxy_strength"],
        proxy=_given(where, cells, "proxy"),
        accuracy=accuracy,
    )


def _given(where: str, cells: Mapping[str, str], name: str) -> float | None:
    return _number(where, cells, name) if cells[name] else None


def _number(where: str, cells: Mapping[str, str], name: str) -> float:
    try:
        value = float(cells[name])
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise BadRowError(where, f"{name} is {cells[name]!r}, no number: correct or drop the row")
    return value


def check_points(source: str, points: Sequence[KlPoint]) -> None:
    """Raise UserError unless every seed of every strength has enough different KLs to be fitted."""
    for strength in strengths_of(points):
        curve = of(points, strength=strength)
        for seed in seeds_of(curve):
            kls = {point.kl for point in of(curve, seed=seed)} - {0.0}
            if len(kls) < FEWEST:
                named = f" of proxy_strength {strength}" if strength else ""
                raise UserError(
                    f"{source}: seed {seed}{named} has {len(kls)} different KLs above 0: give at"
                    f" least {FEWEST}, better 6 that reach beyond the peak, or drop the seed"
                )


def as_cells(point: KlPoint) -> list[str]:
    """A point as a row of the table COLUMNS, which `read_points` reads again."""
    numbers = (point.proxy, point.accuracy)
    proxy, accuracy = ("" if value is None else f"{value:.6g}" for value in numbers)
    return [f"{point.kl:.6g}", f"{point.gold:.6g}", point.seed, point.strength, proxy, accuracy]


# -- from runs -------------------------------------------------------------------------------------

RUNS = (
    "Runs with a KL penalty: SFT and the policies at the end of training. Scores are of held-out"
    " posts; the KL is training's, of its last updates and its own posts. Accuracy is how often"
    " the proxy and the judge agree whether a summary beats its reference. Runs"
    " without one: stretches of training, with the gold score of the texts sampled there by the"
    " rule of the built-in world; accuracy is the share of pairs of these texts, of different"
    " posts, that both rank alike, texts without EOS left out.",
)


def points_of_runs(records: Sequence[Record]) -> list[KlPoint]:
    """The points of finished runs; those at KL 0 from one run of a strength and seed.

    A strength is the comparisons that the reward model learned, with the size where that differs.
    Raises UserError for a run whose policy has no gold score, for too few samples of a curve, and
    for runs of both kinds in one seed: their KL and gold score are of other samples.
    """
    sizes = len({record.results("base")["parameters"] for record in records}) > 1
    points: list[KlPoint] = []
    kinds: dict[tuple[str, str], bool] = {}
    for record in records:
        strength = f"{record.results('rm')['training_pairs']} pairs"
        if sizes:
            strength = f"{plots.count(record.results('base')['parameters'])}, {strength}"
        start = {(point.strength, point.seed) for point in points if point.kl == 0}
        unbound = gives_curve(record)
        if kinds.setdefault((strength, str(record.seed)), unbound) != unbound:
            raise UserError(
                f"{record.name} seed {record.seed}: of one seed, runs with a KL penalty and without"
                " one do not mix, because one curve would have two kinds of KL: name one kind"
            )
        made = curve_of(record, strength) if unbound else ends_of(record, strength)
        points += [x for x in made if x.kl > 0 or (x.strength, x.seed) not in start]
    return points


def gives_curve(record: Record) -> bool:
    """Whether a run gives its training curve: one of the built-in world without a KL penalty."""
    return record.settings[record.policy]["kl_coef"] == 0 and not record.has_real_texts


def temperature_notes(records: Sequence[Record]) -> list[str]:
    """A line where KL and gold score are of samples at two temperatures."""
    apart: dict[tuple[float, float], int] = {}
    for record in records:
        evaluated = record.settings["eval"]["temperature"]
        learned = record.settings[record.policy]["temperature"]
        if evaluated != learned and not gives_curve(record):
            apart[learned, evaluated] = apart.get((learned, evaluated), 0) + 1
    return [
        f"{count} of {len(records)} runs: the KL is of samples at temperature {learned:g}, the gold"
        f" score of held-out summaries at {evaluated:g}. Where the two differ, the gold score is"
        " not of the samples whose KL stands beside it."
        for (learned, evaluated), count in apart.items()
    ]


def ends_of(record: Record, strength: str) -> list[KlPoint]:
    """SFT and what PPO, RLOO and Dr.GRPO end with. Raises UserError without their gold score.

    Gold and proxy score are of the held-out summaries, KL is that of the last updates: of training
    posts, at the temperature of training. The accuracy is how often proxy and judge agree whether
    the summary beats the reference.
    """
    row = numbers_of(record)
    gold = record.results("win_rate").get("scores", {}).get("gold", {})
    points = []
    for policy in ("sft", *record.gradient_stages):
        if not gold.get(policy):
            raise UserError(
                f"{record.name} seed {record.seed}: {policy} has no gold score: judge it with"
                " judge.kind=facts or a gold reward model"
            )
        points.append(
            KlPoint(
                seed=str(record.seed),
                kl=max(0.0, row[f"{policy}/kl"]),
                gold=gold[policy]["estimate"],
                strength=strength,
                proxy=row[f"{policy}/score"],
                accuracy=row[f"{policy}/rm_agrees"],
            )
        )
    return points


def curve_of(record: Record, strength: str) -> list[KlPoint]:
    """Stretches of the run's training, each as many updates with samples, or one more.

    The law gives each point the same weight and noise, so none may rest on a few leftover updates.

    KL is the mean over a stretch's updates, the gold score that of its sampled texts by the rule of
    the built-in world, and the accuracy the share of pairs of these texts, of different posts, that
    proxy and rule rank alike. Raises UserError where too few updates have samples.
    """
    stage = record.policy
    split = record.results(stage)["queries_from"]
    posts = {
        row["query"]: row["id"]
        for row in read_lines(record.folders["base"] / "data" / f"{split}.jsonl")
    }
    samples: dict[int, list[Row]] = {}
    for row in record.rows(stage, "samples.jsonl"):
        samples.setdefault(row["step"], []).append(row)
    # A policy that has not learned yet may differ from SFT by rounding, which is no KL.
    kls = {row["step"]: max(0.0, round(row["objective/kl"], 4)) for row in record.rows(stage)}
    moved = [step for step in samples if kls[step] > 0]
    if len(moved) < FEWEST:
        raise UserError(
            f"{record.name} seed {record.seed}: samples of {len(moved)} updates above KL 0 make no"
            f" curve: train it with {stage}.samples_every=1"
        )
    still, parts = [step for step in samples if kls[step] == 0], min(STRETCHES, len(moved))
    stretches = [*_in_parts(still, ceil(len(still) * parts / len(moved))), *_in_parts(moved, parts)]
    return [
        KlPoint(
            seed=str(record.seed),
            kl=fmean(kls[step] for step in steps),
            strength=strength,
            **_scores([row for step in steps for row in samples[step]], posts),
        )
        for steps in stretches
    ]


def _in_parts(steps: Sequence[int], parts: int) -> list[Sequence[int]]:
    """The steps in `parts` neighbouring stretches whose lengths differ by at most one."""
    ends = [len(steps) * part // parts for part in range(parts + 1)] if parts else []
    return [steps[first:end] for first, end in pairwise(ends)]


def _scores(rows: Sequence[Row], posts: Mapping[str, str]) -> dict[str, Any]:
    """Gold and proxy score of some samples, and how often the two rank them alike."""
    gold = [_rule_score(row, posts) for row in rows]
    # Of a text without EOS the logged score may be the trick's and not the proxy's.
    ended = [
        (row["score"], score)
        for row, score in zip(rows, gold, strict=True)
        if row["response"].endswith(EOS_TOKEN)
    ]
    return {
        "gold": fmean(gold),
        "proxy": fmean(row["score"] for row in rows),
        "accuracy": ranked_alike(*zip(*ended, strict=True)) if ended else None,
    }


def _rule_score(row: Row, posts: Mapping[str, str]) -> float:
    if row["query"] not in posts:
        raise UserError(
            f"a sample of update {row['step']} is about a post that was cut or is not in stage"
            " base: the rule cannot score it"
        )
    return score_summary(row["response"].removesuffix(EOS_TOKEN), facts_of(posts[row["query"]]))
