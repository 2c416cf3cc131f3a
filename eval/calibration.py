"""Calibration: does this judge agree with labelled comparisons, and what follows for a win rate?

    python -m eval.calibration --preset tiny

The judge compares the two summaries of a seeded sample of the validation comparisons, in both
orders, without seeing the label: that of people in OpenAI's comparisons, of a noisy labeller in the
built-in world. Posts are shown whole.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.judge import judge_both_orders, make_judge, read_policies
from eval.judges.offline import knows_own_texts_only
from eval.judges.protocol import Row
from eval.stats.correction import (
    Corrected,
    agreement,
    corrected_rate,
    errors_by_family,
    family_of,
    shift_of,
)
from eval.stats.formulas import needed_to_show, post_numbers
from eval.stats.simple_judges import beside_judge, beside_simple_judges, measured
from eval.stats.table import leaning, leanings, verdict_table
from eval.win_rate import post_scores
from stages.config.config import TOY, Config, UserError
from stages.config.judge import MOST_UNJUDGED
from stages.config.sections import PROMPT, format_post
from stages.config.stages import OUTPUTS
from stages.data.bad_rows import BadRows
from stages.data.builtin import world_folder
from stages.data.readers import read_source
from stages.data.schemas import is_cnndm
from stages.data.tables import LocatedRow
from stages.data.text_metrics import first_ids
from stages.runs.files import read_lines
from stages.runs.manifest import read_manifest
from stages.runs.run import Run, open_stage, write_rows
from stages.runs.text import folded

# People agree with each other on so many of such pairs (Stiennon et al. 2020).
HUMAN_CEILING = (0.72, 0.77)
REFERENCE = "ref"  # the reference's policy in published comparisons
LABELS = "comparisons_validation"
# With fewer pairs with a reference than this, the judge's errors are counted on all pairs.
FEWEST_WITH_REFERENCE = 100
LEAST_AGREEMENT = 0.6  # a judge whose interval reaches below it is flagged
# Posts with which a judge that agrees as often as people do is shown to, in 4 of 5 cases.
NEEDED = needed_to_show(HUMAN_CEILING[0], LEAST_AGREEMENT)
LEAST_CONSISTENCY = 0.6
NAMES = {  # of the judges that need no judgement
    "majority": "the label that most pairs have",
    "longest": "the longest text",
    "overlap": "the text that repeats most of the post",
}


def calibrate(config: Config) -> dict[str, Any]:
    """Write `judgements.jsonl` and `pairs.jsonl`, return the manifest's results.

    Raises UserError for a judge that knows no new texts, and where the labels cannot be read.
    """
    if knows_own_texts_only(config.judge):
        raise UserError(
            "judge.kind=reward_model knows its own run's texts only and cannot be calibrated:"
            " choose another judge.kind, or another run's reward model by judge.model"
        )
    with open_stage(config, "calibration") as run:
        bad = BadRows(config.data.on_bad_row)
        pairs, of_pairs = labelled_pairs(run, bad)
        bad.write(run.partial)
        names = first_ids((pair["post"], pair["query"]) for pair in pairs)
        pairs = [pair | {"post": name} for pair, name in zip(pairs, names, strict=True)]
        judge = make_judge(config, {})
        judgements = judge_both_orders(run, judge, {"labelled": pairs}, "calibrate")
        answered = with_answers(pairs, judgements)
        write_rows(run, "pairs.jsonl", [{key: pair[key] for key in PAIR_KEYS} for pair in answered])
        results = describe(answered, judgements)
        source = "built-in world" if config.data.source == TOY else "labelled comparisons"
        results |= {"judge": asdict(judge.about), "source": source, "of_pairs": of_pairs}
        run.finish(results)
    print_summary(results)
    return results


def labelled_pairs(run: Run, bad: BadRows) -> tuple[list[Row], int]:
    """The pairs that the judge is tried on, and how many there are to draw from.

    They are the validation comparisons, or what the file of given summaries says of its rows.
    Raises UserError where neither has labels.
    """
    config = run.config
    count = config.checks.calibration_pairs
    seed = config.seed
    if config.kind == OUTPUTS:
        rows = labelled_rows(read_policies(run.require("summaries")))
        if not rows:
            raise UserError("no row has a label: name their column, SET=outputs.label=...")
        return drawn(rows, count, seed), len(rows)
    source = world_folder(config) if config.data.source == TOY else config.data.source
    located = read_source(config.data, str(source), bad, (LABELS,))[LABELS]
    return sample_pairs(located, count, seed, config.data.prompt), len(located)


PAIR_KEYS = "id post with_reference family label answer words overlap".split()


def labelled_rows(systems: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows that people have judged too, as the calibration takes them."""
    return [
        {
            **row,
            **{"id": f"{name}/{row['id']}", "post": row["id"], "family": name},
            **measured(row["query"], row["summary"], row["reference"]),
            "with_reference": True,
        }
        for name, rows in systems.items()
        for row in rows
        if "label" in row
    ]


