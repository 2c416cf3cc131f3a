"""Stage `calibration` (`make judge-calibration`): does the judge agree with labeled comparisons?

The judge compares the two summaries of a seeded sample of the validation comparisons, in both
orders and without the label. The labels come from people in OpenAI's comparisons, and from a noisy
labeler in the built-in world. Posts are not truncated. The judge's errors on these pairs are also
used to correct its win rates.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from eval.stats.intervals import post_numbers
from eval.stats.simple_judges import compare_judges, compare_with_simple_judges, measured
from eval.stats.table import leaning, leanings, verdict_table
from eval.win_rate import post_scores
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.judge import MOST_UNJUDGED
from stages.config.sections import PROMPT, TOY, format_post
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

Item = TypeVar("Item")

# People agree with each other on this share of such pairs (Stiennon et al. 2020).
HUMAN_CEILING = (0.72, 0.77)
REFERENCE = "ref"  # the reference's policy in published comparisons
LABELS = "comparisons_validation"  # the split
LABELED = "labelled"  # what `judgements.jsonl` calls the policy; earlier runs have it, too
# With fewer pairs with a reference than this, the judge's errors are counted on all pairs.
FEWEST_WITH_REFERENCE = 100
# A judge is flagged if its interval reaches below these.
LEAST_AGREEMENT = 0.6
LEAST_KAPPA = 0.0
LEAST_CONSISTENCY = 0.6
# With this many posts, a judge that agrees with 72% of the labels, as people do, is shown to agree
# with more than 60% of them, with a power of 80% (two-sided test at 5%).
POSTS_NEEDED = 125
# What the simple judges, which read nothing, prefer.
NAMES = {
    "majority": "the label that most pairs have",
    "longest": "the longest text",
    "overlap": "the text that repeats most of the post",
}
PAIR_KEYS = ("id", "post", "with_reference", "family", "label", "answer", "words", "overlap")


def calibrate(config: Config) -> dict[str, Any]:
    """Write `judgements.jsonl` and `pairs.jsonl`, return the manifest's results.

    Raises UserError for a judge that cannot judge new texts, and if the labels cannot be read.
    """
    if knows_own_texts_only(config.judge):
        raise UserError(
            "judge.kind=reward_model knows only its own run's texts, which have no labels: choose"
            " another judge.kind, or set judge.model to another run's reward model"
        )
    with open_stage(config, "calibration") as run:
        bad_rows = BadRows(config.data.on_bad_row)
        pairs, available = labeled_pairs(run, bad_rows)
        bad_rows.write(run.partial)

        # Pairs about the same text are about the same post, whatever its ids.
        post_names = first_ids((pair["post"], pair["query"]) for pair in pairs)
        pairs = [pair | {"post": name} for pair, name in zip(pairs, post_names, strict=True)]

        judge = make_judge(config, {})
        judgements = judge_both_orders(run, judge, {LABELED: pairs}, label="calibrate")
        answered = with_answers(pairs, judgements)
        write_rows(run, "pairs.jsonl", [{key: pair[key] for key in PAIR_KEYS} for pair in answered])
        results = {
            **describe(answered, judgements),
            "judge": asdict(judge.about),
            "source": "built-in world" if config.data.source == TOY else "labeled comparisons",
            "of_pairs": available,
        }
        run.finish(results)
    print_summary(results)
    return results


# -- pairs -----------------------------------------------------------------------------------------


def labeled_pairs(run: Run, bad_rows: BadRows) -> tuple[list[Row], int]:
    """The pairs that the judge is asked about, and the number of pairs they are drawn from.

    They are the validation comparisons, or the labeled rows of existing summaries. Raises UserError
    if there are no labels.
    """
    config = run.config
    count = config.checks.calibration_pairs
    if config.kind == OUTPUTS:
        rows = labeled_rows(read_policies(run.require("summaries")))
        if not rows:
            raise UserError("no row has a label: name the column of labels, SET=outputs.label=...")
        return draw(rows, count, config.seed), len(rows)

    source = world_folder(config) if config.data.source == TOY else config.data.source
    comparisons = read_source(config.data, str(source), bad_rows, needed_splits=(LABELS,))[LABELS]
    pairs = sample_pairs(comparisons, count=count, seed=config.seed, prompt=config.data.prompt)
    return pairs, len(comparisons)


def labeled_rows(systems: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The labeled rows of existing summaries, as labeled pairs."""
    pairs = []
    for name, rows in systems.items():
        for row in rows:
            if "label" in row:
                pair = {
                    **row,
                    "id": f"{name}/{row['id']}",
                    "post": row["id"],
                    "family": name,
                    "with_reference": True,
                    **measured(row["query"], row["summary"], row["reference"]),
                }
                pairs.append(pair)
    return pairs


