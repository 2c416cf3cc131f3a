"""Existing summaries in files become the summaries of a run without training."""

import pandas as pd
import pytest

from eval.calibration import calibrate
from eval.controls import judge_controls
from eval.judge import judge_summaries
from eval.outputs import take_outputs
from eval.win_rate import measure_win_rates, names_of_pair
from reports import calibration
from reports.outputs import write_report
from stages.config.errors import UserError
from stages.config.judge import Outputs
from stages.pipeline.plan import wanted_stages
from stages.runs.manifest import read_manifest, stage_folder
from stages.runs.staleness import find_problem
from tests.lib.existing_summaries import (
    POST,
    WRITERS,
    config_of_file,
    rows_of_world,
    systems_of,
    write_csv,
    write_json,
    write_jsonl,
)
from tests.lib.make_stages import run_module

# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, ending):
    rows = [
        {"id": 7, **POST, "system": "a b", "summary": ' one,\n"two" ', "reference": "r"},
        {"id": 8, **POST, "system": "a b", "summary": "", "reference": "s"},
    ]
    path = WRITERS[ending](tmp_path / f"outputs.{ending}", rows)

    systems = systems_of(Outputs(file=str(path)))

    query = "SUBREDDIT: r/x\n\nTITLE: My lamp\n\nPOST: It is gone. I miss it.\n\nTL;DR:"
    unknown = dict.fromkeys(("tokens", "reference_tokens", "has_eos", "score", "reference_score"))
    first = {"id": "7", "query": query, "reference": "r", "summary": 'one,\n"two"', **unknown}
    second = {"id": "8", "query": query, "reference": "s", "summary": "", **unknown}
    assert systems == {"a-b": [first, second]}


def test_each_file_of_a_folder_is_a_system_if_none_is_named(tmp_path):
    for name in ("a", "b"):
        row = {"id": 1, "post": "p", "summary": f"by {name}", "reference": "r"}
        write_jsonl(tmp_path / f"{name}.jsonl", [row])
    (tmp_path / "notes.txt").write_text("not read")

    systems = systems_of(Outputs(file=str(tmp_path)))

    summaries = {name: rows[0]["summary"] for name, rows in systems.items()}
    assert summaries == {"a": "by a", "b": "by b"}


def test_a_post_without_id_is_identified_by_its_text(tmp_path):
    for name in ("a", "b"):
        rows = [{"post": f"post {k}", "summary": name, "reference": "r"} for k in range(2)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)

    systems = systems_of(Outputs(file=str(tmp_path)))

    ids_of_a = [row["id"] for row in systems["a"]]
    assert ids_of_a == [row["id"] for row in systems["b"]]
    assert len(set(ids_of_a)) == 2


def test_unread_files_of_a_folder_are_named(runs, tmp_path, capsys):
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


# -- columns ---------------------------------------------------------------------------------------

GOOD = {"id": 1, "post": "p", "summary": "s", "reference": "r"}


def test_settings_name_the_columns(tmp_path):
    row = {"nr": 1, "text": "the post", "mine": "a summary", "human": "r", "who": "me"}
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    settings = Outputs(
        file=str(path), id="nr", post="text", summary="mine", reference="human", system="who"
    )

    [summary] = systems_of(settings)["me"]

    # Without a title and a subreddit, the post is the text alone.
    assert (summary["id"], summary["query"]) == ("1", "the post")
    assert (summary["summary"], summary["reference"]) == ("a summary", "r")


def test_several_columns_of_summaries_are_several_systems(tmp_path):
    row = {"id": 1, "post": "p", "x": "from x", "y": "from y", "reference": "r"}
    path = write_jsonl(tmp_path / "wide.jsonl", [row])

    systems = systems_of(Outputs(file=str(path), summary="x, y"))

    summaries = {name: rows[0]["summary"] for name, rows in systems.items()}
    assert summaries == {"x": "from x", "y": "from y"}


def test_several_columns_are_several_systems_for_each_name_of_a_system(tmp_path):
    row = {"id": 1, "post": "p", "reference": "r"}
    rows = [
        row | {"system": "small", "greedy": "1", "sampled": "2"},
        row | {"system": "large", "greedy": "3", "sampled": "4"},
    ]
    path = write_jsonl(tmp_path / "wide.jsonl", rows)

    systems = systems_of(Outputs(file=str(path), summary="greedy, sampled"))

    assert {name: rows[0]["summary"] for name, rows in systems.items()} == {
        "small-greedy": "1",
        "small-sampled": "2",
        "large-greedy": "3",
        "large-sampled": "4",
    }


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"id": 1, "text": "p", "wrote": "s", "reference": "r"}],
            {"summary": "a,b"},
            r"no column a, b, post: name it, SET='outputs.summary=... outputs.post=...' .it has id",
        ),
        ([GOOD | {"reference": None}], {}, "column reference is null: fill it, or drop the row"),
        ([GOOD | {"reference": ""}], {}, "column reference is empty"),
        ([GOOD, GOOD | {"system": "b", "reference": "q"}], {}, "the reference of id 1 differs"),
        ([GOOD, GOOD | {"system": "b", "post": "q"}], {}, "the post of id 1 differs"),
        ([GOOD | {"system": "a b"}, GOOD | {"id": 2, "system": "a/b"}], {}, "and 'a b' look alike"),
        ([GOOD, GOOD | {"summary": "t"}], {}, "post 1 of system x is also at .*x.jsonl:1"),
        ([GOOD], {"reference": "gold"}, r"no column gold: name it, SET='outputs.reference="),
        ([GOOD, GOOD | {"system": "reference"}], {}, "x.jsonl:2: a system is called reference"),
        (
            [GOOD | {"people": "yes"}],
            {"label": "people"},
            "x.jsonl:1: column people is 'yes': write 1 if the summary is preferred, 0 if",
        ),
    ],
)
def test_what_cannot_be_judged_is_one_line_with_its_place(tmp_path, rows, settings, message):
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=message) as caught:
        systems_of(Outputs(file=str(path), **settings))
    assert "\n" not in str(caught.value)


