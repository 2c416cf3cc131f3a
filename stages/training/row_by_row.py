"""Measuring every row of a data set: sorted by length, shared by all processes, and resumable."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object

from stages.config.errors import UserError
from stages.runs.files import cut_file, whole_lines
from stages.runs.progress import progress
from stages.runs.signals import Stopped, finishing_first, stop_asked
from stages.training.memory import MemoryBudget, PassSize, chunks
from stages.training.processes import gather_rows, local_share

T = TypeVar("T")


class KeptRows:
    """Measurements of rows, in one JSONL file per process; floats keep every digit."""

    def __init__(self, folder: Path, label: str, process: int) -> None:
        """`label` names the measurement. Each measurement of a stage has a different one."""
        stem = re.sub(r"\W+", "-", label)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stem}.{process}.jsonl"
        _, size = whole_lines(self.path)
        cut_file(self.path, size)

        self.known: dict[int, Any] = {}
        """Row -> its measurement."""
        for path in sorted(folder.glob(f"{stem}.*.jsonl")):
            lines, _ = whole_lines(path)
            for line in lines:
                try:
                    self.known |= dict(zip(line["rows"], line["measured"], strict=True))
                except (TypeError, LookupError, ValueError):
                    raise UserError(
                        f"{path} has a line that no stage wrote: remove the file, and its rows "
                        "are measured again"
                    ) from None

    def add(self, rows: Sequence[int], measured: Sequence[Any]) -> None:
        """Append the measurements of these rows."""
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"rows": list(rows), "measured": list(measured)}) + "\n")
        self.known |= dict(zip(rows, measured, strict=True))


def parts_by_length(
    accelerator: Accelerator, sort_keys: Sequence[int], size: int
) -> list[Sequence[int]]:
    """Return this process's rows in parts of at most `size`, sorted by their keys.

    If the keys are lengths, rows of similar length share a forward pass and little of it is
    padding. Rows with equal keys keep their order.
    """
    share = local_share(range(len(sort_keys)), accelerator)
    share.sort(key=lambda row: sort_keys[row])
    return chunks(share, size)


def measure_share(
    accelerator: Accelerator,
    budget: MemoryBudget,
    *,
    label: str,
    sort_keys: Sequence[int],
    size: PassSize,
    measure: Callable[[list[int]], Sequence[T]],
    keep: Path | None,
) -> list[T]:
    """Return what `measure` returns for each row of this process, in the order of `local_share`.

    `measure` gets the rows of one forward pass: at most `size.rows`, neighbors in the order of
    `sort_keys` (one key for each row), fewer where memory is short. It returns numbers, strings or
    lists of them, one for each row.

    `keep` is the folder in which finished parts outlast the process, under the name `label`. After
    a restart, a part is measured only if one of its rows is missing there. A signal stops the
    measurement after a part by raising Stopped. Without a folder, nothing is kept, and signals do
    not stop the measurement.
    """
    kept_rows = None
    measured: dict[int, T] = {}
    if keep is not None:
        accelerator.wait_for_everyone()  # the main process may still be creating the run's folder
        kept_rows = KeptRows(keep, label, accelerator.process_index)
        measured = kept_rows.known

    unfinished_parts = []
    for part in parts_by_length(accelerator, sort_keys, size.rows):
        if any(row not in measured for row in part):
            unfinished_parts.append(list(part))

    signal_number = 0
    with finishing_first():
        for part in progress(unfinished_parts, label, len(unfinished_parts)):
            results = budget.measure(part, size, measure)
            measured.update(zip(part, results, strict=True))
            if kept_rows is not None:
                kept_rows.add(part, results)
                signal_number = stop_asked()
                if signal_number:
                    break

    # Either all processes stop or none: one that has finished would wait forever for rows.
    if kept_rows is not None:
        signal_number = max(gather_object([signal_number]))
        if signal_number:
            raise Stopped(signal_number)
    return [measured[row] for row in local_share(range(len(sort_keys)), accelerator)]


def measure_rows(
    accelerator: Accelerator,
    budget: MemoryBudget,
    *,
    label: str,
    sort_keys: Sequence[int],
    size: PassSize,
    measure: Callable[[list[int]], Sequence[T]],
    keep: Path | None,
) -> list[T]:
    """Return what `measure` returns for every row, in row order, from all processes.

    The arguments are those of `measure_share`.
    """
    share = measure_share(
        accelerator,
        budget,
        label=label,
        sort_keys=sort_keys,
        size=size,
        measure=measure,
        keep=keep,
    )
    return gather_rows(accelerator, share)
