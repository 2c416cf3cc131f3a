"""Judge: compare every policy's summary with the reference, in both orders.

    python -m eval.judge --preset tiny --seed 44413
    python -m eval.judge --preset posts --max-cost 5 --set judge.kind=openai

Writes `judgements.jsonl`, a row per question, and a gold reward model's `gold_scores.jsonl`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from eval.control_texts import SELF, control_rows
from eval.judges.offline import FactsJudge, RewardModelJudge, knows_own_texts_only
from eval.judges.openai.server_judge import OpenAIJudge
from eval.judges.protocol import (
    CONTENT_FILTER,
    FILTERED,
    TOO_LONG,
    VERDICTS,
    About,
    Comparison,
    Judge,
    Reply,
    Row,
    comparison_of,
    judge_all,
)
from stages.config import config as settings
from stages.config.config import Config, UserError
from stages.config.judge_models import check_asking
from stages.runs.files import cut_file, read_lines, whole_lines
from stages.runs.run import Run, open_stage, write_rows

Task = tuple[str, Row, str]
"""The policy's name, the row with its summary, and the order in which the two are shown."""


def judge_summaries(config: Config) -> dict[str, Any]:
    """Judge all summaries of a run, write `judgements.jsonl`, return the manifest's results.

    Raises UserError if there are no summaries or the judge cannot be asked.
    """
    with open_stage(config, "judge") as run:
        policies = read_policies(run.require("summaries"))
        judge = make_judge(config, policies)
        # Controls that an earlier try has asked about have spent of the same money.
        same_cap = run_questions(config, policies)
        judgements = judge_both_orders(run, judge, policies, f"judge {judge.about.kind}", same_cap)
        results = summarize(judge.about, judgements)
        if scores := judge.scores_of(policies):
            write_rows(run, "gold_scores.jsonl", scores)
            results["gold"] = {"label": judge.label}
        run.finish(results)
    return results


def read_policies(folder: Path) -> dict[str, list[Row]]:
    """The summaries of each policy, `sft` first, from a folder with one JSONL file per policy."""
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stem != "sft", path.stem))
    policies = {path.stem: read_lines(path) for path in paths}
    if not any(policies.values()):
        raise UserError(f"there is nothing to judge: {folder} holds no summaries")
    return policies


def make_judge(config: Config, policies: dict[str, list[Row]]) -> Judge:
    """The judge that the settings name. Raises UserError if the key for its server is missing."""
    if config.judge.kind == "facts":
        return FactsJudge()
    if config.judge.gold:
        from eval.judges.gold import GoldJudge  # needs torch

        return GoldJudge(config)
    if config.judge.kind == "reward_model":
        return RewardModelJudge(row for rows in policies.values() for row in rows)
    check_asking(config)
    return OpenAIJudge(config.judge, settings.RUNS / "judge_cache" / "replies.sqlite")


def summarize(about: About, judgements: list[Row]) -> dict[str, Any]:
    """The manifest's results; shares lie in [0, 1], `share_first` is None without a decision.

    `too_long` and `filtered` name the posts that the judge or its server would not take, if any.
    """
    unjudged = [row for row in judgements if row["verdict"] == "unjudged"]
    decided = [row for row in judgements if row["verdict"] in ("policy", "reference")]
    first = [row for row in decided if row["verdict"] == VERDICTS[row["order"]]["A"]]
    results = {
        "judge": asdict(about),
        "models": sorted({row["model"] for row in judgements} - {""}),
        "judgements": len(judgements),
        "unjudged": len(unjudged) / len(judgements),
        "share_first": len(first) / len(decided) if decided else None,
    }
    for name, ends in (("too_long", {TOO_LONG}), ("filtered", {FILTERED, CONTENT_FILTER})):
        if posts := sorted({row["id"] for row in unjudged if row["finish_reason"] in ends}):
            results[name] = posts
    return results


def controls_of(config: Config, policies: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The controls that a run's judge can be asked about, of as many posts as the config says."""
    posts = next(iter(policies.values()))[: config.checks.control_posts]
    rows = control_rows(posts, config.data.prompt)
    return {SELF: rows[SELF]} if knows_own_texts_only(config.judge) else rows


def run_questions(config: Config, policies: Mapping[str, Sequence[Row]]) -> Iterator[Comparison]:
    """All that a run may ask its judge about some policies, which counts towards its cap."""
    for rows in chain(policies.values(), controls_of(config, policies).values()):
        yield from (comparison_of(row, order) for row in rows for order in VERDICTS)


def judge_both_orders(
    run: Run,
    judge: Judge,
    rows: Mapping[str, Sequence[Row]],
    label: str,
    same_cap: Iterable[Comparison] = (),
) -> list[Row]:
    """Judge each row's `summary` against its `reference` and append to `judgements.jsonl`.

    `rows`: name -> rows; the judgements get the name as their `policy`. A row is named by its `id`;
    `post` is the id of its post where the two differ. What stands in that file already is kept.
    `same_cap` are questions that were asked before and count under the same cap on the cost.
    """
    tasks = [(name, row, order) for name in rows for row in rows[name] for order in VERDICTS]
    judgements = kept_judgements(run.partial / "judgements.jsonl", tasks)
    done = len(judgements)
    if done == len(tasks):
        return judgements
    questions = [
        comparison_of({**row, "id": row.get("post", row["id"])}, order) for _, row, order in tasks
    ]
    before = chain(same_cap, questions[:done])
    judge.keep = run.resume
    replies = judge_all(judge, questions[done:], run.config.judge.concurrency, before)
    with closing(replies):
        shown = run.progress(replies, label, len(tasks), done)
        for task, reply in zip(tasks[done:], shown, strict=True):
            run.resume.mkdir(exist_ok=True)  # from here on there is something to go on from
            judgements.append(judgement(judge.about, *task, reply))
            run.append("judgements.jsonl", judgements[-1])
    return judgements


def kept_judgements(path: Path, tasks: Sequence[Task]) -> list[Row]:
    """The judgements of the first tasks that an interrupted stage has left; the rest is cut off."""
    kept: list[Row] = []
    for row, (policy, about, order) in zip(whole_lines(path)[0], tasks, strict=False):
        expected = {"policy": policy, "id": about["id"], "order": order}
        is_row = isinstance(row, dict) and row.get("verdict") in VERDICTS[order].values()
        if not is_row or row | expected != row:
            break  # a person has changed it
        kept.append(row)
    with suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)
        cut_file(path, sum(map(len, lines[: len(kept)])))
    return kept


def judgement(about: About, policy: str, row: Row, order: str, reply: Reply) -> Row:
    """One row of `judgements.jsonl`: the summary against the reference, shown in one order."""
    others = asdict(reply)
    verdict, text = VERDICTS[order][others.pop("choice")], others.pop("text")
    kept = {"policy": policy, "id": row["id"], "order": order, "verdict": verdict}
    return {**kept, "judge": about.name, **others, "reply": text}
