"""Summaries that exist already: files become the summaries of a run without training."""

import csv
import json
from typing import Any

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from eval import outputs
from eval.calibration import calibrate
from eval.controls import judge_controls
from eval.judge import judge_summaries
from eval.outputs import take_outputs
from eval.win_rate import measure_win_rates, names_of_pair
from reports import calibration
from reports.outputs import write_report
from stages.config.command_line import make_config
from stages.config.config import Outputs, UserError
from stages.pipeline.wanted import wanted_stages
from stages.runs.manifest import read_manifest, stage_folder, why_not
from tests.lib.make_stages import run_module
from tests.lib.told import told

POST = {"subreddit": "x", "title": "My lamp", "post": "It is gone. I miss it."}


def rows_of_world(count=40):
    """Rows of two systems about posts of the built-in world; people prefer the longer one."""
    rows = []
    for number in range(count):
        post = f"toy1-validation-{number}"
        both = {"lead-3": told(post, "event"), "all-of-it": told(post, "event", "first")}
        for system, text in both.items():
            row = {"id": post, **POST, "system": system, "summary": text}
            row["post"] += f" It was number {number}."
            reference, people = told(post, "event", "second"), int(system == "all-of-it")
            rows.append({**row, "reference": reference, "people": people})
    return rows


def systems_of(settings):
    """The rows of each system, in the files' order, as the stage `summaries` reads them."""
    return outputs.read_systems(outputs.read_table(settings), settings, 0)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("write", [write_jsonl, write_json, write_csv, write_parquet])
def test_a_table_of_any_kind_gives_the_same_rows(tmp_path, write):
    rows = [
        {"id": 7, **POST, "system": "a b", "summary": ' one,\n"two" ', "reference": "r"},
        {"id": 8, **POST, "system": "a b", "summary": "", "reference": "s"},
    ]
    path = write(tmp_path / f"outputs.{write.__name__.split('_')[1]}", rows)
    found = systems_of(Outputs(file=str(path)))
    query = "SUBREDDIT: r/x\n\nTITLE: My lamp\n\nPOST: It is gone. I miss it.\n\nTL;DR:"
    none = dict.fromkeys(("tokens", "reference_tokens", "has_eos", "score", "reference_score"))
    first = {"id": "7", "query": query, "reference": "r", "summary": 'one,\n"two"'}
    second = {"id": "8", "query": query, "reference": "s", "summary": ""}
    assert found == {"a-b": [first | none, second | none]}


def test_columns_are_named_by_settings_and_several_columns_are_several_systems(tmp_path):
    row = {"nr": 1, "text": "the post", "x": "from x", "y": "from y", "human": "r", "system": "no"}
    path = write_jsonl(tmp_path / "wide.jsonl", [row])
    names = {"id": "nr", "post": "text", "summary": "x, y", "reference": "human"}
    found = systems_of(Outputs(file=str(path), **names))
    assert {name: rows[0]["summary"] for name, rows in found.items()} == {
        "x": "from x",
        "y": "from y",
    }
    assert found["x"][0]["query"] == "the post"  # without title and subreddit: the text alone


def test_a_folder_is_a_system_a_file_and_a_post_without_id_is_named_by_its_text(tmp_path):
    for name, texts in {"a": ["1", "2"], "b": ["3", "4"]}.items():
        rows = [{"post": f"post {k}", "summary": x, "reference": "r"} for k, x in enumerate(texts)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "notes.txt").write_text("not read")
    found = systems_of(Outputs(file=str(tmp_path)))
    assert list(found) == ["a", "b"]
    ids = [[row["id"] for row in rows] for rows in found.values()]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


def test_all_files_of_rows_in_a_folder_are_read_and_the_others_are_named(runs, tmp_path, capsys):
    folder = tmp_path / "outputs"
    folder.mkdir()
    rows = rows_of_world(4)
    write_json(folder / "a.json", rows[0::2])
    write_jsonl(folder / "b.JSONL", rows[1::2])
    (folder / "notes.txt").write_text("not read")

    take_outputs(config_of_file(folder))

    results = (read_manifest(next(runs.glob("*/*/summaries"))) or {})["results"]
    assert set(results["policies"]) == {"lead-3", "all-of-it"}
    assert f"not read in {folder}: notes.txt" in capsys.readouterr().out


