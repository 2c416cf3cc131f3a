"""All pairs of systems of a run against each other, on the posts that both have, in both orders.

    python -m eval.pairs --preset tiny

writes `judgements.jsonl`, whose `policy` names both. `make leaderboard DIRECT=1` makes it:
strengths then rest on all pairs, and not on the comparisons with the reference alone.
"""

from typing import Any

from eval.judge import config_with_cap, judge_both_orders, make_judge, read_policies, summarize
from eval.questions import RunQuestions, pair_rows
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
        # All questions of a run share one cap: pairs may spend what the others left.
        beside = RunQuestions(config, policies)
        judgements = judge_both_orders(run, judge, pair_rows(policies), "pairs", beside)
        results = summarize(judge.about, judgements)
        run.finish(results)
    return results


def main(argv: list[str] | None = None) -> None:
    """Judge all pairs of systems of a run."""
    description = "judge all pairs of systems of a run in both orders"
    results = run_stage("pairs", judge_pairs, argv, description, config_with_cap)
    print(f"{results['judgements']} judgements, {results['unjudged']:.1%} of them unjudged")


if __name__ == "__main__":
    main()
