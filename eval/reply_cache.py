"""Replies that were paid for, on disk before anyone uses them."""

import json
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock

from eval.verdicts import Row


class ReplyLog:
    """Replies in an append-only JSONL file, by key; the last one of a key stands."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, Lock()
        self.rows: dict[str, Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as lines:
            lines.seek(0)
            content = lines.read()
            if content and not content.endswith(b"\n"):  # killed while it wrote this line
                lines.write(b"\n")
        for line in content.split(b"\n"):
            with suppress(ValueError):
                row = json.loads(line)
                self.rows[row["key"]] = row

    def add(self, row: Row) -> None:
        """Keep a row, on disk before anyone uses it: it was paid for."""
        with self.lock, self.path.open("ab") as lines:
            lines.write(json.dumps(row).encode() + b"\n")
            lines.flush()
            os.fsync(lines.fileno())
            self.rows[row["key"]] = row
