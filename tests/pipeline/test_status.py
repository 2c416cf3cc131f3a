"""`make status` lists the stages of all runs, and changes nothing."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reports import run as run_page
from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.pipeline import status as status_module
from stages.runs.attempts import resume_point
from stages.runs.files import read_json, write_json
from stages.runs.run import open_stage
from stages.runs.text import COLUMNS
from tests.lib.fabricated_runs import fabricate, two_judges
from tests.lib.fake_stages import finish, finish_alone, interrupt, run_stages, status_lines

ROOT = Path(__file__).parents[2]
TINY = make_config("tiny")
TARGETS = ("sft", "rm", "ppo", "eval")
ALL_DONE = [
    "tiny, seed 44413",
    "  done                base, sft, rm, normalize, ppo, summaries, judge, controls,",
    "                        win_rate, report",
]


def everything(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """All files below a folder with their bytes and times."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_without_runs_it_says_how_to_start_one(runs, capsys):
    status_module.main([])
    assert capsys.readouterr().out == "no runs yet: make sft rm ppo eval\n"


def test_a_finished_run(runs):
    run_stages(TINY, *TARGETS)
    assert status_lines() == ALL_DONE


def test_missing_stages(runs):
    run_stages(TINY, "sft")
    assert status_lines() == [
        "tiny, seed 44413",
        "  done                base, sft",
        "  missing             rm, normalize, ppo, summaries, judge, controls, win_rate,",
        "                        report",
    ]


def test_stale_stages_say_why(runs):
    run_stages(TINY, "sft")
    finish(TINY, "base", text="other")
    assert "  stale               sft: ran with an earlier base" in status_lines()


def test_stages_that_are_stale_for_the_same_reason_share_a_row(runs):
    run_stages(TINY, "sft", "rm")
    finish(TINY, "base", text="other")
    assert "  stale               sft, rm, normalize: ran with an earlier base" in status_lines()


def test_a_stage_whose_input_was_deleted_is_stale_and_names_the_input(runs):
    run_stages(TINY, "rm")
    shutil.rmtree(runs / "tiny/seed44413/sft")
    assert "  stale               rm: ran with sft, which is missing now" in status_lines()


def test_a_stale_stage_whose_rerun_was_interrupted_says_from_where_it_resumes(runs):
    run_stages(TINY, "sft")
    finish(TINY, "base", text="other")
    interrupt(TINY, "sft", update=12)
    expected = "  stale               sft: ran with an earlier base (resumes after update 12)"
    assert expected in status_lines()


def test_a_stage_under_way_says_how_far_it_is(runs):
    run_stages(TINY, "data")
    with open_stage(TINY, "sft") as run:
        assert "  running             sft: it has just started" in status_lines()
        progress = {"label": "sft", "done": 3, "total": 9, "seconds_left": 400}
        write_json(run.partial / "progress.json", progress)
        before = everything(runs)
        assert "  running             sft: 3 of 9, 7 min left" in status_lines()
        assert everything(runs) == before

        write_json(run.partial / "progress.json", progress | {"label": "held-out loss"})
        assert "  running             sft: held-out loss, 3 of 9, 7 min left" in status_lines()


def test_a_half_finished_stage_says_from_where_it_resumes(runs):
    run_stages(TINY, "rm")
    interrupt(TINY, "ppo", update=12)
    assert "  half finished       ppo: resumes after update 12" in status_lines()


def test_a_stage_killed_after_its_manifest_is_only_renamed(runs):
    run_stages(TINY, "sft")
    folder = runs / "tiny/seed44413/sft"
    folder.rename(folder.with_name("sft.partial"))
    line = "  half finished       sft: finished, only its folder is left to rename"
    assert line in status_lines()


def test_a_failed_stage_says_why(runs):
    run_stages(TINY, "data")
    with pytest.raises(RuntimeError), open_stage(TINY, "sft"):
        raise RuntimeError("no space left")
    assert "  failed              sft: no space left" in status_lines()

    checkpoint = runs / "tiny/seed44413/sft.partial/resume/checkpoint-0000012"
    checkpoint.mkdir(parents=True)
    assert "  failed              sft: no space left (resumes after update 12)" in status_lines()


def test_the_stages_of_an_upstream(runs):
    run_stages(TINY, "rm")
    ablation = make_config("tiny", name="mine", upstream="tiny", overrides=("ppo.lam=0.5",))
    finish(ablation, "ppo")
    assert status_lines("mine")[:3] == [
        "mine, seed 44413",
        "  from upstream       base, sft, rm, normalize",
        "  done                ppo",
    ]


def test_an_optional_stage_is_listed_once_it_exists(runs):
    run_stages(TINY, "dpo")
    assert status_lines()[1] == "  done                base, sft, dpo"


