"""What an interrupted stage keeps, so that the same command goes on from there.

All of it lies below `<stage>.partial/resume` and is removed when the stage has finished. This
module keeps JSON lines: a kill can damage only the last one.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.runs import Run


def whole_lines(path: Path) -> tuple[list[Any], int]:
    """The rows of a JSONL file before the first damaged line, and how many bytes they take.

    A missing file has none.
    """
    rows: list[Any] = []
    size = 0
    if not path.exists():
        return rows, size
    with path.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # also where the bytes are no UTF-8
                break
            if not line.endswith(b"\n"):
                break
            rows.append(row)
            size += len(line)
    return rows, size


def cut_file(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file, if there is one."""
    if path.exists() and path.stat().st_size != size:
        os.truncate(path, size)


def write_rows(run: Run, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a whole JSONL file of a stage; the part that an interrupted attempt left is removed."""
    if run.main:
        (run.partial / name).unlink(missing_ok=True)
    for row in rows:
        run.append(name, row)


class KeptRows:
    """Measurements of rows, in one JSONL file per process; floats keep every digit."""

    def __init__(self, folder: Path, label: str, process: int) -> None:
        """`label` names the measurement; each measurement of a stage has its own."""
        stem = re.sub(r"\W+", "-", label)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{stem}.{process}.jsonl"
        cut_file(self.path, whole_lines(self.path)[1])
        self.known: dict[int, Any] = {}
        for path in sorted(folder.glob(f"{stem}.*.jsonl")):
            for kept in whole_lines(path)[0]:
                self.known |= dict(zip(kept["rows"], kept["measured"], strict=True))

    def add(self, rows: Sequence[int], measured: Sequence[Any]) -> None:
        """Append one finished part."""
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"rows": list(rows), "measured": list(measured)}) + "\n")
        self.known |= dict(zip(rows, measured, strict=True))
