"""How many posts, and dollars, find a difference of two policies: planned from verdicts at hand.

    python -m eval.power --difference 3 --name tiny

Two policies are compared on the same posts, so what counts is the spread of each post's difference
in score. A finished run gives that spread, with its ties: the more posts score alike, the fewer are
needed, down to as many as such a difference must part. `--set judge.*` asks for the price of
another judge than the run's own, which inherits no price; its verdicts may spread differently.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import ceil, nan
from pathlib import Path
from typing import Any

import numpy as np

from eval.judges.openai.budget import (
    CHARACTERS_PER_TOKEN,
    TEMPLATE_TOKENS,
    is_to_reason,
    price_of,
    usual_reply,
)
from eval.judges.prompt import LINES, make_question
from eval.judges.protocol import VERDICTS, Row
from eval.rates.formulas import POWER, Floats
from eval.versus import changed_judge, finished_in, judge_changes
from eval.win_rate import post_scores, row_of, written_by_policy
from stages.finished import check_run, stage_folder
from stages.running.files import read_lines
from stages.running.progress import folded
from stages.settings import config as settings
from stages.settings.checks import Parser, in_one_line
from stages.settings.command_line import add_overrides, recorded_config
from stages.settings.config import JudgeSettings, UserError

MANY_TIES = 0.9  # beyond it a spread rests on so few posts that a number of posts is a guess
ALPHA = 0.05
REFERENCE = "reference"
MOST_POSTS_READ = 500  # whose texts say how long a question is
WIDTHS = (8, 11, 11, 6, 8, 10)  # of the table's columns
NAME = 24  # of the column of names before them


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What shows a difference between two policies, or of one policy from a rate of 1/2."""

    pair: tuple[str, str]
    """The later policy, and the other one or `reference`."""
    alone: bool
    """Whether it is one policy against the reference; a policy may be called that, too."""
    spread: float
    """Standard deviation of a post's difference in score."""
    ties: float
    """Share of the posts that score alike for both; against the reference, that score 1/2."""
    posts: int
    """Posts to judge, with those that will have no verdict."""
    questions: int
    """Questions to the judge about them: each policy in both orders."""
    detectable: float
    """The difference that as many posts as the run has detect, in [0, 1]."""


def posts_needed(spread: float, difference: float) -> int:
    """Posts at which a paired test finds a mean difference at 80% power, two-sided at 5%.

    By statsmodels' power of the t-test on differences with this standard deviation, which for so
    many posts is that of the sign-flip test. `spread` and `difference` in the same unit.
    """
    from statsmodels.stats.power import TTestPower

    # An effect above one standard deviation shows with ten posts, and a test needs some.
    effect = min(1.0, difference / spread)
    return ceil(TTestPower().solve_power(effect_size=effect, alpha=ALPHA, power=POWER))


def spread_under(differences: Floats, difference: float) -> float:
    """The standard deviation to plan with: the one seen, or more where ties leave too little room.

    If posts that are no tie differ by m, a mean of `difference` parts at least a share of
    `difference / m` of them, so the variance is at least `difference * m - difference^2`.
    m is their mean size, weighted by size: `mean of squares / mean of sizes`.
    """
    size = float((differences**2).mean() / np.abs(differences).mean())
    least = max(0.0, difference * size - difference**2)
    return float(np.sqrt(max(differences.var(ddof=1), least)))


def detectable_difference(spread: float, posts: int) -> float:
    """The mean difference that so many posts find at 80% power, two-sided at 5%."""
    from statsmodels.stats.power import TTestPower

    return float(spread * TTestPower().solve_power(nobs=posts, alpha=ALPHA, power=POWER))


def needed(judgements: Sequence[Row], difference: float) -> list[Needed]:
    """For all pairs of policies, and each policy against the reference, what shows `difference`.

    `difference` in [0, 1]. A pair without spread, such as two policies that write alike, is left
    out. Raises UserError where no pair has any.
    """
    scores = post_scores(judgements)
    needs = []
    for earlier, later in [*combinations(scores, 2), *((None, name) for name in scores)]:
        others = dict.fromkeys(scores[later], 0.5) if earlier is None else scores[earlier]
        pairs = [(scores[later][post], others[post]) for post in scores[later] if post in others]
        judged = np.array([a - b for a, b in pairs if a is not None and b is not None])
        if len(judged) > 1 and np.ptp(judged):
            share = len(judged) / len(pairs)
            needs.append(_needed((later, earlier), judged, share, difference))
    if not needs:
        raise UserError(
            "the verdicts have no spread over posts: plan from a run whose posts differ"
        )
    return needs


def _needed(
    pair: tuple[str, str | None], differences: Floats, judged: float, difference: float
) -> Needed:
    """From each judged post's difference, and the share of the posts that are judged."""
    spread = float(differences.std(ddof=1))
    posts = ceil(posts_needed(spread_under(differences, difference), difference) / judged)
    later, earlier = pair
    return Needed(
        pair=(later, earlier or REFERENCE),
        alone=earlier is None,
        spread=spread,
        ties=float((differences == 0).mean()),
        posts=posts,
        questions=posts * len(VERDICTS) * (1 if earlier is None else 2),
        detectable=detectable_difference(spread, len(differences)),
    )


