"""Summaries judged in both orders, and kept: what controls, calibration and versus share."""

from collections.abc import Mapping, Sequence

from eval.judge import comparison_of, judge_tasks
from eval.verdicts import VERDICTS, Comparison, Judge, Row
from stages.runs import Run


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
    return judge_tasks(run, judge, tasks, asked, label, beside)