def test_each_of_several_judges_is_listed(runs):
    for config in two_judges():
        run_page.write_report(config)
    (runs / "tiny/seed44413/judge/facts/manifest.json").write_text("{}")
    lines = status_lines()
    assert max(map(len, lines)) <= COLUMNS
    text = " ".join(" ".join(lines).split())
    assert "unreadable judge (facts), " in text
    assert "controls (facts)" in text


def test_settings_that_this_version_does_not_know_are_named(runs):
    folder = finish_alone(TINY, "base")
    manifest = read_json(folder / "manifest.json")
    manifest["settings"]["adapters"] = {"kind": "none"}
    write_json(folder / "manifest.json", manifest)
    text = " ".join(" ".join(status_lines()).split())
    assert "done base: this version does not know the recorded settings adapters.kind" in text


def record_extra_settings(runs, name: str, seed: int, *fields: str) -> None:
    """Write a run whose stages have recorded settings that this version does not have."""
    fabricate(make_config("tiny", name=name, seed=seed))
    extra: dict[str, Any] = {"extra": {}, **dict.fromkeys(fields, 1)}
    for path in (runs / name / f"seed{seed}").rglob("config.json"):
        write_json(path, read_json(path) | extra)


def test_ignored_settings_are_one_warning_for_all_seeds_of_a_run(runs, capsys):
    record_extra_settings(runs, "mine", 1)
    record_extra_settings(runs, "mine", 2)
    record_extra_settings(runs, "mine", 3, "shift")
    record_extra_settings(runs, "other", 1)
    capsys.readouterr()
    status_module.main([])
    assert capsys.readouterr().err.splitlines() == [
        "warning: run mine seeds 1, 2 recorded settings that this version ignores: extra",
        "warning: run mine seed 3 recorded settings that this version ignores: extra, shift",
        "warning: run other seed 1 recorded settings that this version ignores: extra",
    ]


def test_an_unreadable_record_hides_no_other_run(runs):
    for seed in (1, 2):
        fabricate(make_config("tiny", seed=seed))
    (runs / "tiny/seed1/ppo/manifest.json").write_text("{")
    lines = status_lines()
    assert any(line.startswith("  unreadable          ppo, ") for line in lines)
    assert "tiny, seed 2" in lines


def test_seeds_are_in_the_order_of_their_numbers(runs):
    for seed in (10, 9):
        finish_alone(make_config("tiny", seed=seed), "base")
    headings = [line for line in status_lines() if not line.startswith(" ")]
    assert headings == ["tiny, seed 9", "tiny, seed 10"]


def test_an_unknown_run_is_refused_with_the_nearest_name(runs):
    fabricate(make_config("tiny", seed=1))
    with pytest.raises(UserError, match="unknown run 'zzzzqq': run `make status` to see"):
        status_lines("zzzzqq")
    with pytest.raises(UserError, match="unknown run 'tinny': did you mean tiny"):
        status_lines("tinny")


def test_a_terminal_gets_a_table(runs, monkeypatch, capsys):
    run_stages(TINY, "sft")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    capsys.readouterr()
    status_module.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "stages"]
    assert lines[1].split() == ["tiny,", "seed", "44413", "done", "base,", "sft"]
    assert max(map(len, lines)) <= 80


LOADS_NO_TORCH = """
import sys
from stages.pipeline.status import main
main([])
assert "torch" not in sys.modules
"""


def test_it_loads_no_torch(tmp_path):
    command = [sys.executable, "-c", LOADS_NO_TORCH]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0


# -- from where an interrupted stage resumes -------------------------------------------------------


@pytest.fixture
def partial(tmp_path):
    """The folder of a stage that was interrupted, with one for its checkpoints."""
    (tmp_path / "resume").mkdir()
    return tmp_path


def test_a_stage_that_kept_nothing_resumes_from_nowhere(tmp_path):
    assert resume_point(tmp_path) == ""


def test_a_checkpoint_that_was_not_completed_does_not_count(partial):
    (partial / "resume/checkpoint-0000003.tmp").mkdir()  # the disk was full
    assert resume_point(partial) == ""


@pytest.mark.parametrize("name", ["resume/score-references.0.jsonl", "judgements.jsonl"])
def test_a_stage_resumes_after_what_it_has_measured(partial, name):
    (partial / name).write_text("{}\n")
    assert resume_point(partial) == "resumes after the finished part"


def test_a_stage_resumes_after_the_update_of_its_checkpoint(partial):
    (partial / "judgements.jsonl").write_text("{}\n")
    (partial / "resume/checkpoint-0000002").mkdir()
    assert resume_point(partial) == "resumes after update 2"
