"""Judge: compare every policy's summary with the reference, in both orders.

    python -m eval.judge --preset tiny --seed 44413
    python -m eval.judge --preset posts --max-cost 5 --set judge.kind=openai

writes one row per question to `judgements.jsonl`, and a gold reward model's scores to
`gold_scores.jsonl`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

from eval.judges.both_orders import comparison_of, judge_both_orders
from eval.judges.offline import FactsJudge, RewardModelJudge
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import TOO_LONG, VERDICTS, About, Comparison, Judge, Row
from stages.driving.start import run_stage
from stages.running.files import read_lines
from stages.runs import open_stage, write_rows
from stages.settings import config as settings
from stages.settings.command_line import config_from_arguments
from stages.settings.config import Config, JudgeSettings, UserError
from stages.settings.stages import OUTPUTS, RELEASED


def judge_summaries(config: Config) -> dict[str, Any]:
    """Judge all summaries of a run, write `judgements.jsonl`, return the manifest's results.

    Raises UserError if there are no summaries or the judge cannot be asked.
    """
    with open_stage(config, "judge") as run:
        policies = read_policies(run.require("summaries"))
        judge = make_judge(config, policies)
        judgements = judge_both_orders(run, judge, policies, f"judge {judge.about.kind}")
        results = summarize(judge.about, judgements)
        if scores := judge.scores_of(policies):
            write_rows(run, "gold_scores.jsonl", scores)
            results["gold"] = judge.facts()
        run.finish(results)
    return results


def read_policies(folder: Path) -> dict[str, list[Row]]:
    """The summaries of each policy, `sft` first, from a folder with one JSONL file per policy."""
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stem != "sft", path.stem))
    policies = {path.stem: read_lines(path) for path in paths}
    if not any(policies.values()):
        raise UserError(f"there is nothing to judge: {folder} holds no summaries")
    return policies


def questions_about(policies: Mapping[str, Sequence[Row]]) -> list[Comparison]:
    """What is asked about each policy's summaries: all of them, in both orders."""
    rows = [row for policy in policies for row in policies[policy]]
    return [comparison_of(row, order) for row in rows for order in VERDICTS]


def make_judge(config: Config, policies: dict[str, list[Row]]) -> Judge:
    """The judge that the settings name. Raises UserError if the key for its server is missing."""
    if config.judge.kind == "facts":
        return FactsJudge()
    if config.judge.gold:
        from eval.judges.gold import GoldJudge  # needs torch

        return GoldJudge(config)
    if config.judge.kind == "reward_model":
        return RewardModelJudge(row for rows in policies.values() for row in rows)
    if config.judge.kind == "local":
        from eval.judges.local import LocalJudge  # needs torch

        batch_size = config.memory.forward_batch_size
        return LocalJudge(config.judge.model, batch_size, config.judge.axis)
    cache = settings.RUNS / "judge_cache" / "replies.sqlite"
    return OpenAIJudge(config.judge, cache, without_a_server(config))


def without_a_server(config: Config) -> str:
    """The settings of a judge that needs no server, for what this run judges."""
    own = "SET=judge.kind=reward_model"
    if config.kind == OUTPUTS or (config.kind == RELEASED and not config.released.reward_model):
        own = 'SET="judge.kind=reward_model judge.model=..." (a run or folder with a reward model)'
    return f'{own}, or SET="judge.kind=local judge.model=..." (a chat model)'


def summarize(about: About, judgements: list[Row]) -> dict[str, Any]:
    """The manifest's results; shares lie in [0, 1], `share_first` is None without a decision.

    `too_long` names the posts that the judge would not take for their length, if there are any.
    """
    unjudged = [row for row in judgements if row["verdict"] == "unjudged"]
    decided = [row for row in judgements if row["verdict"] in ("policy", "reference")]
    first = [row for row in decided if row["verdict"] == VERDICTS[row["order"]]["A"]]
    too_long = sorted({row["id"] for row in unjudged if row["finish_reason"] == TOO_LONG})
    return {
        "judge": asdict(about),
        "models": sorted({row["model"] for row in judgements} - {""}),
        "judgements": len(judgements),
        "unjudged": len(unjudged) / len(judgements),
        "share_first": len(first) / len(decided) if decided else None,
        **({"too_long": too_long} if too_long else {}),
    }


def capped(judge: JudgeSettings, max_cost: float | None) -> JudgeSettings:
    """The settings with a command line's cap on the cost, if it gives one.

    Raises UserError for a cap of 0, because in the settings 0 means no cap.
    """
    if max_cost is None:
        return judge
    if not 0 < max_cost < inf:
        raise UserError(f"--max-cost must be above 0, not {max_cost:g}: leave it out for no cap")
    return replace(judge, max_cost=max_cost)


def config_with_cap(argv: list[str] | None, description: str) -> Config:
    """The config of a command line that also takes `--max-cost`."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--max-cost", type=float)
    given, others = own.parse_known_args(argv)
    config = config_from_arguments(others, f"{description}; also takes --max-cost USD")
    return replace(config, judge=capped(config.judge, given.max_cost))


def main(argv: list[str] | None = None) -> None:
    """Judge a run's summaries."""
    description = "judge each policy's summaries in both orders"
    results = run_stage("judge", judge_summaries, argv, description, config_with_cap)
    print(f"judge: {results['judge']['name']}"[:80])
    print(f"{results['judgements']} judgements, {results['unjudged']:.1%} of them unjudged")


if __name__ == "__main__":
    main()
