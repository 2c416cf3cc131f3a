"""Read files of rows: JSON Lines, a JSON array, CSV or Parquet. Each row comes with its place."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.config.checks import UserError
from stages.data.bad_rows import BadRowError

Row = dict[str, Any]
LocatedRow = tuple[str, Row]
"""A row after its place: `file:line`, or `data set[split]:number`."""
RawRow = bytes | Row
"""A row as its file holds it: a line of JSON that is not parsed yet, or the columns' values."""

# In characters. The standard library's limit of 131,072 is too low for some posts.
LONGEST_CSV_CELL = 2**24
LONGEST_REASON = 80  # characters that are kept of a library's message


def raw_rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield each row of a file after its place, `file:line`; the file's ending says what it is.

    Rows of JSON stay bytes, so that a bad line can be skipped (see `parse_row`). Blank lines are
    not rows, but they count as lines.
    Raises UserError for a file of an unknown kind and for one that cannot be read.
    """
    if path.suffix not in READERS:
        raise UserError(f"{path}: a file of unknown kind: give one of {', '.join(READERS)}")
    read = READERS[path.suffix]
    yield from read(path)


def parse_row(where: str, raw: RawRow) -> Row:
    """The row in a line of JSON; other rows are returned as they are.

    Raises BadRowError for a line that is not a JSON object, and for a key that occurs twice.
    """
    if not isinstance(raw, bytes):
        return raw

    def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Without this, `json` would silently keep the last of two values."""
        values = dict(pairs)
        if len(values) < len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise BadRowError(where, f"key {key!r} is there twice: remove one of the two")
        return values

    try:
        row = json.loads(raw, object_pairs_hook=require_unique_keys)
    except ValueError as error:
        raise BadRowError(where, f"not JSON ({error})") from None
    except RecursionError:
        raise BadRowError(where, "JSON that is nested too deeply to be read") from None
    if not isinstance(row, dict):
        raise BadRowError(where, "not a JSON object")
    return row


def parsed_rows(path: Path) -> Iterator[LocatedRow]:
    """Yield each row of a file after its place. Raises UserError at a bad row."""
    for where, raw in raw_rows(path):
        yield where, parse_row(where, raw)


def _read_jsonl(path: Path) -> Iterator[tuple[str, RawRow]]:
    # As bytes, so that a line that is not UTF-8 is a bad row and not the end of the file.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def _read_json(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield the elements of an array by their number. The file may also hold JSON Lines."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list):
        yield from _read_jsonl(path)
        return
    for number, row in enumerate(rows, start=1):
        # As bytes again: an element that is not an object is then a bad row like any other.
        yield f"{path}:{number}", json.dumps(row).encode()


def _read_parquet(path: Path) -> Iterator[tuple[str, RawRow]]:
    import pyarrow.parquet

    try:
        _check_column_names(path, pyarrow.parquet.read_schema(path).names)
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a fault of the disk, not of the file
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise UserError(
            f"{path}: not a Parquet file, or a damaged one ({reason}): write it again"
        ) from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _read_csv(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield the rows below the header, each by the line on which it ends."""
    csv.field_size_limit(LONGEST_CSV_CELL)
    # Spreadsheets begin a file with a byte order mark, which `utf-8-sig` drops.
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            header = rows.fieldnames or ()
            _check_column_names(path, header)
            for row in rows:
                where = f"{path}:{rows.line_num}"
                # DictReader puts surplus cells under the key None, and None into missing ones.
                has_surplus_cells = None in row
                has_missing_cells = None in row.values()
                if has_surplus_cells or has_missing_cells:
                    raise BadRowError(
                        where, f"the row does not have {len(header)} cells, as the header has"
                    )
                yield where, row
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8: save it as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num}: not CSV ({error})") from None


def _check_column_names(path: Path, names: Sequence[str]) -> None:
    """Raise UserError if two columns have one name. Columns without a name are ignored."""
    for name, count in Counter(names).items():
        if name and count > 1:
            raise UserError(f"{path}: two columns are called {name}: rename or drop one of them")


READERS: dict[str, Callable[[Path], Iterator[tuple[str, RawRow]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
