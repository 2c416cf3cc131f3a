"""`make study` runs several presets and seeds, goes past a run that fails, and writes one page."""

import os
import signal
import subprocess
import sys
import time

import pytest

from stages.__main__ import main
from stages.config.command_line import Request, make_config
from stages.config.errors import UserError
from stages.pipeline.grid import Grid, GridOptions, run_grid, study
from tests.lib.pipeline import EVALUATED, FAILED, Recorder, make, typed
from tests.lib.places import ROOT


def study_of(*presets: str, seeds=(1, 2), **request) -> Grid:
    return study(Request(**request), GridOptions(presets=presets, seeds=seeds))


def test_a_study_runs_all_sizes_of_a_seed_and_then_writes_one_page(runs, capsys):
    recorder = Recorder()
    pages: list[list[str]] = []
    expected = []
    for name, seed in (("tiny-xs", 1), ("tiny", 1), ("tiny-xs", 2), ("tiny", 2)):
        for stage in EVALUATED:
            expected.append((name, seed, stage))

    status = run_grid(recorder, study_of("tiny-xs", "tiny"), pages.append)

    assert status == 0
    assert recorder.made == expected
    assert pages == [["--names", "tiny-xs", "tiny", "--judge", "facts"]]
    lines = [line for line in capsys.readouterr().out.splitlines() if "has finished" in line]
    assert len(lines) == 4
    assert lines[0] == "tiny-xs seed 1 has finished (1 of 4 runs)"


def write_no_page(options: list[str]) -> None:
    """Stands for writing the page."""


def test_the_same_command_has_nothing_left_but_the_page(runs):
    run_grid(Recorder(), study_of("tiny-xs"), write_no_page)
    recorder = Recorder()
    pages: list[list[str]] = []

    status = run_grid(recorder, study_of("tiny-xs"), pages.append)

    assert status == 0
    assert recorder.made == []
    assert len(pages) == 1


def test_a_run_that_fails_stops_no_other_and_gives_the_status(runs, capsys):
    recorder = Recorder(fails=("tiny", 1, "rm"))

    status = run_grid(recorder, study_of("tiny-xs", "tiny"), write_no_page)

    assert status == FAILED
    assert sorted(str(path.relative_to(runs)) for path in runs.glob("*/*/ppo")) == [
        "tiny-xs/seed1/ppo",
        "tiny-xs/seed2/ppo",
        "tiny/seed2/ppo",
    ]
    output, errors = capsys.readouterr()
    assert f"tiny seed 1 FAILED with status {FAILED} (2 of 4 runs)" in output
    assert errors.endswith("error: 1 runs failed: tiny seed 1\n")


class BrokenRecorder(Recorder):
    """A runner with a bug that only the run tiny-xs meets."""

    def _run_stage(self, config, stage):
        if config.name == "tiny-xs":
            raise ZeroDivisionError
        super()._run_stage(config, stage)


def test_a_bug_in_one_run_keeps_its_traceback_and_stops_no_other(runs, capsys):
    recorder = BrokenRecorder()

    status = run_grid(recorder, study_of("tiny-xs", "tiny", seeds=[1]), write_no_page)

    assert status == 1
    assert {name for name, _, _ in recorder.made} == {"tiny"}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_run_with_other_settings_is_refused_by_name_and_the_others_run(runs, capsys):
    make(make_config("tiny-xs", seed=1, name="tiny-xs-own", overrides=("ppo.lam=0.5",)))
    grid = study_of("tiny-xs", "tiny", name="own", overrides=("ppo.lam=0.9",), seeds=(1,))
    recorder = Recorder()

    status = run_grid(recorder, grid, write_no_page)

    assert status == 2
    errors = capsys.readouterr().err
    assert "error: tiny-xs-own seed 1: stage ppo has finished with other settings" in errors
    assert {name for name, _, _ in recorder.made} == {"tiny-own"}


def test_a_named_study_calls_each_run_after_its_preset_and_gives_all_its_settings(runs):
    grid = study_of("tiny-xs", "tiny-xl", name="other", overrides=("world.seed=2",))
    names = [planned.config.name for planned in grid.base_runs]
    assert names == ["tiny-xs-other", "tiny-xl-other"] * 2
    assert {planned.config.world.seed for planned in grid.base_runs} == {2}


def test_the_name_of_a_study_takes_no_settings_from_a_run_of_that_name(runs, capsys):
    make(make_config("tiny", name="other", overrides=("sft.epochs=3",)), "sft")
    make(make_config("tiny-xs", seed=1, name="tiny-xs-other"), "sft")
    main(["study", "PRESETS=tiny-xs", "SEEDS=1", "NAME=other", "JOB=sft", "DRY=1"])
    assert "tiny-xs-other seed 1: nothing to do" in capsys.readouterr().out


def test_a_named_study_calls_the_run_of_a_preset_file_after_the_file(runs, place):
    (place / "mine").mkdir()
    (place / "mine/small.yaml").write_text("extends: tiny-xs\n")
    grid = study_of("mine/small.yaml", name="other", seeds=(1,))
    assert [planned.config.name for planned in grid.base_runs] == ["small-other"]


@pytest.mark.parametrize(
    ("preset", "request_options", "line"),
    [
        ("tiny-xs", {"overrides": ("world.seed=2",)}, "changes preset tiny-xs: name the run"),
        ("tiny-xs", {"upstream": "tiny"}, "leave out UPSTREAM="),
        ("tiny-xx", {}, "unknown preset 'tiny-xx': did you mean tiny-x"),
    ],
)
def test_what_no_study_takes_is_refused(runs, preset, request_options, line):
    with pytest.raises(UserError, match=line):
        study_of(preset, **request_options)


def test_dry_lists_each_run_with_what_it_lacks_and_writes_nothing(tmp_path):
    words = ["study", "PRESETS=tiny-xs tiny", "SEEDS=1", "JOB=sft", "DRY=1"]
    printed = typed(tmp_path, *words).stdout.splitlines()
    without_reasons = [line.partition(" (")[0] for line in printed]
    assert without_reasons == [
        "tiny-xs seed 1: would run base",
        "tiny-xs seed 1: would run sft",
        "tiny seed 1: would run base",
        "tiny seed 1: would run sft",
    ]
    assert not list(tmp_path.iterdir())


def test_dry_refuses_an_unknown_job(tmp_path):
    refused = typed(tmp_path, "study", "JOB=sfft", "DRY=1")
    assert refused.returncode == 2
    assert "'sfft'" in refused.stderr


SMALL = [
    "sft.epochs=9",
    "sft.batch_size=2",
    "world.train_posts=600",
    "world.validation_posts=4",
    "world.train_comparisons=8",
    "world.validation_comparisons=4",
]


@pytest.mark.walk
def test_ctrl_c_ends_a_study_with_the_command_that_resumes_it(tmp_path):
    variables = ["PRESETS=tiny-xs", "SEEDS=1 2", "NAME=x", "JOB=sft", f"SET={' '.join(SMALL)}"]
    words = ["study", *variables]
    process = subprocess.Popen(
        [sys.executable, "-m", "stages", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "runs/tiny-xs-x/seed1/sft.partial/metrics.jsonl"
    limit = time.monotonic() + 300
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)

    assert process.returncode == 130
    (line,) = [line for line in errors.splitlines() if "stopped by" in line]
    assert line.startswith("stopped by SIGINT: `make study ")
    assert line.endswith("` resumes")
    assert (tmp_path / "runs/tiny-xs-x/seed1/sft.partial/resume").is_dir()
