"""Stage `judge` (`make eval`): compare each policy's summary with the reference, in both orders.

Writes `judgements.jsonl`, one row per question. A judge that scores texts also writes
`gold_scores.jsonl`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from eval.control_texts import SELF, control_rows
from eval.judges.offline import FactsJudge, RewardModelJudge, knows_own_texts_only
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
from stages.config import paths
from stages.config.config import Config
from stages.config.errors import UserError
from stages.config.judge_models import check_asking
from stages.runs.files import cut_file, read_lines, whole_lines
from stages.runs.run import Run, open_stage, write_rows

JUDGEMENTS = "judgements.jsonl"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question: a policy's summary against the reference, shown in one order."""

    policy: str
    row: Row
    order: str

    @property
    def comparison(self) -> Comparison:
        """The question to the judge, which identifies a row by the id of its post."""
        post_id = self.row.get("post", self.row["id"])
        return comparison_of({**self.row, "id": post_id}, self.order)


def judge_summaries(config: Config) -> dict[str, Any]:
    """Judge all summaries of a run, write `judgements.jsonl`, return the manifest's results.

    Raises UserError if there are no summaries or the judge cannot run.
    """
    with open_stage(config, "judge") as run:
        policies = read_policies(run.require("summaries"))
        judge = make_judge(config, policies)
        judgements = judge_both_orders(
            run,
            judge,
            policies,
            label=f"judge {judge.about.kind}",
            # Controls that an earlier attempt has judged were paid for from the same budget.
            earlier=run_questions(config, policies),
        )
        results = summarize(judge.about, judgements)

        scores = judge.scores_of(policies)
        if scores:
            write_rows(run, "gold_scores.jsonl", scores)
            results["gold"] = {"label": judge.label}
        run.finish(results)
    return results


def read_policies(folder: Path) -> dict[str, list[Row]]:
    """The summaries of each policy, `sft` first, from a folder with one JSONL file per policy."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: (path.stem != "sft", path.stem))
    policies = {path.stem: read_lines(path) for path in files}
    if not any(policies.values()):
        raise UserError(f"there is nothing to judge: {folder} contains no summaries")
    return policies


def make_judge(config: Config, policies: Mapping[str, Sequence[Row]]) -> Judge:
    """The judge that the settings ask for. Raises UserError if its server's key is missing."""
    if config.judge.kind == "facts":
        return FactsJudge()
    if config.judge.gold:
        from eval.judges.gold import GoldJudge  # imports torch

        return GoldJudge(config)
    if config.judge.kind == "reward_model":
        function = config.reward.function
        return RewardModelJudge(
            (row for rows in policies.values() for row in rows),
            reward=f"reward function {function}" if function else "reward model",
        )

    check_asking(config)
    from eval.judges.openai.cache import cache_file
    from eval.judges.openai.server_judge import OpenAIJudge  # imports openai

    return OpenAIJudge(config.judge, cache_file(paths.RUNS))


def summarize(about: About, judgements: Sequence[Row]) -> dict[str, Any]:
    """The manifest's results; shares lie in [0, 1].

    `share_first` is the share of decided verdicts for the text that was shown first; None without
    one. `too_long` and `filtered` list the posts that the judge or its server refused, if any.
    """
    unjudged = [row for row in judgements if row["verdict"] == "unjudged"]
    decided = [row for row in judgements if row["verdict"] in ("policy", "reference")]
    share_first = None
    if decided:
        prefers_first = [row["verdict"] == VERDICTS[row["order"]]["A"] for row in decided]
        share_first = sum(prefers_first) / len(decided)
    results = {
        "judge": asdict(about),
        "models": sorted({row["model"] for row in judgements if row["model"]}),
        "judgements": len(judgements),
        "unjudged": len(unjudged) / len(judgements),
        "share_first": share_first,
    }
    too_long = posts_that_ended(unjudged, (TOO_LONG,))
    if too_long:
        results["too_long"] = too_long
    filtered = posts_that_ended(unjudged, (FILTERED, CONTENT_FILTER))
    if filtered:
        results["filtered"] = filtered
    return results


