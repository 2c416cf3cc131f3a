"""Existing summaries in files become the summaries of a run without training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eval.calibration import calibrate
from eval.controls import judge_controls
from eval.judge import judge_summaries
from eval.outputs import take_outputs
from eval.win_rate import measure_win_rates, names_of_pair
from reports import calibration
from reports.outputs import write_report
from stages.config import paths
from stages.config.config import Config
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
    unknown = {
        "tokens": None,
        "reference_tokens": None,
        "has_eos": None,
        "score": None,
        "reference_score": None,
    }
    assert systems == {
        "a-b": [
            {"id": "7", "query": query, "reference": "r", "summary": 'one,\n"two"', **unknown},
            {"id": "8", "query": query, "reference": "s", "summary": "", **unknown},
        ]
    }


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

    assert summary["id"] == "1"
    assert summary["query"] == "the post"  # without a title and a subreddit
    assert summary["summary"] == "a summary"
    assert summary["reference"] == "r"


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


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A file that cannot be judged, and the line that says so."""

    rows: list[dict[str, Any]]
    message: str
    columns: dict[str, str]
    """Settings that name columns."""


def refusal(*rows: dict[str, Any], message: str, **columns: str) -> Refusal:
    return Refusal(rows=list(rows), message=message, columns=columns)


REFUSALS = {
    "missing columns": refusal(
        {"id": 1, "text": "p", "wrote": "s", "reference": "r"},
        summary="a,b",
        message=(
            "no column a, b, post: name it, SET='outputs.summary=... outputs.post=...' .it has id"
        ),
    ),
    "a missing column that a setting names": refusal(
        GOOD,
        reference="gold",
        message=r"no column gold: name it, SET='outputs.reference=",
    ),
    "a reference that is null": refusal(
        GOOD | {"reference": None},
        message="column reference is null: fill it, or drop the row",
    ),
    "an empty reference": refusal(
        GOOD | {"reference": ""},
        message="column reference is empty",
    ),
    "two references of a post": refusal(
        GOOD,
        GOOD | {"system": "b", "reference": "q"},
        message="the reference of id 1 differs",
    ),
    "two posts with one id": refusal(
        GOOD,
        GOOD | {"system": "b", "post": "q"},
        message="the post of id 1 differs",
    ),
    "systems whose names look alike": refusal(
        GOOD | {"system": "a b"},
        GOOD | {"id": 2, "system": "a/b"},
        message="and 'a b' look alike",
    ),
    "two summaries of a post": refusal(
        GOOD,
        GOOD | {"summary": "t"},
        message="post 1 of system x is also at .*x.jsonl:1",
    ),
    "a system called reference": refusal(
        GOOD,
        GOOD | {"system": "reference"},
        message="x.jsonl:2: a system is called reference",
    ),
    "a label in words": refusal(
        GOOD | {"people": "yes"},
        label="people",
        message="x.jsonl:1: column people is 'yes': write 1 if the summary is preferred, 0 if",
    ),
}


@pytest.mark.parametrize("refused", REFUSALS.values(), ids=REFUSALS)
def test_a_file_that_cannot_be_judged_is_refused_in_one_line(tmp_path, refused):
    path = write_jsonl(tmp_path / "x.jsonl", refused.rows)
    with pytest.raises(UserError, match=refused.message) as caught:
        systems_of(Outputs(file=str(path), **refused.columns))
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
def test_labels_may_be_floats_as_pandas_writes_a_column_with_an_empty_cell(tmp_path, ending):
    rows = [GOOD | {"id": number} for number in range(4)]
    table = pd.DataFrame(rows).assign(people=[1, 0, 0.5, float("nan")])
    path = tmp_path / f"x.{ending}"
    if ending == "csv":
        table.to_csv(path, index=False, na_rep="nan")
    else:
        table.to_parquet(path, index=False)

    summaries = systems_of(Outputs(file=str(path), label="people"))["x"]

    assert [row.get("label") for row in summaries] == [True, False, None, None]


