"""Rows of posts and comparisons, good and bad ones, and folders of them."""

import copy
import json
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

# Name -> the split, the row or line as written, and what the message names after file and line.
BAD_ROWS: dict[str, tuple[str, Any, str]] = {
    "not JSON": ("sft_train", '{"id": ', "JSON"),
    "not UTF-8": ("sft_train", b"\xff\xfe", "JSON"),
    "not an object": ("sft_train", "[1]", "object"),
    "missing field": ("sft_train", without(POST, "title"), "field title"),
    "wrong type": ("sft_train", POST | {"subreddit": 3}, "field subreddit"),
    "empty summary": ("sft_train", POST | {"summary": " \n"}, "field summary"),
    "no info": ("comparisons_train", edited(PAIR, "info", None), "field info"),
    "no article": ("comparisons_validation", edited(ARTICLE, "info.article", None), "info.article"),
    "one summary": ("comparisons_train", PAIR | {"summaries": PAIR["summaries"][:1]}, "summaries"),
    "summary is text": ("comparisons_train", PAIR | {"summaries": ["a", "b"]}, "summaries[0]"),
    "no policy": ("comparisons_train", edited(PAIR, "summaries.0.policy", None), "[0].policy"),
    "choice 2": ("comparisons_train", PAIR | {"choice": 2}, "field choice"),
    "choice true": ("comparisons_train", PAIR | {"choice": True}, "field choice"),
    "confidence 10": ("comparisons_train", edited(PAIR, "extra.confidence", 10), "confidence"),
    "extra is text": ("comparisons_train", PAIR | {"extra": "sure"}, "extra"),
}


def good_row(split: str) -> Row:
    """A row that the split takes."""
    return POST if split.startswith("sft") else PAIR


def write_rows(path: Path, rows: list[Any]) -> None:
    """A JSONL file of rows; bytes and texts are lines as they are."""
    with path.open("wb") as file:
        for row in rows:
            line = row if isinstance(row, str | bytes) else json.dumps(row)
            file.write(line.encode() if isinstance(line, str) else line)
            file.write(b"\n")


def write_folder(folder: Path, **changed: list[Any]) -> Path:
    """A data folder with one good row in every split, except for the splits that are given."""
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        write_rows(folder / f"{split}.jsonl", changed.get(split, [good_row(split)]))
    return folder


def read_all(folder: Path) -> dict[str, list[LocatedRow]]:
    """The checked rows of a data folder."""
    return read_source(Data(source=str(folder)), str(folder))


def line_numbers(rows: list[LocatedRow]) -> list[int]:
    """The lines of their file on which rows stand."""
    return [int(where.rpartition(":")[2]) for where, _ in rows]
