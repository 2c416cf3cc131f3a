"""The page that compares PPO, RLOO, DPO, best-of-n and so on at equal KL, over seeds.

    python -m reports.algorithms --name tiny --kl-coefs 0.02 0.05 0.1 0.2

reads the finished seeds of the runs `tiny-kl0.02`, ... and writes runs/reports/algorithms-tiny.md
and .html. An algorithm has one point for each coefficient of the KL penalty, best-of-n one for each
n. Between its points an algorithm is a straight line over the square root of KL. Two algorithms are
compared where both lines are, seed by seed; nothing is extrapolated. The text of the page is
`templates/algorithms.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reports import about_runs, render
from reports.algorithm_figures import (
    bars_against_base,
    main_figure,
    outside_the_zoom,
    over_kl_figure,
)
from reports.algorithm_points import BASE, BEST_OF_N, named, points_of
from reports.equal_kl import (
    PLACES,
    AlgorithmPair,
    by_verdict,
    other_pairs,
    pairs_of,
    pairs_with_base,
)
from reports.formats import MISSING, p_value, points, text_table
from reports.penalties import PenaltyEffect, SettingRow, penalty_effects, setting_rows
from reports.results import find_all
from stages.config.error_messages import Parser, in_one_line
from stages.config.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of the page, as its JSON has them."""

    pairs: Sequence[AlgorithmPair]
    settings: Sequence[SettingRow]
    penalties: Sequence[PenaltyEffect]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Write the page; print its verdicts and its path."""
    parser = Parser(description="compare algorithms at equal KL, over seeds")
    parser.add_argument("--name", required=True, help="the run that gave SFT and reward model")
    parser.add_argument("--kl-coefs", nargs="+", required=True, help="penalties of the runs")
    parser.add_argument("--judge", default="", help="the judge, if several have judged the runs")
    arguments = parser.parse_args(argv)
    print(write_page(arguments.name, arguments.kl_coefs, arguments.judge), end="")


def write_page(name: str, kl_coefs: Sequence[str], judge: str = "") -> str:
    """Write the page, and return its text for the terminal.

    Raises UserError if a run has not finished, or if no policy has a win rate.
    """
    names = [f"{name}-kl{coef}" for coef in dict.fromkeys(kl_coefs)]
    runs, left_out = find_all(names, judge)
    found = points_of(runs)
    if not found:
        raise UserError(f"no policy of {', '.join(names)} has a win rate: see the judge's replies")

    pairs = pairs_of(found)
    penalties = penalty_effects(found)
    settings = setting_rows(found)
    seeds = {point.seed for point in found}
    path = about_runs.write_page(
        "algorithms.md",
        stem=f"algorithms-{name}",
        names=names,
        runs=runs,
        numbers=Numbers(pairs=pairs, settings=settings, penalties=penalties),
        name=name,
        pairs=pairs,
        base=named(BASE),
        base_groups=by_verdict(pairs_with_base(pairs)),
        other_groups=by_verdict(other_pairs(pairs)),
        has_lines=bool(pairs),
        has_bars=bool(bars_against_base(pairs)),
        penalties=penalties,
        settings=settings,
        seed_count=len(seeds),
        best_of_n=BEST_OF_N,
        places=PLACES,
        left_out=left_out,
        main_figure=main_figure(found, pairs),
        outside=outside_the_zoom(found),
        gold_figure=over_kl_figure(found, is_gold=True),
        rate_figure=over_kl_figure(found, is_gold=False),
    )
    return terminal_text(name, pairs, len(seeds), path)


def terminal_text(name: str, pairs: Sequence[AlgorithmPair], seed_count: int, path: Path) -> str:
    """Return the verdicts for a terminal; the last line is the path of the page."""
    table = []
    for pair in pairs:
        verdict = pair.verdict
        table.append(
            (
                pair.name,
                points(verdict.interval).replace(" points", "") if verdict else MISSING,
                p_value(verdict.p_value) if verdict else MISSING,
                verdict.word.value if verdict else MISSING,
            )
        )
    header = ("at equal KL", "points [95%]", "corrected p", "verdict")
    return render.fill_text(
        "algorithms_terminal.txt",
        name=name,
        base=named(BASE),
        base_groups=by_verdict(pairs_with_base(pairs)),
        other_groups=by_verdict(other_pairs(pairs)),
        pairs=pairs,
        has_lines=bool(pairs),
        seed_count=seed_count,
        result_table=text_table(header, table) if table else "",
        path=path,
    )


if __name__ == "__main__":
    main()
