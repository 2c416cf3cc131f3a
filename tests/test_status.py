"""What `make status` and `make help` say, of what lies in the runs folder."""

import shutil

import pytest

from reports import run_page
from reports.sharing.status import status
from stages.config.checks import UserError
from stages.config.command_line import make_config
from stages.pipeline.wanted import kept
from stages.runs.progress import COLUMNS
from tests.lib.fabricated_runs import fabricate, two_judges


def test_a_run_is_one_row_in_which_a_judge_that_is_not_done_stands_for_all(runs):
    for config in two_judges():
        run_page.write_report(config)
    fabricate(make_config("tiny-s"))
    for stage in ("judge", "controls", "win_rate"):
        shutil.rmtree(runs / "tiny-s/seed44413" / stage)
    lines = status()
    assert max(map(len, lines)) <= COLUMNS
    assert [line.split() for line in lines[1:3]] == [
        ["tiny", "44413", *["ok"] * 10],
        ["tiny-s", "44413", *["ok"] * 6, "-", "-", "-", "-"],
    ]
    (runs / "tiny/seed44413/judge/facts/manifest.json").write_text("{}")
    lines = status()
    assert lines[1].split()[8] == "fail"
    assert lines[2].startswith("  judge, judge facts: ")


def test_a_stage_whose_input_was_deleted_is_stale_and_names_the_input(runs):
    fabricate(make_config("tiny"))
    shutil.rmtree(runs / "tiny/seed44413/sft")
    lines = status()
    assert lines[1].split()[:6] == ["tiny", "44413", "ok", "-", "old", "ok"]
    assert "  rm: was made from sft, which is missing" in lines


def test_what_is_kept_of_an_interrupted_stage_is_a_checkpoint_or_what_it_has_measured(tmp_path):
    resume = tmp_path / "resume"
    assert kept(tmp_path) == ""
    resume.mkdir()
    (resume / "checkpoint-0000003.tmp").mkdir()  # that the disk had no room for
    assert kept(tmp_path) == ""
    (resume / "score-references.0.jsonl").write_text("{}\n")
    assert kept(tmp_path) == "its finished part is kept"
    (resume / "score-references.0.jsonl").unlink()
    (tmp_path / "judgements.jsonl").write_text("{}\n")
    assert kept(tmp_path) == "its finished part is kept"
    (resume / "checkpoint-0000002").mkdir()
    assert kept(tmp_path) == "its last checkpoint is of update 2"


def test_an_unknown_run_among_others_is_not_called_the_first(runs):
    fabricate(make_config("tiny", seed=1))
    with pytest.raises(UserError, match="unknown run 'zzzzqq': run `make status` to see"):
        status("zzzzqq")