def sample_pairs(
    comparisons: Sequence[LocatedRow], count: int, seed: int, prompt: str = PROMPT
) -> list[Row]:
    """`count` labeled pairs about posts, drawn by seed and in the file's order; all if count is 0.

    If one of the two summaries is the reference, `summary` is the other one, so that the judge's
    errors can be told apart by side, as in an evaluation. Otherwise `summary` is the first in the
    file. `label` says whether `summary` was preferred.
    """
    numbered = [(number, row) for number, (_, row) in enumerate(comparisons) if not is_cnndm(row)]
    in_file_order = sorted(draw(numbered, count, seed), key=lambda drawn: drawn[0])
    return [make_pair(f"pair{number}", row, prompt) for number, row in in_file_order]


def draw(rows: Sequence[Item], count: int, seed: int) -> list[Item]:
    """`count` of the rows, drawn by seed; all of them, shuffled, if there are fewer, or for 0."""
    if count == 0 or count > len(rows):
        count = len(rows)
    return random.Random(f"calibration {seed}").sample(rows, count)


def make_pair(name: str, comparison: Row, prompt: str) -> Row:
    """A published comparison as a labeled pair."""
    policies = [summary["policy"] for summary in comparison["summaries"]]
    with_reference = policies.count(REFERENCE) == 1
    place = 0
    if with_reference:
        place = 1 - policies.index(REFERENCE)
    query = format_post(comparison["info"], prompt)
    summary = comparison["summaries"][place]["text"].strip()
    reference = comparison["summaries"][1 - place]["text"].strip()
    return {
        "id": name,
        "post": comparison["info"]["id"],
        "query": query,
        "summary": summary,
        "reference": reference,
        **measured(query, summary, reference),
        "with_reference": with_reference,
        "family": family_of(policies, REFERENCE),
        "label": comparison["choice"] == place,
    }


def with_answers(pairs: Sequence[Row], judgements: Sequence[Row]) -> list[Row]:
    """The pairs with `answer`: the mean of both orders in [0, 1], None if one is unjudged."""
    scores = post_scores(judgements)[LABELED]
    return [pair | {"answer": scores[pair["id"]]} for pair in pairs]


def as_frame(pairs: Sequence[Row]) -> pd.DataFrame:
    """Answered pairs in the form of `eval.stats.correction`, with `with_reference`."""
    columns = ["label", "answer", "post", "family", "with_reference"]
    frame = pd.DataFrame(pairs, columns=columns, dtype=object)
    frame = frame.astype({"label": bool, "with_reference": bool})
    frame["post"] = post_numbers(frame["post"].tolist())
    return frame


# -- results ---------------------------------------------------------------------------------------


