"""Given summaries that cannot be judged: each is refused when read, in one line with the mend."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from eval.judge import make_judge
from eval.outputs import take_outputs
from stages.finished import read_manifest, stage_folder
from stages.settings.command_line import make_command, make_config
from stages.settings.config import Outputs, UserError
from tests.given_outputs import systems_of
from tests.test_outputs import GOOD, ROOT, config_of_file, write_csv, write_jsonl, write_parquet

WIDE: list[dict[str, Any]] = [
    {"id": k, "post": f"p{k}", "summary": f"s{k}", "reference": "r"} for k in range(4)
]


def refusal(path, **settings):
    with pytest.raises(UserError) as caught:
        systems_of(Outputs(file=str(path), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- labels ----------------------------------------------------------------------------------------


def test_a_mistyped_column_of_labels_is_found_when_the_file_is_read(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [row | {"people": 1} for row in WIDE])
    said = refusal(path, label="poeple")
    assert said.startswith(f"{path}:1: no column poeple: name it, SET=outputs.label=... (it has")
    assert "people" in said


@pytest.mark.parametrize("empty", ["", None, "tie", 0.5])
def test_a_column_of_labels_without_one_is_found_when_the_file_is_read(tmp_path, empty):
    path = write_jsonl(tmp_path / "x.jsonl", [row | {"people": empty} for row in WIDE])
    assert "column people has no label" in refusal(path, label="people")


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


# -- files -----------------------------------------------------------------------------------------


def test_a_parquet_file_with_a_good_footer_and_damaged_rows_is_one_line(tmp_path):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(WIDE * 200), path)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    assert f"{path}: not a Parquet file, or a damaged one (" in refusal(path)
    path.unlink()
    assert "no file of summaries" in refusal(path)


def test_blank_lines_are_passed_over_and_lines_are_still_counted(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n \t\n\n")
    assert [row["id"] for row in systems_of(Outputs(file=str(path)))["x"]] == ["1"]
    path.write_text(path.read_text() + "[1]\n")
    assert "x.jsonl:5: not a JSON object" in refusal(path)


def test_two_columns_of_one_name_are_named(tmp_path):
    (tmp_path / "x.csv").write_text("id,post,summary,summary,reference\n1,p,s,t,r\n")
    said = "two columns are called summary: rename or drop one of them"
    assert refusal(tmp_path / "x.csv") == f"{tmp_path / 'x.csv'}: {said}"
    names = ["id", "post", "summary", "summary", "reference"]
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"])] * 5, names=names)
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert refusal(tmp_path / "x.parquet") == f"{tmp_path / 'x.parquet'}: {said}"


# -- names -----------------------------------------------------------------------------------------


def test_systems_whose_letters_no_file_name_takes_stay_apart_by_a_hash(tmp_path):
    rows = [GOOD | {"system": name} for name in ("модель", "другая", "café", "cafe\u0300", "b c")]
    names = list(systems_of(Outputs(file=str(write_jsonl(tmp_path / "x.jsonl", rows)))))
    assert len(set(names)) == 5
    assert all(name.isascii() for name in names)
    assert [name[:-6] for name in names[:4]] == ["system-", "system-", "caf-", "caf-"]
    assert names[4] == "b-c"
    write_jsonl(tmp_path / "x.jsonl", [GOOD | {"system": "a" * 300}])
    (long,) = systems_of(Outputs(file=str(tmp_path / "x.jsonl")))
    assert len(long) == 100  # file systems take 255 bytes


def test_files_whose_letters_are_lost_become_runs_of_different_names():
    names = {Outputs(file=f"{name}.jsonl").run_name for name in ("модель", "другая", "模型")}
    assert len(names) == 3
    assert all(name.startswith("judged-file-") and name.isascii() for name in names)
    assert Outputs(file="my outputs.v2.jsonl").run_name == "judged-my-outputs.v2"
    assert len(Outputs(file=f"{'a' * 240}.jsonl").run_name) <= 110


def test_a_system_that_is_called_reference_is_refused_beside_a_column_of_that_name(tmp_path):
    rows = [GOOD | {"system": name} for name in ("ppo", "reference")]
    said = refusal(write_jsonl(tmp_path / "x.jsonl", rows))
    assert "x.jsonl:2: a system is called reference" in said
    assert "rename it" in said
    bare = [{key: value for key, value in row.items() if key != "reference"} for row in rows]
    path = write_jsonl(tmp_path / "y.jsonl", bare)
    assert list(systems_of(Outputs(file=str(path)))) == ["ppo"]  # it takes the place


# -- posts -----------------------------------------------------------------------------------------


def test_systems_that_share_no_post_are_refused_before_they_are_judged(runs, tmp_path):
    rows = [row | {"system": "a" if row["id"] < 2 else "b"} for row in WIDE]
    config = config_of_file(write_jsonl(tmp_path / "x.jsonl", rows))
    with pytest.raises(
        UserError, match=r"x.jsonl: no post has a summary of every system .a and b share none"
    ):
        take_outputs(config)
    assert not stage_folder(config, "summaries").exists()


# -- the judge -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "overrides", "advised"),
    [
        ("outputs", ("outputs.file=x.jsonl",), "judge.kind=reward_model judge.model=gold"),
        ("tiny", (), "judge.kind=reward_model"),
    ],
)
def test_without_a_key_what_is_advised_is_accepted(runs, monkeypatch, preset, overrides, advised):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    config = make_config(preset, overrides=(*overrides, "judge.kind=openai"))
    with pytest.raises(UserError, match="needs OPENAI_API_KEY") as caught:
        make_judge(config, {})
    kind, _, model = advised.partition(" ")
    assert f"{kind} judge.model=..." in str(caught.value) if model else kind in str(caught.value)
    make_config(preset, overrides=(*overrides, *advised.split()))


# -- the command -----------------------------------------------------------------------------------


def test_a_file_with_a_space_in_its_path_is_printed_as_input_and_not_as_a_setting(tmp_path):
    """SET= is split at spaces."""
    config = make_config("outputs", overrides=("outputs.file=my own/x.jsonl", "judge.kind=facts"))
    command = make_command(config, "judge")
    start = "make eval PRESET=outputs SEED=44413 NAME=judged-x SET=judge.kind=facts"
    assert command == f"{start} INPUT='my own/x.jsonl'"
    shutil.copy(ROOT / "Makefile", tmp_path)
    words = [*shlex.split(command), "--dry-run", "VENV=", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "judged-x seed 44413: would make judge (is missing)" in said.stdout, said.stderr


# -- missing cells, names and the system in the reference's place ----------------------------------


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_title_that_is_null_is_empty_as_in_csv(tmp_path, write):
    rows = [row | {"title": None, "subreddit": "x"} for row in WIDE[:2]]
    rows[1]["title"] = "t"
    path = write(tmp_path / f"x.{write.__name__.split('_')[1]}", rows)
    (first, _) = systems_of(Outputs(file=str(path)))["x"]
    write_csv(tmp_path / "c.csv", [row | {"title": row["title"] or ""} for row in rows])
    (same, _) = systems_of(Outputs(file=str(tmp_path / "c.csv")))["c"]
    assert first["query"] == same["query"]


def test_a_csv_column_of_numbers_is_no_column_of_summaries(tmp_path):
    write_csv(tmp_path / "x.csv", [row | {"summary": row["id"]} for row in WIDE])
    assert "column summary holds numbers alone: name the" in refusal(tmp_path / "x.csv")
    write_csv(tmp_path / "x.csv", [row | {"summary": row["id"] or "words"} for row in WIDE])
    assert len(systems_of(Outputs(file=str(tmp_path / "x.csv")))["x"]) == len(WIDE)


def test_empty_summaries_are_counted_in_lines_of_80_columns(runs, tmp_path, capsys):
    names = ["a system with quite a long name indeed", "another system with a long name"]
    rows = [row | {"system": name, "summary": ""} for row in WIDE for name in names]
    take_outputs(config_of_file(write_jsonl(tmp_path / "x.jsonl", rows)))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    one_line = " ".join(said.split())
    assert "empty summaries, judged as they are: 4 of 4 of a-system-with" in one_line


def test_the_given_name_of_a_system_named_by_a_hash_is_kept(runs, tmp_path):
    rows = [row | {"system": name} for row in WIDE for name in ("모델", "plain")]
    config = config_of_file(write_jsonl(tmp_path / "x.jsonl", rows))
    take_outputs(config)
    results = (read_manifest(stage_folder(config, "summaries")) or {})["results"]
    assert {given: name for name, given in results["given_names"].items()} == {
        "모델": next(name for name in results["policies"] if name != "plain")
    }
    assert "reference_system" not in results


def test_a_column_that_is_the_reference_does_not_compete(runs, tmp_path):
    rows = [{"id": k, "post": f"p{k}", "ours": f"o{k}", "theirs": f"t{k}"} for k in range(4)]
    path = write_csv(tmp_path / "x.csv", rows)
    names = {"summary": "ours,theirs", "reference": "theirs"}
    found = systems_of(Outputs(file=str(path), **names))
    assert {name: rows[0]["reference"] for name, rows in found.items()} == {"ours": "t0"}
    config = config_of_file(path, *(f"outputs.{key}={value}" for key, value in names.items()))
    take_outputs(config)
    results = (read_manifest(stage_folder(config, "summaries")) or {})["results"]
    assert results["reference_system"] == "theirs"


def test_a_system_is_the_reference_by_the_name_that_the_file_gives_it(tmp_path):
    rows = [
        {key: row[key] for key in ("id", "post", "summary")} | {"system": name}
        for row in WIDE
        for name in ("모델", "plain")
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    assert list(systems_of(Outputs(file=str(path), reference="모델"))) == ["plain"]


def test_a_post_of_a_megabyte_is_read_and_two_hundred_systems_are(tmp_path):
    row = {"id": "p", "post": "x" * 1_000_000, "summary": "s", "reference": "r"}
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row | {"system": f"s{k}"}) + "\n" for k in range(200)))
    systems = systems_of(Outputs(file=str(path)))
    assert len(systems) == 200
    assert len(systems["s7"][0]["query"]) == 1_000_000
