"""Summaries judged in both orders, and kept: what controls, calibration and versus share."""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from eval.judges.protocol import VERDICTS, About, Comparison, Judge, Reply, Row, judge_all
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
    repeat: int = 0,
) -> list[Row]:
    """Judge each row's `summary` against its `reference` and append to `judgements.jsonl`.

    `rows`: name -> rows; the judgements get the name as their `policy`. A row is named by its `id`;
    `post` is the id of its post where the two differ. The judge is told of all questions at once.
    What stands in that file already is kept. `beside` are questions that were asked before; they
    count, as those of an interrupted stage do, under the same cap on the cost. `repeat`: how often
    the same was asked before, on purpose; the answers then go to `repeat<number>.jsonl`.
    """
    file = f"repeat{repeat}.jsonl" if repeat else "judgements.jsonl"
    tasks = [(name, row, order) for name in rows for row in rows[name] for order in VERDICTS]
    judgements = kept_judgements(run.partial / file, tasks)
    done = len(judgements)
    if done == len(tasks):
        return judgements
    questions = [
        comparison_of({**row, "id": row.get("post", row["id"])}, order)._replace(repeat=repeat)
        for _, row, order in tasks
    ]
    before = [*beside, *questions[:done]]
    judge.keep_in(run.resume)
    replies = judge_all(judge, questions[done:], run.config.judge.concurrency, before)
    with closing(replies):
        shown = run.progress(replies, label, len(tasks), done)
        for task, reply in zip(tasks[done:], shown, strict=True):
            run.resume.mkdir(exist_ok=True)  # from here on there is something to go on from
            judgements.append(judgement(judge.about, *task, reply))
            run.append(file, judgements[-1])
    return judgements


def kept_judgements(path: Path, tasks: Sequence[Task]) -> list[Row]:
    """The judgements of the first tasks that an interrupted stage has left; the rest is cut off."""
    kept: list[Row] = []
    for row, (policy, about, order) in zip(whole_lines(path)[0], tasks, strict=False):
        if not isinstance(row, dict) or row.get("verdict") not in VERDICTS[order].values():
            break  # a person has changed it
        if (row.get("policy"), row.get("id"), row.get("order")) != (policy, about["id"], order):
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