GOOD = {"id": 1, "post": "p", "summary": "s", "reference": "r"}


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        (
            [{"id": 1, "text": "p", "wrote": "s", "reference": "r"}],
            {"summary": "a,b"},
            r"no column a, b, post: name it, SET='outputs.summary=... outputs.post=...' .it has id",
        ),
        ([GOOD | {"reference": None}], {}, "column reference is null: fill it, or drop the row"),
        ([GOOD | {"reference": ""}], {}, "column reference is empty"),
        ([GOOD, GOOD | {"system": "b", "reference": "q"}], {}, "the reference of id 1 differs"),
        ([GOOD | {"system": "a b"}, GOOD | {"id": 2, "system": "a/b"}], {}, "reads like 'a b'"),
        ([GOOD], {"reference": "gold"}, r"no column gold: name it, SET='outputs.reference="),
        ([GOOD, GOOD | {"system": "reference"}], {}, "x.jsonl:2: a system is called reference"),
        (
            [GOOD | {"people": "yes"}],
            {"label": "people"},
            "x.jsonl:1: column people is 'yes': write 1 where the summary is preferred, 0 where",
        ),
    ],
)
def test_what_cannot_be_judged_is_one_line_with_its_place(tmp_path, rows, settings, said):
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=said) as caught:
        systems_of(Outputs(file=str(path), **settings))
    assert "\n" not in str(caught.value)


def config_of_file(path, *overrides):
    given = (f"outputs.file={path}", "judge.kind=facts", "checks.control_posts=8", *overrides)
    return make_config("outputs", overrides=given)


def reported(config):
    """All stages of such a run; the report as printed, and its page."""
    for stage in (take_outputs, judge_summaries, judge_controls, measure_win_rates, calibrate):
        stage(config)
    said = write_report(config)
    return said, next(stage_folder(config, "report").glob("*.md")).read_text()


def test_a_file_becomes_a_run_with_win_rates_controls_calibration_and_a_page(runs, tmp_path):
    path = write_jsonl(tmp_path / "theirs.jsonl", rows_of_world())
    config = config_of_file(path, "outputs.label=people")
    assert config.name == "judged-theirs"
    stages = "summaries judge controls win_rate calibration report".split()
    assert wanted_stages(config, ["eval"]) == stages
    said, page = reported(config)
    assert max(len(line) for line in said.splitlines() if "/" not in line) <= 80
    found = (read_manifest(stage_folder(config, "win_rate")) or {})["results"]
    rates = {name: row["win_rate"] for name, row in found["policies"].items()}
    assert rates == {"lead-3": 0.0, "all-of-it": 0.5}  # one fact less than the reference, as many
    (difference,) = found["differences"]
    assert set(names_of_pair(difference)) == {"lead-3", "all-of-it"}
    calibration = (read_manifest(stage_folder(config, "calibration")) or {})["results"]
    assert (calibration["pairs"], calibration["of_pairs"]) == (80, 80)
    assert "no run here wrote them" in page
    assert "The judge is not an LLM" in page
    assert "of 40 posts in the order of the data" in page  # whether held out, nobody knows
    assert "are the paper's" not in page
    assert "differs from the preset or from the defaults.*" in page
    assert "after Holm" in page
    assert "Agreement" in page or "agreement" in page
    assert all(why_not(config, stage) is None for stage in stages)


def test_three_posts_decide_nothing_and_every_page_says_so(runs, tmp_path):
    path = write_jsonl(tmp_path / "three.jsonl", rows_of_world(3))
    config = config_of_file(path, "outputs.label=people")
    _, page = reported(config)
    run_module(calibration, ["--preset", "outputs", "--set", *config.overrides])
    calibrated = next(runs.glob("*/*/calibration_report/*/*.md")).read_text()
    assert "**not significantly different** from the references" in " ".join(page.split())
    assert "**reliably" not in page
    for needed in ("too few posts (3 of 20 needed)", "too few posts (3 of 125 needed)"):
        assert needed in page
    assert "FAILED" not in page + calibrated
    assert "neither passed nor failed" in calibrated


# -- odd cells ------------------------------------------------------------------------------------

WIDE: list[dict[str, Any]] = [
    {"id": k, "post": f"p{k}", "summary": f"s{k}", "reference": "r"} for k in range(4)
]


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


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_title_that_is_null_is_empty_as_in_csv(tmp_path, write):
    rows = [row | {"title": None, "subreddit": "x"} for row in WIDE[:2]]
    rows[1]["title"] = "t"
    path = write(tmp_path / f"x.{write.__name__.split('_')[1]}", rows)
    (first, _) = systems_of(Outputs(file=str(path)))["x"]
    write_csv(tmp_path / "c.csv", [row | {"title": row["title"] or ""} for row in rows])
    (same, _) = systems_of(Outputs(file=str(tmp_path / "c.csv")))["c"]
    assert first["query"] == same["query"]
