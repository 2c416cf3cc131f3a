"""Rows of posts and comparisons, good and bad ones, and folders of them."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.config.sections import Data
from stages.data.lengths import Limits
from stages.data.readers import SPLITS, read_source
from stages.data.tables import LocatedRow, Row

LIMITS = Limits(query=400, response=100, query_response=450)

POST: Row = {
    "id": "a1",
    "subreddit": "tifu",
    "title": "my bike",
    "post": "First part.\nMy boss sold my bike.",
    "summary": "My boss sold my bike.",
}
PAIR: Row = {
    "info": {
        "id": POST["id"],
        "post": POST["post"],
        "title": POST["title"],
        "subreddit": POST["subreddit"],
        "site": None,
        "article": None,
    },
    "summaries": [
        {"text": " one is better", "policy": "sup1", "note": None},
        {"text": " two", "policy": "ref", "note": None},
    ],
    "choice": 1,
    "worker": "w",
    "batch": "batch3",
    "split": "valid2",
    "extra": {"confidence": 8},
}
ARTICLE: Row = PAIR | {
    "info": {"id": "n1", "article": "News.\nMore.", "site": "cnn", "title": None, "post": None},
    "batch": "cnndm0",
}


def edited(row: Row, path: str, value: object) -> Row:
    """A copy of the row with one field, given like `info.id` or `summaries.0.text`, replaced."""
    row = copy.deepcopy(row)
    *parents, last = path.split(".")
    inner: Any = row
    for step in parents:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    inner[last] = value
    return row


def without(row: Row, field: str) -> Row:
    """A copy of the row without a field."""
    return {name: value for name, value in row.items() if name != field}


# Comparisons that the published data contain, too.
EMPTY_PAIR = edited(PAIR, "summaries.1.text", "")  # the chosen summary
EQUAL_PAIR = edited(PAIR, "summaries.1.text", " one is better")


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that is refused."""

    split: str
    row: Any
    """The row, or its line as written."""
    reason: str
    """What the message contains after file and line."""


BAD_ROWS = {
    "not JSON": BadRow(split="sft_train", row='{"id": ', reason="JSON"),
    "not UTF-8": BadRow(split="sft_train", row=b"\xff\xfe", reason="JSON"),
    "not an object": BadRow(split="sft_train", row="[1]", reason="object"),
    "missing field": BadRow(
        split="sft_train",
        row=without(POST, "title"),
        reason="field title",
    ),
    "wrong type": BadRow(
        split="sft_train",
        row=POST | {"subreddit": 3},
        reason="field subreddit",
    ),
    "empty summary": BadRow(
        split="sft_train",
        row=POST | {"summary": " \n"},
        reason="field summary",
    ),
    "no info": BadRow(
        split="comparisons_train",
        row=edited(PAIR, "info", None),
        reason="field info",
    ),
    "no article": BadRow(
        split="comparisons_validation",
        row=edited(ARTICLE, "info.article", None),
        reason="info.article",
    ),
    "one summary": BadRow(
        split="comparisons_train",
        row=PAIR | {"summaries": PAIR["summaries"][:1]},
        reason="summaries",
    ),
    "summary is text": BadRow(
        split="comparisons_train",
        row=PAIR | {"summaries": ["a", "b"]},
        reason="summaries[0]",
    ),
    "no policy": BadRow(
        split="comparisons_train",
        row=edited(PAIR, "summaries.0.policy", None),
        reason="[0].policy",
    ),
    "choice 2": BadRow(
        split="comparisons_train",
        row=PAIR | {"choice": 2},
        reason="field choice",
    ),
    "choice true": BadRow(
        split="comparisons_train",
        row=PAIR | {"choice": True},
        reason="field choice",
    ),
    "confidence 10": BadRow(
        split="comparisons_train",
        row=edited(PAIR, "extra.confidence", 10),
        reason="confidence",
    ),
    "extra is text": BadRow(
        split="comparisons_train",
        row=PAIR | {"extra": "sure"},
        reason="extra",
    ),
}


def good_row(split: str) -> Row:
    """A row that the split takes."""
    return POST if split.startswith("sft") else PAIR


def write_rows(path: Path, rows: list[Any]) -> None:
    """Write a JSONL file of rows; bytes and texts are lines as they are."""
    lines = []
    for row in rows:
        if isinstance(row, bytes):
            lines.append(row)
        elif isinstance(row, str):
            lines.append(row.encode())
        else:
            lines.append(json.dumps(row).encode())
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def write_folder(folder: Path, **changed: list[Any]) -> Path:
    """Write a data folder with one good row in each split, or with the rows in `changed`."""
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        write_rows(folder / f"{split}.jsonl", changed.get(split, [good_row(split)]))
    return folder


def read_all(folder: Path) -> dict[str, list[LocatedRow]]:
    """The checked rows of a data folder."""
    return read_source(Data(source=str(folder)), str(folder))


def line_numbers(rows: list[LocatedRow]) -> list[int]:
    """The number of each row's line in its file."""
    return [int(where.rpartition(":")[2]) for where, _ in rows]
