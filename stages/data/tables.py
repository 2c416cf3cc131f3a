"""Files of rows: JSON lines or array, CSV and Parquet, each row with the place where it stands."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.data.bad_rows import BadRowError
from stages.settings.checks import UserError

LONGEST_CELL = 2**24  # characters; the standard library's 131,072 are too few for some posts


def raw_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """`file:line` and the row of a table, whose ending says what it is.

    A row of JSONL is the bytes of its line, so that a bad line can be skipped: see `parse_line`.
    Blank lines are no rows, and counted.
    Raises UserError for a file of another kind, and for one that cannot be read.
    """
    read = READERS.get(path.suffix)
    if read is None:
        kinds = ", ".join(READERS)
        raise UserError(f"{path}: a file of unknown kind: give one of {kinds}")
    yield from read(path)


def parse_line(where: str, line: bytes) -> dict[str, Any]:
    """The row in a line of JSONL. Raises BadRowError where it holds none."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object, of which each key stands once: of two values, one would count unseen."""
        values = dict(pairs)
        if len(values) < len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise BadRowError(where, f"key {key!r} is there twice: leave one of the two out")
        return values

    try:
        row = json.loads(line, object_pairs_hook=once)
    except ValueError as error:
        raise BadRowError(where, f"not JSON ({error})") from None
    except RecursionError:
        raise BadRowError(where, "not JSON that can be read (nested too deeply)") from None
    if not isinstance(row, dict):
        raise BadRowError(where, "not a JSON object")
    return row


def parsed_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`file:line` and the row of a table. Raises UserError at a bad row."""
    for where, row in raw_rows(path):
        yield where, parse_line(where, row) if isinstance(row, bytes) else row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:  # bytes: a line that is not UTF-8 is refused as a line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of an array, by their number. JSON lines may stand in such a file, too."""
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list):
        yield from _jsonl(path)
        return
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", json.dumps(row).encode()


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    try:
        _check_names(path, pyarrow.parquet.read_schema(path).names)
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not the file's
        what = f"not a Parquet file, or a damaged one ({' '.join(str(error).split())[:80]})"
        raise UserError(f"{path}: {what}: write it again") from None
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise UserError where two columns have one name; those without a name are not read."""
    doubled = [name for name, count in Counter(names).items() if name and count > 1]
    if doubled:
        raise UserError(f"{path}: two columns are called {doubled[0]}: rename or drop one of them")


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV file with a header, by the line on which each ends."""
    csv.field_size_limit(LONGEST_CELL)
    with path.open(newline="", encoding="utf-8-sig") as lines:  # spreadsheets write a mark first
        rows = csv.DictReader(lines, strict=True)
        try:
            _check_names(path, rows.fieldnames or ())
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    wanted = len(rows.fieldnames or ())
                    raise BadRowError(where, f"the row has not {wanted} cells, as the header has")
                yield where, row
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8: save it as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num}: not CSV ({error})") from None


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