def describe(pairs: Sequence[Row], judgements: Sequence[Row]) -> dict[str, Any]:
    """Agreement with the labels, and the judge's biases; shares lie in [0, 1].

    In `agreement`, a tie (also one between the orders) counts half; `agreement_decided` leaves ties
    out. `sensitivity` and `specificity` are agreement where the label prefers `summary`, and where
    it does not, also `by_family`. `statistics` are those of `leanings`, and the remaining keys
    those of `compare_with_simple_judges` and `find_flags`. Values are None if no reply of the judge
    is usable.
    """
    answered = [pair for pair in pairs if pair["answer"] is not None]
    frame = as_frame(answered)
    decided = frame[frame["answer"] != 0.5]
    errors = pairs_for_errors(pairs)
    texts = {pair["id"]: (pair["summary"], pair["reference"]) for pair in pairs}
    post_of = {pair["id"]: pair["post"] for pair in pairs}
    results = {
        "pairs": len(pairs),
        "posts": len(set(post_of.values())),
        "judged": len(frame),
        "ties": len(frame) - len(decided),
        "agreement": _agreement(frame),
        "agreement_decided": _agreement(decided),
        "sensitivity": _agreement(errors[errors["label"]]),
        "specificity": _agreement(errors[~errors["label"]]),
        "with_reference": bool(errors["with_reference"].all()),
        "error_pairs": len(errors),
        "by_family": errors_by_family(errors),
        "statistics": leanings(verdict_table(judgements, texts, post_of)),
        **compare_with_simple_judges(answered),
    }
    return results | find_flags(results)


def _agreement(pairs: pd.DataFrame) -> dict[str, Any] | None:
    """The agreement with the labels as data for a manifest, with the number of pairs."""
    share = agreement(pairs)
    if share is None:
        return None
    return {**asdict(share), "pairs": len(pairs)}


def pairs_for_errors(pairs: Sequence[Row]) -> pd.DataFrame:
    """The answered pairs on which errors are counted: those with a reference, if not too few."""
    answered = as_frame([pair for pair in pairs if pair["answer"] is not None])
    with_reference = answered[answered["with_reference"]]
    if len(with_reference) >= FEWEST_WITH_REFERENCE:
        return with_reference
    return answered


def correct(scores: Sequence[tuple[str, float]], pairs: Sequence[Row]) -> Corrected | None:
    """`corrected_rate` of one policy's scores, each with its post, by the labeled `pairs`."""
    errors = pairs_for_errors(pairs)
    values = np.array([score for _, score in scores], dtype=float)
    posts = post_numbers([post for post, _ in scores])
    return corrected_rate(values, errors, shift=shift_of(errors), posts=posts)


# -- flags -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Check:
    """A behavior that the judge must show more often than a bound."""

    what: str
    """The behavior, as a phrase that follows "it does not" or "it is not shown to"."""
    interval: Mapping[str, Any]
    """How often the judge shows it: `estimate`, `low` and `high`."""
    bound: float
    number_format: str = ".1%"

    @property
    def is_passed(self) -> bool:
        """Whether the judge significantly exceeds the bound."""
        return bool(self.interval["low"] > self.bound)

    @property
    def is_failed(self) -> bool:
        """Whether the judge is significantly below the bound."""
        return bool(self.interval["high"] < self.bound)

    def reason(self) -> str:
        """Why the check has not been passed."""
        start = "it does not" if self.is_failed else "it is not shown to"
        return f"{start} {self.what}: {_shown(self.interval, self.number_format)}"


def find_flags(results: Mapping[str, Any]) -> dict[str, Any]:
    """`flags`: reasons not to trust this judge; `undecided`: why a check is undecided, if one is.

    A judge that clearly fails a check is always flagged. If it neither clearly fails nor passes, it
    is flagged if the pairs are about `POSTS_NEEDED` posts or more, and undecided with fewer.
    """
    statistics = results["statistics"]
    posts = results["posts"]
    has_enough_posts = posts >= POSTS_NEEDED
    doubts = [check for check in checks_of(results) if not check.is_passed]

    flags = []
    if results["agreement"] is None:
        flags.append("no pair has a verdict in both orders")
    for check in doubts:
        if check.is_failed or has_enough_posts:
            flags.append(check.reason())
    share_first = statistics["share_first"]
    if leaning({"labeled pairs": share_first}):
        flags.append(f"it prefers the text shown first in {_shown(share_first)} of its choices")
    if statistics["unjudged"] > MOST_UNJUDGED:
        flags.append(f"{statistics['unjudged']:.1%} of its replies have no usable verdict")

    undecided = ""
    if not has_enough_posts and not all(check.is_failed for check in doubts):
        undecided = f"its calibration, too few posts ({posts} of {POSTS_NEEDED} needed)"
    return {"flags": flags, "undecided": undecided}