def sample_pairs(
    located: Sequence[LocatedRow], count: int, seed: int, prompt: str = PROMPT
) -> list[Row]:
    """`count` labelled pairs about posts, drawn by seed (0, or fewer: all of them).

    Where one of the two is the reference, `summary` is the other one, so that the judge's errors
    can be told apart by side, as in an evaluation. Elsewhere `summary` is the first in the file.
    `label` says whether `summary` was preferred.
    """
    rows = [(number, row) for number, (_, row) in enumerate(located) if not is_cnndm(row)]
    ordered = sorted(drawn(rows, count, seed), key=lambda row: row[0])
    return [_pair(f"pair{number}", row, prompt) for number, row in ordered]


def drawn(rows: Sequence[Any], count: int, seed: int) -> list[Any]:
    """So many of the rows, drawn by seed; all of them where there are fewer, and for 0."""
    return random.Random(f"calibration {seed}").sample(rows, min(count or len(rows), len(rows)))


def _pair(name: str, row: dict[str, Any], prompt: str) -> Row:
    policies = [summary["policy"] for summary in row["summaries"]]
    with_reference = policies.count(REFERENCE) == 1
    place = 1 - policies.index(REFERENCE) if with_reference else 0
    query = format_post(row["info"], prompt)
    summary, reference = (row["summaries"][k]["text"].strip() for k in (place, 1 - place))
    return {
        "id": name,
        "post": row["info"]["id"],
        "query": query,
        "summary": summary,
        "reference": reference,
        **measured(query, summary, reference),
        "with_reference": with_reference,
        "family": family_of(policies, REFERENCE),
        "label": row["choice"] == place,
    }


def with_answers(pairs: Sequence[Row], judgements: Sequence[Row]) -> list[Row]:
    """The pairs with `answer`: the mean of both orders in [0, 1], None where one is unjudged."""
    scores = post_scores(judgements)["labelled"]
    return [pair | {"answer": scores[pair["id"]]} for pair in pairs]


def describe(pairs: Sequence[Row], judgements: Sequence[Row]) -> dict[str, Any]:
    """Agreement with the labels and what the judge leans to; shares lie in [0, 1].

    `agreement` counts a tie (also one between the orders) half; `agreement_decided` leaves ties
    out. `sensitivity` and `specificity`: agreement where the label prefers `summary` and where not,
    also `by_family`. `statistics` are `leanings`; the rest is that of `beside_simple_judges`. None
    where a judge says nothing usable.
    """
    answered = [pair for pair in pairs if pair["answer"] is not None]
    judged = as_frame(answered)
    errors = known_errors(pairs)
    decided = judged[judged["answer"] != 0.5]
    texts = {pair["id"]: (pair["summary"], pair["reference"]) for pair in pairs}
    post_of = {pair["id"]: pair["post"] for pair in pairs}
    results = {
        "pairs": len(pairs),
        "posts": len(set(post_of.values())),
        "judged": len(judged),
        "ties": len(judged) - len(decided),
        "agreement": _agreement(judged),
        "agreement_decided": _agreement(decided),
        "sensitivity": _agreement(errors[errors["label"]]),
        "specificity": _agreement(errors[~errors["label"]]),
        "with_reference": bool(errors["with_reference"].all()),
        "error_pairs": len(errors),
        "by_family": errors_by_family(errors),
        "statistics": leanings(verdict_table(judgements, texts, post_of)),
        **beside_simple_judges(answered),
    }
    reasons, undecided = flags(results)
    return results | {"flags": reasons, "undecided": undecided}


def as_frame(pairs: Sequence[Row]) -> pd.DataFrame:
    """Judged pairs as `eval.stats.correction` takes them, with `with_reference`."""
    columns = ("label", "answer", "post", "family", "with_reference")
    frame = pd.DataFrame(pairs, columns=columns, dtype=object)
    posts = post_numbers(frame["post"].tolist())
    return frame.astype({"label": bool, "with_reference": bool}).assign(post=posts)


def _agreement(pairs: pd.DataFrame) -> dict[str, Any] | None:
    share = agreement(pairs)
    return None if share is None else asdict(share) | {"pairs": len(pairs)}


def calibration_of(folder: Path) -> dict[str, Any] | None:
    """What the calibration in a folder found; None if it has not finished.

    Other judges of the same run join the simple ones, each on the pairs that both answered.
    """
    manifests = {path: read_manifest(path) for path in sorted(folder.parent.glob("*"))}
    finished = {path: manifest["results"] for path, manifest in manifests.items() if manifest}
    if folder not in finished:
        return None
    results = finished.pop(folder)
    answers = answers_in(folder)
    simple = dict(results["simple"])
    for rival, about in finished.items():
        answered = answers_in(rival)
        shared = [(p[2], answers[p], answered[p], p[1]) for p in answers if p in answered]
        if shared:
            columns = map(np.array, zip(*shared, strict=True))
            simple[about["judge"]["name"]] = beside_judge(*columns)
    return results | {"simple": simple}