def test_missing_labels_are_noticed_before_anything_is_paid_for(runs, tmp_path):
    labels = ["", "", "1", "1"]
    rows = [GOOD | {"id": number, "people": label} for number, label in enumerate(labels)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"column people has no label.* raise eval.posts"):
        take_outputs(config_of_file(path, "outputs.label=people", "eval.posts=2"))


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JudgedFile:
    """A run that has judged a file of labeled summaries by two systems."""

    runs: Path
    config: Config
    printed: str
    """The report on the terminal."""
    page: str

    def results(self, stage):
        return (read_manifest(stage_folder(self.config, stage)) or {})["results"]


def judge_file(path, posts):
    """Write a file about this many posts, and run all stages in a `runs` folder next to it."""
    runs = path.parent / "runs"
    write_jsonl(path, rows_of_world(posts))
    config = config_of_file(path, "outputs.label=people")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RUNS", runs)
        for stage in (take_outputs, judge_summaries, judge_controls, measure_win_rates, calibrate):
            stage(config)
        printed = write_report(config)
        [page] = stage_folder(config, "report").glob("*.md")
    return JudgedFile(runs=runs, config=config, printed=printed, page=page.read_text())


@pytest.fixture(scope="module")
def judged_forty_posts(tmp_path_factory):
    return judge_file(tmp_path_factory.mktemp("forty") / "systems.jsonl", posts=40)


@pytest.fixture
def forty_posts(judged_forty_posts, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", judged_forty_posts.runs)
    return judged_forty_posts


def test_the_run_is_named_after_its_file(forty_posts):
    assert forty_posts.config.name == "judged-systems"


def test_all_stages_of_make_eval_are_done(forty_posts):
    stages = ["summaries", "judge", "controls", "win_rate", "calibration", "report"]
    assert wanted_stages(forty_posts.config, ["eval"]) == stages
    for stage in stages:
        assert find_problem(forty_posts.config, stage) is None


def test_each_system_has_a_win_rate(forty_posts):
    policies = forty_posts.results("win_rate")["policies"]
    # One fact less than the reference, and as many.
    assert {name: row["win_rate"] for name, row in policies.items()} == {
        "lead-3": 0.0,
        "all-of-it": 0.5,
    }


def test_the_systems_are_compared(forty_posts):
    [pair] = forty_posts.results("win_rate")["differences"]
    assert set(names_of_pair(pair)) == {"lead-3", "all-of-it"}
    assert "after Holm" in forty_posts.page


def test_the_judge_is_calibrated_on_the_labels(forty_posts):
    results = forty_posts.results("calibration")
    assert results["pairs"] == 80
    assert results["of_pairs"] == 80
    assert "agreement" in forty_posts.page.lower()


def test_the_page_says_what_was_judged_and_by_whom(forty_posts):
    assert "no run here wrote them" in forty_posts.page
    assert "The judge is not an LLM" in forty_posts.page
    # Whether the posts were held out is not known.
    assert "of 40 posts in the order of the data" in forty_posts.page


def test_the_page_names_the_settings_that_differ_and_no_papers(forty_posts):
    assert "differs from the preset or from the defaults.*" in forty_posts.page
    assert "are the paper's" not in forty_posts.page


def test_the_printed_report_fits_on_a_terminal(forty_posts):
    lines_without_paths = [line for line in forty_posts.printed.splitlines() if "/" not in line]
    assert max(len(line) for line in lines_without_paths) <= 80


@pytest.fixture(scope="module")
def judged_three_posts(tmp_path_factory):
    return judge_file(tmp_path_factory.mktemp("three") / "three.jsonl", posts=3)


@pytest.fixture
def three_posts(judged_three_posts, monkeypatch):
    monkeypatch.setattr(paths, "RUNS", judged_three_posts.runs)
    return judged_three_posts


def test_the_page_says_that_three_posts_decide_nothing(three_posts):
    page = " ".join(three_posts.page.split())
    assert "**not significantly different** from the references" in page
    assert "**reliably" not in page
    assert "too few posts (3 of 20 needed)" in page
    assert "too few posts (3 of 125 needed)" in page
    assert "FAILED" not in page


def test_the_calibration_page_says_that_three_posts_decide_nothing(three_posts):
    run_module(calibration, ["--preset", "outputs", "--set", *three_posts.config.overrides])

    [path] = three_posts.runs.glob("*/*/calibration_report/*/*.md")
    page = path.read_text()
    assert "FAILED" not in page
    assert "neither passed nor failed" in page