def posts_that_ended(judgements: Iterable[Row], reasons: Collection[str]) -> list[str]:
    """The ids of the posts whose reply has one of these finish reasons."""
    return sorted({row["id"] for row in judgements if row["finish_reason"] in reasons})


# -- questions -------------------------------------------------------------------------------------


def controls_of(config: Config, policies: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The controls that a run's judge can be asked about, for `checks.control_posts` posts."""
    rows_of_first_policy = next(iter(policies.values()))
    rows = control_rows(rows_of_first_policy[: config.checks.control_posts], config.data.prompt)
    if knows_own_texts_only(config.judge):
        return {SELF: rows[SELF]}
    return rows


def run_questions(config: Config, policies: Mapping[str, Sequence[Row]]) -> Iterator[Comparison]:
    """All questions that a run may ask its judge; together they count toward its cost cap."""
    controls = controls_of(config, policies)
    for task in chain(tasks_of(policies), tasks_of(controls)):
        yield task.comparison


def tasks_of(rows: Mapping[str, Sequence[Row]]) -> list[Task]:
    """The questions about the rows of each policy, in the order in which they are judged."""
    return [
        Task(policy=policy, row=row, order=order)
        for policy in rows
        for row in rows[policy]
        for order in VERDICTS
    ]


# -- judgements ------------------------------------------------------------------------------------


def judge_both_orders(
    run: Run,
    judge: Judge,
    rows: Mapping[str, Sequence[Row]],
    *,
    label: str,
    earlier: Iterable[Comparison] = (),
) -> list[Row]:
    """Judge each row's `summary` against its `reference`, and append to `judgements.jsonl`.

    `rows` maps a name to rows; their judgements get the name as their `policy`. A row has an `id`,
    and under `post` the id of its post if that is another one. Judgements that are already in the
    file are kept. `earlier` are other questions that count toward the same cost cap.
    """
    tasks = tasks_of(rows)
    judgements = kept_judgements(run.partial / JUDGEMENTS, tasks)
    done = len(judgements)
    if done == len(tasks):
        return judgements

    # Kept judgements were paid for, too.
    questions = [task.comparison for task in tasks]
    paid_before = chain(earlier, questions[:done])

    judge.keep = run.resume
    replies = judge_all(
        judge,
        questions[done:],
        concurrency=run.config.judge.concurrency,
        earlier=paid_before,
    )
    with closing(replies):
        replies_with_progress = run.progress(replies, label, total=len(tasks), done=done)
        for task, reply in zip(tasks[done:], replies_with_progress, strict=True):
            # After the first reply, there is something to resume from.
            run.resume.mkdir(exist_ok=True)
            row = judgement(judge.about, task, reply)
            judgements.append(row)
            run.append(JUDGEMENTS, row)
    return judgements


def kept_judgements(path: Path, tasks: Sequence[Task]) -> list[Row]:
    """The judgements in an interrupted stage's file that match the first tasks; the rest is cut."""
    if not path.exists():
        return []
    kept: list[Row] = []
    rows, _ = whole_lines(path)
    for row, task in zip(rows, tasks, strict=False):
        # If someone has edited a judgement, it and all later ones are asked for again.
        if not is_judgement_of(row, task):
            break
        kept.append(row)
    lines = path.read_bytes().splitlines(keepends=True)
    cut_file(path, sum(len(line) for line in lines[: len(kept)]))
    return kept


def is_judgement_of(row: Any, task: Task) -> bool:
    """Whether a line of `judgements.jsonl` answers a task."""
    return (
        isinstance(row, dict)
        and row.get("policy") == task.policy
        and row.get("id") == task.row["id"]
        and row.get("order") == task.order
        and row.get("verdict") in VERDICTS[task.order].values()
    )


def judgement(about: About, task: Task, reply: Reply) -> Row:
    """One row of `judgements.jsonl`."""
    return {
        "policy": task.policy,
        "id": task.row["id"],
        "order": task.order,
        "verdict": VERDICTS[task.order][reply.choice],
        "judge": about.name,
        "requested_model": reply.requested_model,
        "model": reply.model,
        "finish_reason": reply.finish_reason,
        "prompt_hash": reply.prompt_hash,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "reply": reply.text,
    }
