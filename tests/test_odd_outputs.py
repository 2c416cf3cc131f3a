"""Given summaries that cannot be judged: each is refused when read, in one line with the mend."""

from typing import Any

import pandas as pd
import pytest

from eval.outputs import take_outputs
from stages.settings.config import Outputs, UserError
from tests.given_outputs import systems_of
from tests.test_outputs import GOOD, config_of_file, write_csv, write_jsonl, write_parquet

WIDE: list[dict[str, Any]] = [
    {"id": k, "post": f"p{k}", "summary": f"s{k}", "reference": "r"} for k in range(4)
]


def refusal(path, **settings):
    with pytest.raises(UserError) as caught:
        systems_of(Outputs(file=str(path), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_labels_that_only_the_left_out_posts_have_are_missed_before_anything_is_paid(
    runs, tmp_path
):
    rows = [row | {"people": "" if row["id"] < 2 else "1"} for row in WIDE]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"column people has no label.* raise eval.posts"):
        take_outputs(config_of_file(path, "outputs.label=people", "eval.posts=2"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_labels_are_read_as_pandas_writes_a_column_with_an_empty_cell(tmp_path, ending):
    """A column of 1, 0 and nothing becomes one of floats."""
    table = pd.DataFrame(WIDE).assign(people=[1, 0, 0.5, float("nan")])
    path = tmp_path / f"x.{ending}"
    if ending == "csv":
        table.to_csv(path, index=False, na_rep="nan")
        assert "1.0" in path.read_text()
        assert "nan" in path.read_text()
    else:
        table.to_parquet(path, index=False)
    found = systems_of(Outputs(file=str(path), label="people"))["x"]
    assert [row.get("label") for row in found] == [True, False, None, None]


def test_a_system_that_is_called_reference_is_refused_beside_a_column_of_that_name(tmp_path):
    rows = [GOOD | {"system": name} for name in ("ppo", "reference")]
    said = refusal(write_jsonl(tmp_path / "x.jsonl", rows))
    assert "x.jsonl:2: a system is called reference" in said
    assert "rename it" in said
    bare = [{key: value for key, value in row.items() if key != "reference"} for row in rows]
    path = write_jsonl(tmp_path / "y.jsonl", bare)
    assert list(systems_of(Outputs(file=str(path)))) == ["ppo"]  # it takes the place


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_title_that_is_null_is_empty_as_in_csv(tmp_path, write):
    rows = [row | {"title": None, "subreddit": "x"} for row in WIDE[:2]]
    rows[1]["title"] = "t"
    path = write(tmp_path / f"x.{write.__name__.split('_')[1]}", rows)
    (first, _) = systems_of(Outputs(file=str(path)))["x"]
    write_csv(tmp_path / "c.csv", [row | {"title": row["title"] or ""} for row in rows])
    (same, _) = systems_of(Outputs(file=str(tmp_path / "c.csv")))["c"]
    assert first["query"] == same["query"]


def test_a_system_is_the_reference_by_the_name_that_the_file_gives_it(tmp_path):
    rows = [
        {key: row[key] for key in ("id", "post", "summary")} | {"system": name}
        for row in WIDE
        for name in ("모델", "plain")
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    assert list(systems_of(Outputs(file=str(path), reference="모델"))) == ["plain"]