def test_the_same_row_in_two_files_is_one_summary(tmp_path):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [GOOD | {"system": "s"}])
    assert len(systems_of(Outputs(file=str(tmp_path)))["s"]) == 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_title_that_is_null_is_an_empty_one(tmp_path, ending):
    rows = [
        {"id": 1, "post": "p", "subreddit": "x", "title": None, "summary": "s", "reference": "r"},
        {"id": 2, "post": "q", "subreddit": "x", "title": "t", "summary": "s", "reference": "r"},
    ]
    path = WRITERS[ending](tmp_path / f"x.{ending}", rows)
    csv_path = write_csv(tmp_path / "c.csv", [row | {"title": row["title"] or ""} for row in rows])

    from_null = systems_of(Outputs(file=str(path)))["x"]
    from_empty = systems_of(Outputs(file=str(csv_path)))["c"]

    assert from_null[0]["query"] == from_empty[0]["query"]


# -- labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_labels_may_be_written_as_pandas_writes_a_column_with_an_empty_cell(tmp_path, ending):
    """A column of 1, 0 and nothing becomes one of floats."""
    rows = [GOOD | {"id": number} for number in range(4)]
    table = pd.DataFrame(rows).assign(people=[1, 0, 0.5, float("nan")])
    path = tmp_path / f"x.{ending}"
    if ending == "csv":
        table.to_csv(path, index=False, na_rep="nan")
    else:
        table.to_parquet(path, index=False)

    summaries = systems_of(Outputs(file=str(path), label="people"))["x"]

    assert [row.get("label") for row in summaries] == [True, False, None, None]


def test_missing_labels_are_found_before_anything_is_paid_for(runs, tmp_path):
    rows = [GOOD | {"id": number, "people": "" if number < 2 else "1"} for number in range(4)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"column people has no label.* raise eval.posts"):
        take_outputs(config_of_file(path, "outputs.label=people", "eval.posts=2"))


# -- runs ------------------------------------------------------------------------------------------


def run_all_stages(config):
    """Run all stages; returns the printed report and its page."""
    for stage in (take_outputs, judge_summaries, judge_controls, measure_win_rates, calibrate):
        stage(config)
    printed = write_report(config)
    page = next(stage_folder(config, "report").glob("*.md"))
    return printed, page.read_text()


def test_a_file_becomes_a_run_with_win_rates_controls_calibration_and_a_page(runs, tmp_path):
    path = write_jsonl(tmp_path / "theirs.jsonl", rows_of_world())
    config = config_of_file(path, "outputs.label=people")
    assert config.name == "judged-theirs"
    stages = ["summaries", "judge", "controls", "win_rate", "calibration", "report"]
    assert wanted_stages(config, ["eval"]) == stages

    printed, page = run_all_stages(config)

    assert max(len(line) for line in printed.splitlines() if "/" not in line) <= 80
    results = (read_manifest(stage_folder(config, "win_rate")) or {})["results"]
    # One fact less than the reference, and as many.
    rates = {name: row["win_rate"] for name, row in results["policies"].items()}
    assert rates == {"lead-3": 0.0, "all-of-it": 0.5}
    [difference] = results["differences"]
    assert set(names_of_pair(difference)) == {"lead-3", "all-of-it"}
    calibration = (read_manifest(stage_folder(config, "calibration")) or {})["results"]
    assert (calibration["pairs"], calibration["of_pairs"]) == (80, 80)
    assert "no run here wrote them" in page
    assert "The judge is not an LLM" in page
    assert "of 40 posts in the order of the data" in page  # nobody knows if they were held out
    assert "are the paper's" not in page
    assert "differs from the preset or from the defaults.*" in page
    assert "after Holm" in page
    assert "Agreement" in page or "agreement" in page
    assert all(find_problem(config, stage) is None for stage in stages)


def test_three_posts_decide_nothing_and_every_page_says_so(runs, tmp_path):
    path = write_jsonl(tmp_path / "three.jsonl", rows_of_world(3))
    config = config_of_file(path, "outputs.label=people")

    _, page = run_all_stages(config)
    run_module(calibration, ["--preset", "outputs", "--set", *config.overrides])

    calibration_page = next(runs.glob("*/*/calibration_report/*/*.md")).read_text()
    assert "**not significantly different** from the references" in " ".join(page.split())
    assert "**reliably" not in page
    assert "too few posts (3 of 20 needed)" in page
    assert "too few posts (3 of 125 needed)" in page
    assert "FAILED" not in page + calibration_page
    assert "neither passed nor failed" in calibration_page
