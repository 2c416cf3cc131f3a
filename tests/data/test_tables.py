"""Files of rows are read with their places, and odd values and rows are refused or made plain."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from stages.config.errors import UserError
from stages.data.bad_rows import BadRowError
from stages.data.tables import parse_row, parsed_rows, plain_value, raw_rows


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in parsed_rows(path)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (Decimal("1.50"), "1.50"),
        (b"text", "text"),
        (float("nan"), None),
        (float("inf"), "inf"),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), [1, 2]),
        ({"when": [date(2026, 1, 2)]}, {"when": ["2026-01-02"]}),
        (True, True),
    ],
)
def test_values_that_json_does_not_hold_become_plain(value, expected):
    plain = plain_value("x:1", "column", value)
    assert plain == expected
    json.dumps(plain, allow_nan=False)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(b"\xff", "column photo contains bytes that are not UTF-8"), (object(), "column photo is of")],
)
def test_a_value_without_a_text_is_refused_with_file_and_column(value, reason):
    with pytest.raises(BadRowError, match=f"x:1: {reason}"):
        plain_value("x:1", "photo", value)


def test_parquet_with_times_and_missing_values_is_read(tmp_path):
    path = tmp_path / "x.parquet"
    times = pyarrow.array([datetime(2026, 1, 2), None], pyarrow.timestamp("ns"))
    scores = pyarrow.array([0.5, float("nan")])
    pyarrow.parquet.write_table(pyarrow.table({"time": times, "score": scores}), path)
    assert rows_of(path) == [
        {"time": "2026-01-02T00:00:00", "score": 0.5},
        {"time": None, "score": None},
    ]


def test_nan_in_json_is_a_missing_value(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": NaN, "b": [Infinity]}\n')
    assert rows_of(path) == [{"a": None, "b": ["Infinity"]}]


@pytest.mark.parametrize("cell", ["NaN", "nan", "None", "<NA>", "null"])
def test_a_missing_cell_of_csv_is_none_and_an_empty_one_a_text(tmp_path, cell):
    path = tmp_path / "x.csv"
    path.write_text(f"a,b\n{cell},\n")
    assert rows_of(path) == [{"a": None, "b": ""}]


def test_a_csv_row_with_another_number_of_cells_is_bad_and_the_next_is_read(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1\n2,3,4\n5,6\n")
    (first, short), (second, long), (third, good) = raw_rows(path)
    with pytest.raises(BadRowError, match=r"x\.csv:2: the row has 1 cells, but the header has 2"):
        parse_row(first, short)
    with pytest.raises(BadRowError, match=r"x\.csv:3: the row has 3 cells"):
        parse_row(second, long)
    assert parse_row(third, good) == {"a": "5", "b": "6"}


def test_a_key_that_an_object_of_an_array_has_twice_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('[{"a": 1}, {"a": 1, "b": {"c": 1, "c": 2}}]')
    with pytest.raises(UserError, match=r"x\.json:2: key 'c' occurs twice"):
        rows_of(path)


@pytest.mark.parametrize("text", ["[]", " [ ] \n"])
def test_an_empty_array_has_no_rows(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert rows_of(path) == []


def test_an_ending_counts_in_any_case(tmp_path):
    path = tmp_path / "X.JSONL"
    path.write_text('{"a": 1}\n')
    assert rows_of(path) == [{"a": 1}]
