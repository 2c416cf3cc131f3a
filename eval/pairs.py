"""All pairs of systems of a run against each other, on the posts that both have, in both orders.

    python -m eval.pairs --preset tiny

writes `judgements.jsonl`, whose `policy` names both. `make leaderboard DIRECT=1` makes it:
strengths then rest on all pairs, and not on the comparisons with the reference alone.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from eval.controls import rows_for
from eval.judge import (
    config_with_cap,
    judge_both_orders,
    make_judge,
    questions_about,
    read_policies,
    summarize,
)
from eval.judges.protocol import Row
from eval.win_rate import pair_name
from stages.driving.start import run_stage
from stages.runs import open_stage
from stages.settings.config import Config, UserError


def judge_pairs(config: Config) -> dict[str, Any]:
    """Judge all pairs of systems, write `judgements.jsonl`, return the manifest's results.

    Raises UserError where there are fewer than two systems or the judge cannot be asked.
    """
    with open_stage(config, "pairs") as run:
        policies = read_policies(run.require("summaries"))
        if len(policies) < 2:
            raise UserError(f"there is one system, {next(iter(policies))}: pairs need two")
        judge = make_judge(config, policies)
        first = next(iter(policies.values()))
        # All questions of a run share one cap: pairs may spend what the others left.
        beside = [
            *questions_about(config, policies, config.judge.repeats),
            *questions_about(config, rows_for(config, first)),
        ]
        judgements = judge_both_orders(run, judge, pair_rows(policies), "pairs", beside)
        results = summarize(judge.about, judgements)
        run.finish(results)
    return results


def pair_rows(policies: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """For all pairs of systems the first one's rows, with the other's summary as the reference."""
    by_post = {name: {row["id"]: row for row in rows} for name, rows in policies.items()}
    return {
        pair_name(a, b): [
            {**row, "reference": other["summary"], "reference_score": other["score"]}
            for post, row in by_post[a].items()
            if (other := by_post[b].get(post))
        ]
        for a, b in combinations(policies, 2)
    }


def main(argv: list[str] | None = None) -> None:
    """Judge all pairs of systems of a run."""
    description = "judge all pairs of systems of a run in both orders"
    results = run_stage("pairs", judge_pairs, argv, description, config_with_cap)
    print(f"{results['judgements']} judgements, {results['unjudged']:.1%} of them unjudged")


if __name__ == "__main__":
    main()
