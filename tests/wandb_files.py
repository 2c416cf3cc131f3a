"""What wandb wrote offline, read back with wandb's own messages: what `wandb sync` would send.

The file is a LevelDB log with a header of its own: blocks of 32 KiB that hold pieces of records.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER, BLOCK, PIECE = 7, 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, in order."""
    from wandb.proto import wandb_internal_pb2 as messages

    content, whole, at = path.read_bytes(), b"", HEADER
    assert content[:4] == b":W&B"
    while at + PIECE <= len(content):
        left = BLOCK - at % BLOCK
        if left < PIECE:  # no piece begins in the rest of a block
            at += left
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + PIECE])
        if kind not in (FULL, FIRST, MIDDLE, LAST):
            break
        whole += content[at + PIECE : at + PIECE + size]
        at += PIECE + size
        if kind in (FULL, LAST):
            record = messages.Record()  # type: ignore[attr-defined]
            record.ParseFromString(whole)
            whole = b""
            yield record


@dataclass
class Sent:
    """What one process would send."""

    folder: Path
    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    """Metrics by their pattern -> the metric that is their step."""
    exit_code: int | None = None

    def rows(self, stage: str) -> list[dict[str, Any]]:
        """The metrics of a stage, without its name."""
        rows = [row for row in self.history if f"{stage}/step" in row]
        return [
            {key.removeprefix(f"{stage}/"): v for key, v in row.items() if key.startswith(stage)}
            for row in rows
        ]

    def table(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A table that a row of the history or the summary points at."""
        assert entry["_type"] == "table-file"
        return dict(json.loads((self.folder / "files" / entry["path"]).read_text()))


def nested(items: Any) -> dict[str, Any]:
    """Keys and values as they are sent."""
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def sent(folder: Path) -> Sent:
    """What the process of one offline run would send."""
    (path,) = folder.glob("*.wandb")
    found = Sent(folder)
    for record in records(path):
        match record.WhichOneof("record_type"):
            case "run":
                found.run = record.run
                found.config |= nested(record.run.config.update)
            case "history":
                found.history.append(nested(record.history.item))
            case "summary":
                found.summary |= nested(record.summary.update)
            case "metric":
                name = record.metric.name or record.metric.glob_name
                found.axes[name] = record.metric.step_metric
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def all_sent(folder: Path) -> list[Sent]:
    """Every process's, in the order of time."""
    return [sent(one) for one in sorted((folder / "wandb").glob("offline-run-*"))]