def checks_of(results: Mapping[str, Any]) -> list[Check]:
    """The checks for which there are verdicts."""
    checks = []
    if results["agreement"] is not None:
        agrees = f"agree with the labels on more than {LEAST_AGREEMENT:.0%}"
        checks.append(
            Check(
                what=f"{agrees} of {results['judged']} pairs",
                interval=results["agreement"],
                bound=LEAST_AGREEMENT,
            )
        )
    for name, simple in results["simple"].items():
        checks.append(
            Check(
                what=f"agree more often than {NAMES[name]}",
                interval=simple["difference"],
                bound=0.0,
                number_format="+.1%",
            )
        )
    if results["kappa_interval"] is not None:
        checks.append(
            Check(
                what=f"have a Cohen's kappa above {LEAST_KAPPA:.0f}",
                interval=results["kappa_interval"],
                bound=LEAST_KAPPA,
                number_format=".2f",
            )
        )
    # A consistency that is high enough is not doubted because posts are few.
    consistency = results["statistics"]["swap_consistency"]
    if consistency is not None and consistency["estimate"] < LEAST_CONSISTENCY:
        keeps = "keep its verdict after a swap of the order"
        checks.append(
            Check(
                what=f"{keeps} in {LEAST_CONSISTENCY:.0%} of the pairs",
                interval=consistency,
                bound=LEAST_CONSISTENCY,
            )
        )
    return checks


def _shown(interval: Mapping[str, Any], number_format: str = ".1%") -> str:
    """An estimate with its interval, in this number format."""
    estimate = format(interval["estimate"], number_format)
    low = format(interval["low"], number_format)
    high = format(interval["high"], number_format)
    return f"{estimate} [{low}, {high}]"


def print_summary(results: Mapping[str, Any]) -> None:
    """Print the result in lines of at most 80 columns."""
    agrees = results["agreement"]
    kappa = results["kappa_interval"]
    lines = [
        f"judge {results['judge']['name']} on {results['pairs']} labeled pairs",
        f"  agreement {_shown(agrees) if agrees else 'none'}",
        f"  Cohen's kappa {_shown(kappa, '.2f') if kappa else 'none'}, {results['ties']} ties",
    ]
    lines += [f"  FLAGGED: {flag}" for flag in results["flags"]]
    if results["undecided"]:
        lines.append(f"  NOT DECIDED: {results['undecided']}")
    for line in lines:
        print("\n".join(folded(line)))


# -- finished calibrations -------------------------------------------------------------------------


def calibration_of(folder: Path) -> dict[str, Any] | None:
    """The results of the finished calibration in a folder; None if it has not finished.

    Other judges that were calibrated for the same run are added to the simple ones, each compared
    on the pairs that both answered.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    results: dict[str, Any] = manifest["results"]
    answers = answers_in(folder)
    simple = dict(results["simple"])
    for other_folder in sorted(folder.parent.glob("*")):
        other_manifest = read_manifest(other_folder)
        if other_folder == folder or other_manifest is None:
            continue
        other_answers = answers_in(other_folder)
        shared = [pair for pair in answers if pair in other_answers]
        if shared:
            name = other_manifest["results"]["judge"]["name"]
            simple[name] = compare_judges(
                labels=np.array([pair.label for pair in shared]),
                answers=np.array([answers[pair] for pair in shared]),
                other_answers=np.array([other_answers[pair] for pair in shared]),
                posts=post_numbers([pair.post for pair in shared]),
            )
    return results | {"simple": simple}


@dataclass(frozen=True, kw_only=True)
class LabeledPair:
    """A key that identifies a pair of `pairs.jsonl`."""

    id: str
    post: str
    label: bool


def answers_in(folder: Path) -> dict[LabeledPair, float]:
    """The answers in a calibration's folder, without pairs that have none."""
    answers = {}
    for row in read_lines(folder / "pairs.jsonl"):
        if row["answer"] is not None:
            pair = LabeledPair(id=row["id"], post=row["post"], label=row["label"])
            answers[pair] = row["answer"]
    return answers
