"""A folder that no run wrote, or that a person edited, ends in one line, not in a traceback."""

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

ROW = {"id": "1", "query": "q", "summary": "s", "reference": "r", "score": None}


def hand_made(runs, rows=(ROW,), manifest="{}", config=None, stage="summaries"):
    """A folder that looks like the run `mine`, with the policies a-b and c."""
    folder = runs / "mine/seed44413" / stage
    folder.mkdir(parents=True)
    for name in ("a-b", "c"):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "manifest.json").write_text(manifest)
    if config is not None:
        (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize("config", ["{}", "[]", "no json", '{"preset": "tiny"}'])
def test_status_lists_settings_that_no_run_recorded_and_pages_skip_them(runs, capsys, config):
    folder = hand_made(runs, config=config)
    assert recorded_config(folder) is None
    assert "mine, seed 44413" in status_lines()
    with pytest.raises(UserError, match="no finished run in"):
        find_runs("mine")
    assert "no finished run in" in refused_by(capsys, scaling.main, "--names", "mine")


def test_a_stage_whose_input_has_no_manifest_of_ours_says_so_in_one_line(runs, capsys):
    hand_made(runs)
    config = make_config("tiny", name="mine")
    with pytest.raises(UserError, match="is not a manifest of this project: move /"):
        find_problem(config, "summaries")
    line = refused_by(capsys, partial(run_module, win_rate), "--preset", "tiny", "--name", "mine")
    assert "summaries/manifest.json is not a manifest of this project" in line


def test_status_lists_a_record_with_a_value_of_another_type(runs):
    fabricate(make_config("tiny"))
    path = runs / "tiny/seed44413/sft/config.json"
    write_json(path, read_json(path) | {"seed": "one"})
    text = " ".join(" ".join(status_lines()).split())
    assert "unreadable sft: " in text
    assert "seed must be a whole number, not 'one'" in text


@pytest.mark.parametrize("line", ["[1]", "5", '{"policy": "a"}', '{"verdict": "nobody"}'])
def test_verdicts_that_no_judge_wrote_are_requested_again(tmp_path, line):
    row = {"id": "p", "query": "q", "summary": "s", "reference": "r"}
    good = {"policy": "a", "id": "p", "order": "policy_first", "verdict": "tie"}
    path = tmp_path / "judgements.jsonl"
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    tasks = [
        Task(policy="a", row=row, order=order) for order in ("policy_first", "reference_first")
    ]
    assert kept_judgements(path, tasks) == [good]
    assert path.read_text() == json.dumps(good) + "\n"


def test_kept_measurements_that_no_stage_wrote_are_named(tmp_path):
    kept = KeptRows(tmp_path, "scores", 0)
    kept.add([1], [0.5])
    assert KeptRows(tmp_path, "scores", 0).known == {1: 0.5}
    kept.path.write_text('{"rows": 5}\n')
    with pytest.raises(UserError, match=r"scores\.0\.jsonl has a line that no stage wrote"):
        KeptRows(tmp_path, "scores", 0)


def test_two_runs_at_once_use_the_commit_that_the_first_recorded(runs):
    source = Source(setting="base.checkpoint", kind="model", name="me/model")
    first, second = "a" * 40, "b" * 40
    assert hub._record(source, first) == first
    assert hub._record(source, second) == first
