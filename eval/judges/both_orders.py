"""Summaries judged in both orders, and kept: what controls, calibration and versus share."""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from eval.judges.protocol import (
    VERDICTS,
    About,
    Comparison,
    Judge,
    Reply,
    Row,
    judge_all,
)
from stages.running.files import cut_file, whole_lines
from stages.runs import Run

Task = tuple[str, Row, str]
"""The policy's name, the row with its summary, and the order in which the two are shown."""


def judge_both_orders(
    run: Run,
    judge: Judge,
    rows: Mapping[str, Sequence[Row]],
    label: str,
    beside: Sequence[Comparison] = (),
) -> list[Row]:
    """Judge each row's `summary` against its `reference` and append to `judgements.jsonl`.

    `rows`: name -> rows; the judgements get the name as their `policy`. A row is named by its `id`;
    `post` is the id of its post where the two differ. The judge is told of all questions at once.
    `beside` are questions that were asked before under the same cap on the cost.
    """
    tasks = [(name, row, order) for name in rows for row in rows[name] for order in VERDICTS]
    asked = [
        comparison_of({**row, "id": row.get("post", row["id"])}, order) for _, row, order in tasks
    ]
    return _judge_tasks(run, judge, tasks, asked, label, beside)


def _judge_tasks(
    run: Run,
    judge: Judge,
    tasks: Sequence[Task],
    asked: Sequence[Comparison],
    label: str,
    beside: Sequence[Comparison],
) -> list[Row]:
    """Ask about every task and append to `judgements.jsonl`; what stands there already is kept.

    `asked` are the tasks as questions. What an interrupted stage had asked counts, as `beside`
    does, under the same cap on the cost.
    """
    judgements = kept_judgements(run.partial / "judgements.jsonl", tasks)
    done = len(judgements)
    todo = tasks[done:]
    if not todo:
        return judgements
    before = [*beside, *asked[:done]]
    judge.keep_in(run.resume)
    with closing(judge_all(judge, asked[done:], run.config.judge.concurrency, before)) as replies:
        for task, reply in zip(todo, run.progress(replies, label, len(tasks), done), strict=True):
            run.resume.mkdir(exist_ok=True)  # from here on there is something to go on from
            judgements.append(judgement(judge.about, *task, reply))
            run.append("judgements.jsonl", judgements[-1])
    return judgements


def kept_judgements(path: Path, tasks: Sequence[Task]) -> list[Row]:
    """The judgements of the first tasks that an interrupted stage has left; the rest is cut off."""
    kept: list[Row] = []
    for row, (policy, about, order) in zip(whole_lines(path)[0], tasks, strict=False):
        if (row["policy"], row["id"], row["order"]) != (policy, about["id"], order):
            break
        kept.append(row)
    with suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)
        cut_file(path, sum(map(len, lines[: len(kept)])))
    return kept


def comparison_of(row: Row, order: str) -> Comparison:
    """The question that a summary and its reference make, shown in one order."""
    first, second = row["summary"], row["reference"]
    if order == "reference_first":
        first, second = second, first
    return Comparison(row["id"], row["query"], first, second)


def judgement(about: About, policy: str, row: Row, order: str, reply: Reply) -> Row:
    """One row of `judgements.jsonl`: the summary against the reference, shown in one order."""
    return {
        "policy": policy,
        "id": row["id"],
        "order": order,
        "verdict": VERDICTS[order][reply.choice],
        "confidence": reply.confidence,
        "judge": about.name,
        "requested_model": reply.requested_model,
        "model": reply.model,
        "finish_reason": reply.finish_reason,
        "prompt_hash": reply.prompt_hash,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "reply": reply.text,
    }