def dollars_a_question(
    judge: JudgeSettings, judgements: Sequence[Row], summaries: Path
) -> float | None:
    """USD for one question, from the tokens that the judge counted, else from the texts' lengths.

    0 for a judge that asks no server; None where the price is not known.
    """
    if judge.kind != "openai":
        return 0.0
    price = price_of(replace(judge, max_cost=0))  # a plan spends nothing
    if price is None:
        return None
    counted = [row for row in judgements if row["prompt_tokens"]]
    if counted:
        read, written = (
            float(np.mean([row[key] for row in counted]))
            for key in ("prompt_tokens", "completion_tokens")
        )
    else:
        read, written = _tokens_of_texts(summaries), usual_reply(judge, is_to_reason(judge))
    return price.of(read, written)


def _tokens_of_texts(summaries: Path) -> float:
    """About how many tokens a question about these summaries has."""
    rows = [row for path in written_by_policy(summaries) for row in read_lines(path)]
    drawn = rows[:: max(1, len(rows) // MOST_POSTS_READ)]
    texts = [
        make_question(row["query"], row["summary"], row["reference"], LINES).prompt for row in drawn
    ]
    return float(np.mean([len(text) for text in texts])) / CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS


def find_verdicts(name: str, seed: int, judge: str) -> Path:
    """The folder with the verdicts of a finished run. Raises UserError that names the way out."""
    check_run(name)
    root = settings.RUNS / name / f"seed{seed}" / "judge"
    folders = finished_in(root, judge)
    if not folders:
        raise UserError(f"{root / judge} holds no finished verdicts: run `make eval` first")
    if len(folders) > 1:
        judges = ", ".join(folder.name for folder in folders)
        raise UserError(f"{name} seed {seed} was judged by {judges}: choose one with JUDGE=")
    return folders[0]


def token_settings(judge: JudgeSettings) -> dict[str, Any]:
    """What the tokens of a question depend on: the model and how it is asked, not the server."""
    elsewhere = ("base_url", "accept_model")
    return {key: value for key, value in judge.identity.items() if key not in elsewhere}


def lines_of(needs: Sequence[Needed], price: float | None) -> list[str]:
    """The table, at most 80 columns wide; `price` in USD a question, None where not known."""
    header = ("posts", "questions", "USD", "ties", "spread", "now")
    lines = row_of("", _cells(header), NAME)
    for need in needs:
        dollars = "unknown" if price is None else f"{need.questions * price:,.2f}"
        cells = (f"{need.posts:,}", f"{need.questions:,}", dollars, f"{need.ties:.0%}")
        points = (f"{100 * need.spread:.1f}", f"{100 * need.detectable:.1f}")
        lines += row_of(_name(need), _cells((*cells, *points)), NAME)
    return lines


def warnings_of(needs: Sequence[Needed]) -> list[str]:
    """A line on the rows whose spread rests on few posts, because nearly all score alike."""
    alike = [_name(need) for need in needs if need.ties > MANY_TIES]
    if not alike:
        return []
    return folded(
        f"warning: more than {MANY_TIES:.0%} of the posts tie for {', '.join(alike)}: their numbers"
        " rest on the few posts that differ; judge more posts before you plan with them"
    )


def _name(need: Needed) -> str:
    return f" {'vs' if need.alone else '-'} ".join(need.pair)


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """What the command line asks for. Raises UserError for a difference that is none."""
    parser = Parser(description="posts and dollars that show a difference")
    parser.add_argument("--difference", required=True, help="of two win rates, in points")
    parser.add_argument("--name", default="tiny", help="the run whose verdicts say the spread")
    parser.add_argument("--seed", type=int, default=44413)
    parser.add_argument("--judge", default="", help="the folder of one judge, of several")
    add_overrides(parser, "judge.KEY=VALUE")
    args = parser.parse_args(argv)
    try:
        args.difference = float(args.difference)
    except ValueError:
        args.difference = nan
    if not 0 < args.difference < 100:
        raise UserError("give a difference between 0 and 100 points: make power DIFFERENCE=3")
    return args


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Print how many posts and dollars show a difference."""
    args = arguments(argv)
    folder = find_verdicts(args.name, args.seed, args.judge)
    config = recorded_config(folder)
    if config is None:
        raise UserError(f"{folder / 'config.json'} is missing: run `make eval` again")
    judge = changed_judge(asdict(config.judge), judge_changes(args.overrides, "power"))
    judgements = read_lines(folder / "judgements.jsonl")
    needs = needed(judgements, args.difference / 100)
    known = judgements if token_settings(judge) == token_settings(config.judge) else []
    price = dollars_a_question(judge, known, stage_folder(config, "summaries"))
    who = judge.model if judge.kind == "openai" else f"{judge.kind}, which costs nothing"
    print(f"{args.difference:g} points at 80% power, two-sided 5%, paired by post")
    for line in (f"spread and ties: {args.name} seed {args.seed}, {folder.name}", f"price: {who}"):
        print("\n".join(folded(line)))
    last = "spread: of a post's difference, points; now: detected by the posts judged so far"
    print("\n".join([*lines_of(needs, price), last, *warnings_of(needs)]))


if __name__ == "__main__":
    main()
