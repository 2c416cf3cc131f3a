"""Read files of rows: JSON Lines, a JSON array, CSV or Parquet. Each row comes with its place."""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from stages.config.errors import UserError
from stages.data.bad_rows import BadRowError

Row = dict[str, Any]
LocatedRow = tuple[str, Row]
"""A row after its place: `file:line`, or `data set[split]:number`."""
RawRow = bytes | Row | BadRowError
"""A line of unparsed JSON, a row's values by column, or the error about a bad row."""

# In characters. The standard library's limit of 131,072 is too low for some posts.
LONGEST_CSV_CELL = 2**24
LONGEST_REASON = 80  # characters of a library's message that are shown
# How spreadsheets and pandas write missing values into CSV files.
MISSING_CELLS = frozenset({"NaN", "nan", "NaT", "<NA>", "None", "null", "NULL", "#N/A"})
JSON_SPACE = re.compile(r"[ \t\n\r]*")


def raw_rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield each row of a file after its place, `file:line`; the extension gives the file's type.

    Rows of JSON stay bytes, so that a bad line can be skipped (see `parse_row`). Blank lines are
    not rows, but they count as lines.
    Raises UserError for a file of an unknown kind and for one that cannot be read.
    """
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{path} is a file of an unknown type: use one of {', '.join(READERS)}")
    yield from read(path)


def parse_row(where: str, raw: RawRow) -> Row:
    """The row, with a missing value as None.

    Raises BadRowError for anything but a JSON object, for a key that occurs twice, for a value that
    JSON does not have and that is not text, and for a row with the wrong number of cells.
    """
    if isinstance(raw, BadRowError):
        raise raw
    if not isinstance(raw, bytes):
        return {str(column): plain_value(where, column, value) for column, value in raw.items()}

    def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Without this, `json` would silently keep the last of two values."""
        values = dict(pairs)
        if len(values) < len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise BadRowError(where, f"key {key!r} occurs twice: remove one of the two")
        return values

    try:
        row = json.loads(
            raw, object_pairs_hook=require_unique_keys, parse_constant=_missing_or_text
        )
    except ValueError as error:
        raise BadRowError(where, f"not JSON ({error})") from None
    except RecursionError:
        raise BadRowError(where, "the JSON is nested too deeply: flatten it") from None
    if not isinstance(row, dict):
        raise BadRowError(where, "not a JSON object")
    return row


def _missing_or_text(constant: str) -> str | None:
    """A constant that Python's `json` reads although JSON has no such value: NaN or an infinity."""
    return None if constant == "NaN" else constant


def plain_value(where: str, column: Any, value: Any) -> Any:
    """A value of Parquet or of `datasets` as in JSON: dates and decimals become text.

    NaN becomes None. Raises BadRowError for bytes that are not UTF-8 and for other objects.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None if math.isnan(value) else str(value)
    if isinstance(value, (list, tuple, set)):
        return [plain_value(where, column, element) for element in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(where, column, inner) for key, inner in value.items()}
    if isinstance(value, (datetime, date, time)):
        # pandas' missing time, NaT, is an instance of datetime, too.
        return None if str(value) == "NaT" else value.isoformat()
    if isinstance(value, (timedelta, Decimal, UUID)):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise BadRowError(where, f"column {column} contains bytes that are not UTF-8") from None
    raise BadRowError(
        where,
        f"column {column} is of type {type(value).__name__}: write it as text or drop the column",
    )


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
    """Yield the elements of an array by their number. The file may also contain JSON Lines."""
    content = path.read_bytes()
    try:
        elements = _array_elements(content.decode(json.detect_encoding(content)))
    except UnicodeDecodeError:
        elements = None
    if elements is None:
        yield from _read_jsonl(path)
        return
    for number, element in enumerate(elements, start=1):
        # As bytes again: an element that is not an object is then a bad row like any other.
        yield f"{path}:{number}", element.encode(errors="surrogatepass")


def _array_elements(text: str) -> list[str] | None:
    """The text of each element of a JSON array; None if the text is anything else."""
    decoder = json.JSONDecoder()

    def after_space(position: int) -> int:
        space = JSON_SPACE.match(text, position)
        return space.end() if space else position

    position = after_space(0)
    if not text.startswith("[", position):
        return None
    position = after_space(position + 1)
    elements: list[str] = []
    if text.startswith("]", position):
        return elements if after_space(position + 1) == len(text) else None
    while True:
        try:
            _, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        elements.append(text[position:end])
        position = after_space(end)
        separator = text[position : position + 1]
        position = after_space(position + 1)
        if separator == "]":
            return elements if position == len(text) else None
        if separator != ",":
            return None


def _read_parquet(path: Path) -> Iterator[tuple[str, RawRow]]:
    import pyarrow.parquet

    try:
        _check_column_names(path, pyarrow.parquet.read_schema(path).names)
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the file
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise UserError(
            f"{path} is not a Parquet file, or is damaged ({reason}): write it again"
        ) from None

    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            columns[name] = column.to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())[:LONGEST_REASON]
            raise UserError(
                f"{path}: column {name} ({column.type}) cannot be read ({reason}): "
                "write it as text or drop the column"
            ) from None
    for number in range(table.num_rows):
        values = {name: values_of_column[number] for name, values_of_column in columns.items()}
        yield f"{path}:{number + 1}", values


def _read_csv(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yield the rows below the header, each by the line on which it ends."""
    csv.field_size_limit(LONGEST_CSV_CELL)
    # Spreadsheets begin a file with a byte order mark, which `utf-8-sig` drops.
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, strict=True)
        try:
            header = next(rows, [])
            _check_column_names(path, header)
            for cells in rows:
                if not cells:
                    continue
                where = f"{path}:{rows.line_num}"
                if len(cells) == len(header):
                    values = [None if cell in MISSING_CELLS else cell for cell in cells]
                    yield where, dict(zip(header, values, strict=True))
                else:
                    reason = f"the row has {len(cells)} cells, but the header has {len(header)}"
                    yield where, BadRowError(where, f"{reason}: quote cells that contain a comma")
        except UnicodeDecodeError:
            raise UserError(f"{path} is not UTF-8: save it as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num} is not CSV ({error}): correct it") from None


def _check_column_names(path: Path, names: Sequence[str]) -> None:
    """Raise UserError if two columns have one name. Columns without a name are ignored."""
    for name, count in Counter(names).items():
        if name and count > 1:
            raise UserError(f"{path} has two columns called {name}: rename or drop one of them")


READERS: dict[str, Callable[[Path], Iterator[tuple[str, RawRow]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
