"""Readers for the two real schemas, from a folder or from the hub; every row is checked.

Posts have the schema of `tldr_3_filtered` (id, subreddit, title, post, summary), comparisons that
of `openai/summarize_from_feedback` (info, summaries, choice, worker, batch, split, extra). They
come from a folder (`sft_train.jsonl`, ... or `.parquet`) or from the hub through `datasets`. A bad
row is refused with file, line and field. Source: Huang et al. 2024, detail 1.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.posts.hub import read_hub
from stages.settings.config import HUB, Data, UserError

POSTS = ("sft_train", "sft_validation")
COMPARISONS = ("comparisons_train", "comparisons_validation")
SPLITS = (*POSTS, *COMPARISONS)
POST_TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
CNNDM_BATCHES = ("batch0_cnndm", "cnndm0", "cnndm2")

Located = tuple[str, dict[str, Any]]  # "file:line" and the row


def read_source(data: Data, folder: str) -> Iterator[tuple[str, list[Located]]]:
    """Each split's checked rows, from a folder or, for source `hub`, through `datasets`.

    Raises UserError for a missing file and for a row that is not in its schema.
    """
    for split in SPLITS:
        yield split, read_split(data, folder, split)


def read_split(data: Data, folder: str, split: str) -> list[Located]:
    """The checked rows of one split. Raises UserError as `read_source` does."""
    located = list(read_hub(data, split) if folder == HUB else _read_file(Path(folder), split))
    check = check_post if split in POSTS else check_comparison
    for where, row in located:
        check(where, row)
    if not located:
        raise UserError(f"{folder}: split {split} is empty: give it at least one row")
    return located


def _read_file(folder: Path, split: str) -> Iterator[Located]:
    jsonl, parquet = folder / f"{split}.jsonl", folder / f"{split}.parquet"
    if jsonl.exists():
        with jsonl.open("rb") as lines:  # bytes: a line that is not UTF-8 is refused as a line
            for number, line in enumerate(lines, start=1):
                yield f"{jsonl}:{number}", _parse_line(f"{jsonl}:{number}", line)
    elif parquet.exists():
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(parquet).to_pylist()
        except pyarrow.ArrowInvalid:
            raise UserError(f"{parquet}: not a Parquet file: write it again") from None
        for number, row in enumerate(rows, start=1):
            yield f"{parquet}:{number}", row
    else:
        raise UserError(f"{jsonl} is missing (or {split}.parquet): add it, or correct DATA=")


def _parse_line(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object")
    return row


def check_post(where: str, row: dict[str, Any]) -> None:
    """Raise UserError unless the row has the schema of `tldr_3_filtered` and a summary."""
    for name in ("id", "subreddit", "title", "post", "summary"):
        _require_type(where, row, name, str)
    if not row["summary"].strip():
        raise UserError(f"{where}: field summary is empty: drop the row or fill it")


def check_comparison(where: str, row: dict[str, Any]) -> None:
    """Raise UserError unless the row has the schema of `comparisons`."""
    for name, kind in (("info", dict), ("summaries", list), ("batch", str), ("split", str)):
        _require_type(where, row, name, kind)
    info = row["info"]
    _require_type(where, info, "id", str, "info.")
    for name in ("article",) if is_cnndm(row) else ("subreddit", "title", "post"):
        _require_type(where, info, name, str, "info.")
    if len(row["summaries"]) != 2:
        raise UserError(f"{where}: field summaries has {len(row['summaries'])} entries, not 2")
    for index, summary in enumerate(row["summaries"]):
        if not isinstance(summary, dict):
            raise UserError(f"{where}: field summaries[{index}] is not an object")
        for name in ("text", "policy"):
            _require_type(where, summary, name, str, f"summaries[{index}].")
        if not summary["text"].strip():
            raise UserError(f"{where}: field summaries[{index}].text is empty: drop the row")
    if type(row.get("choice")) is not int or row["choice"] not in (0, 1):  # nor True, nor 1.0
        raise UserError(f"{where}: field choice is {row.get('choice')!r}: it must be 0 or 1")
    extra = row.get("extra") or {}
    if not isinstance(extra, dict) or not isinstance(extra.get("confidence"), int | None):
        raise UserError(f"{where}: field extra is {extra!r}: extra.confidence is a number or null")


def _require_type(where: str, row: dict[str, Any], name: str, kind: type, prefix: str = "") -> None:
    if row.get(name) is None:
        raise UserError(f"{where}: field {prefix}{name} is missing")
    if not isinstance(row[name], kind):
        found = type(row[name]).__name__
        raise UserError(f"{where}: field {prefix}{name} is of type {found}, not {kind.__name__}")
    if isinstance(row[name], str) and not row[name].isascii():
        try:
            row[name].encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: field {prefix}{name} holds half a character") from None


def is_cnndm(row: dict[str, Any]) -> bool:
    """Whether a comparison is about a news article: those batches are kept apart."""
    return row["batch"] in CNNDM_BATCHES


def format_post(row: dict[str, Any]) -> str:
    """The prompt of one post, without truncation (Huang et al. 2024, detail 2)."""
    return POST_TEMPLATE.format(**{name: row[name] for name in ("subreddit", "title", "post")})
