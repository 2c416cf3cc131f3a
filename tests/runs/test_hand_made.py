"""A file below `runs/` that no run wrote, or that a person edited, is reported in one line."""

import json
from functools import partial

import pytest

from eval import win_rate
from eval.judge import Task, kept_judgements
from reports import scaling
from reports.results import find_runs
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.recorded import recorded_config
from stages.runs import hub
from stages.runs.files import read_json, write_json
from stages.runs.hub import Source
from stages.runs.staleness import find_problem
from stages.training.row_by_row import KeptRows
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import fabricate
from tests.lib.fake_stages import status_lines
from tests.lib.make_stages import run_module

# -- folders that no run wrote ---------------------------------------------------------------------

ROW = {"id": "1", "query": "q", "summary": "s", "reference": "r", "score": None}


@pytest.fixture
def hand_made(runs):
    """A folder of summaries of two policies that looks like that of the run `mine`."""
    folder = runs / "mine/seed44413/summaries"
    folder.mkdir(parents=True)
    for policy in ("a-b", "c"):
        (folder / f"{policy}.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.fixture(params=["{}", "[]", "no json", '{"preset": "tiny"}'])
def with_wrong_settings(request, hand_made):
    """The folder with settings that no run recorded."""
    (hand_made / "config.json").write_text(request.param)
    return hand_made


def test_settings_that_no_run_recorded_are_not_read(with_wrong_settings):
    assert recorded_config(with_wrong_settings) is None


def test_status_lists_a_folder_that_no_run_wrote(with_wrong_settings):
    assert "mine, seed 44413" in status_lines()


def test_pages_skip_a_folder_that_no_run_wrote(with_wrong_settings, capsys):
    with pytest.raises(UserError, match="no finished run in"):
        find_runs("mine")
    assert "no finished run in" in refused_by(capsys, scaling.main, "--names", "mine")


def test_a_stage_whose_input_has_another_manifest_says_so_in_one_line(hand_made, capsys):
    with pytest.raises(UserError, match="is not a manifest of this project: move /"):
        find_problem(make_config("tiny", name="mine"), "summaries")

    run_win_rate = partial(run_module, win_rate)
    line = refused_by(capsys, run_win_rate, "--preset", "tiny", "--name", "mine")
    assert "summaries/manifest.json is not a manifest of this project" in line


# -- edited files ----------------------------------------------------------------------------------


def test_status_names_a_setting_of_another_type(runs):
    fabricate(make_config("tiny"))
    path = runs / "tiny/seed44413/sft/config.json"
    write_json(path, read_json(path) | {"seed": "one"})

    text = " ".join(" ".join(status_lines()).split())

    assert "unreadable sft: " in text
    assert "seed must be a whole number, not 'one'" in text


@pytest.mark.parametrize("line", ["[1]", "5", '{"policy": "a"}', '{"verdict": "nobody"}'])
def test_verdicts_that_no_judge_wrote_are_requested_again(tmp_path, line):
    row = {"id": "p", "query": "q", "summary": "s", "reference": "r"}
    tasks = [
        Task(policy="a", row=row, order="policy_first"),
        Task(policy="a", row=row, order="reference_first"),
    ]
    judgement = {"policy": "a", "id": "p", "order": "policy_first", "verdict": "tie"}
    path = tmp_path / "judgements.jsonl"
    path.write_text(f"{json.dumps(judgement)}\n{line}\n")

    assert kept_judgements(path, tasks) == [judgement]
    assert path.read_text() == json.dumps(judgement) + "\n"


def test_measurements_of_a_stage_are_read_again(tmp_path):
    KeptRows(tmp_path, "scores", 0).add([1], [0.5])
    assert KeptRows(tmp_path, "scores", 0).known == {1: 0.5}


def test_measurements_that_no_stage_wrote_are_refused(tmp_path):
    kept = KeptRows(tmp_path, "scores", 0)
    kept.add([1], [0.5])
    kept.path.write_text('{"rows": 5}\n')
    with pytest.raises(UserError, match=r"scores\.0\.jsonl has a line that no stage wrote"):
        KeptRows(tmp_path, "scores", 0)


# -- two runs at once ------------------------------------------------------------------------------


def test_two_runs_at_once_use_the_commit_that_the_first_recorded(runs):
    source = Source(setting="base.checkpoint", kind="model", name="me/model")
    first_commit = "a" * 40
    second_commit = "b" * 40

    assert hub._record(source, first_commit) == first_commit
    assert hub._record(source, second_commit) == first_commit