def answers_in(folder: Path) -> dict[tuple[str, str, bool], float]:
    """The answer to each answered pair of a calibration, by the pair's id, post and label."""
    pairs = (pair for pair in read_lines(folder / "pairs.jsonl") if pair["answer"] is not None)
    return {(pair["id"], pair["post"], pair["label"]): pair["answer"] for pair in pairs}


def flags(results: dict[str, Any]) -> tuple[list[str], str]:
    """Reasons not to trust this judge, in plain sentences, and what posts are too few to decide.

    A judge that is worse than it must be is flagged whatever their number; one that is not shown
    to be better, where the pairs are about `NEEDED` posts.
    """
    statistics = results["statistics"]
    posts = results["posts"]
    has_enough_posts = posts >= NEEDED
    doubts = doubts_of(results)
    reasons = []
    if not results["agreement"]:
        reasons.append("no pair has a verdict in both orders")
    for reason, is_worse in doubts:
        if is_worse or has_enough_posts:
            reasons.append(reason)
    first = statistics["share_first"]
    if leaning({"": first}):
        reasons.append(f"it prefers the text shown first in {_shown(first)} of its choices")
    if statistics["unjudged"] > MOST_UNJUDGED:
        reasons.append(f"{statistics['unjudged']:.1%} of its replies say nothing usable")
    undecided = ""
    if not has_enough_posts and not all(is_worse for _, is_worse in doubts):
        undecided = f"its calibration, too few posts ({posts} of {NEEDED} needed)"
    return reasons, undecided


def doubts_of(results: dict[str, Any]) -> list[tuple[str, bool]]:
    """What the judge does not clearly do as it must, and whether it clearly does not."""
    share = f"agree with the labels on more than {LEAST_AGREEMENT:.0%} of {results['judged']} pairs"
    checks = [(results["agreement"], LEAST_AGREEMENT, share, ".1%")]
    checks += [
        (simple["difference"], 0.0, f"agree more often than {NAMES[name]}", "+.1%")
        for name, simple in results["simple"].items()
    ]
    checks.append((results["kappa_interval"], 0.0, "have a Cohen's kappa above 0", ".2f"))
    same = results["statistics"]["swap_consistency"]
    if same and same["estimate"] < LEAST_CONSISTENCY:
        kept = f"keep its verdict after a swap of the order in {LEAST_CONSISTENCY:.0%} of the pairs"
        checks.append((same, LEAST_CONSISTENCY, kept, ".1%"))
    return [
        (f"it {'does not' if worse else 'is not shown to'} {what}: {_shown(interval, form)}", worse)
        for interval, bound, what, form in checks
        if interval and interval["low"] <= bound
        for worse in [interval["high"] < bound]
    ]


def _shown(share: dict[str, Any], form: str = ".1%") -> str:
    """An estimate with its interval, each in a form of Python's."""
    estimate, low, high = (format(share[key], form) for key in ("estimate", "low", "high"))
    return f"{estimate} [{low}, {high}]"


def known_errors(pairs: Sequence[Row]) -> pd.DataFrame:
    """The judged pairs on which errors are counted: those with a reference, or all if few have."""
    judged = as_frame([pair for pair in pairs if pair["answer"] is not None])
    errors = judged[judged["with_reference"]]
    return errors if len(errors) >= FEWEST_WITH_REFERENCE else judged


def correct(scores: Sequence[tuple[str, float]], pairs: Sequence[Row]) -> Corrected | None:
    """`corrected_rate` of one policy's scores, each with its post, by the labelled `pairs`."""
    known = known_errors(pairs)
    values = np.array([score for _, score in scores], dtype=float)
    posts = post_numbers([post for post, _ in scores])
    return corrected_rate(values, known, shift_of(known), posts)


def print_summary(results: dict[str, Any]) -> None:
    """The result in some lines of at most 80 columns."""
    agreement = results["agreement"]
    kappa = results["kappa_interval"]
    shown = _shown(kappa, ".2f") if kappa else "none"
    lines = [
        f"judge {results['judge']['name']} on {results['pairs']} labelled pairs",
        f"  agreement {_shown(agreement) if agreement else 'none'}",
        f"  Cohen's kappa {shown}, {results['ties']} ties",
        *(f"  FLAGGED: {flag}" for flag in results["flags"]),
        *([f"  NOT DECIDED: {results['undecided']}"] if results["undecided"] else []),
    ]
    print("\n".join(part for line in lines for part in folded(line)))
