"""`make study`: a grid of presets and seeds, resumable, past a cell that fails, then the pages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.config.command_line import Request, make_config
from stages.config.config import UserError
from stages.pipeline import grid
from stages.pipeline.grid import Grid, make_grid, study
from tests.test_pipeline import EVALUATED, Recorder, make, typed


def cells_of(*presets: str, seeds=(1, 2), **request) -> Grid:
    return study(Request(**request), presets, seeds)


class Broken(Recorder):
    """Fails in the reward model of one run."""

    def call(self, words) -> int:
        return 7 if words[:3] == ["tiny", "1", "rm"] else super().call(words)


def test_a_study_makes_every_cell_and_then_one_page_of_all_sizes(runs, capsys):
    maker = Recorder()
    assert make_grid(maker, cells_of("tiny-xs", "tiny")) == 0
    made = [(name, stage) for name, stage in maker.made if stage in EVALUATED]
    assert made == [
        (name, stage) for _ in (1, 2) for name in ("tiny-xs", "tiny") for stage in EVALUATED
    ]
    assert maker.made[-1][1] == "reports.scaling_page"
    lines = [line for line in capsys.readouterr().out.splitlines() if "are through" in line]
    assert len(lines) == 4
    assert lines[0] == "tiny-xs seed 1 is done; 1 of 4 runs are through"
    assert lines[-1] == "tiny seed 2 is done; 4 of 4 runs are through"
    again = Recorder()
    assert make_grid(again, cells_of("tiny-xs", "tiny")) == 0
    assert [stage for _, stage in again.made] == ["reports.scaling_page"]


def test_it_goes_on_past_a_cell_that_fails_says_so_and_ends_with_its_status(runs, capsys):
    maker = Broken()
    assert make_grid(maker, cells_of("tiny-xs", "tiny")) == 7
    assert sorted(str(one.relative_to(runs)) for one in runs.glob("*/*/ppo")) == [
        "tiny-xs/seed1/ppo",
        "tiny-xs/seed2/ppo",
        "tiny/seed2/ppo",
    ]
    out, err = capsys.readouterr()
    assert "tiny seed 1 FAILED with status 7; 2 of 4 runs are through" in out
    assert err == "error: 1 runs failed: tiny seed 1\n"
    assert maker.made[-1][1] == "reports.scaling_page"


def test_a_named_study_calls_each_run_after_its_preset_and_passes_its_settings_to_all(runs):
    cells = cells_of("tiny-xs", "tiny-xl", name="other", overrides=("world.seed=2",))
    assert [cell.config.name for cell in cells.start] == ["tiny-xs-other", "tiny-xl-other"] * 2
    assert {cell.config.world.seed for cell in cells.start} == {2}
    with pytest.raises(UserError, match="needs a run name of its own"):
        cells_of("tiny-xs", overrides=("world.seed=2",))
    with pytest.raises(UserError, match="leave out UPSTREAM="):
        cells_of("tiny-xs", upstream="tiny")
    with pytest.raises(UserError, match="unknown preset 'tiny-xx': did you mean tiny-x"):
        cells_of("tiny-xx")


def test_looking_lists_each_cell_with_what_it_lacks_and_makes_nothing(tmp_path):
    found = typed(tmp_path, "-n", "study", "PRESETS=tiny-xs tiny", "SEEDS=1", "JOB=sft")
    assert found.returncode == 0, found.stderr
    assert [line for line in found.stdout.splitlines() if line.startswith("tiny")] == [
        f"{name} seed 1: would make {stage} (not run yet)"
        for name in ("tiny-xs", "tiny")
        for stage in ("base", "sft")
    ]
    assert not list(tmp_path.iterdir())
    refused = typed(tmp_path, "-n", "study", "JOB=sfft")
    assert (refused.returncode, "unknown goal 'sfft'" in refused.stderr) == (2, True)


def test_a_cell_with_other_settings_is_refused_by_name_and_the_others_are_made(runs, capsys):
    make(make_config("tiny-xs", seed=1, name="tiny-xs-own", overrides=("ppo.lam=0.5",)))
    cells = cells_of("tiny-xs", "tiny", name="own", overrides=("ppo.lam=0.9",), seeds=(1,))
    maker = Recorder()
    assert make_grid(maker, cells) == 2
    err = capsys.readouterr().err
    assert "error: tiny-xs-own seed 1: stage ppo has finished with other settings" in err
    assert {name for name, stage in maker.made if stage in EVALUATED} == {"tiny-own"}


SMALL = (
    "sft.epochs=9 sft.batch_size=2 world.train_posts=600 world.validation_posts=4"
    " world.train_comparisons=8 world.validation_comparisons=4"
)


@pytest.mark.walk
def test_ctrl_c_ends_a_study_with_one_line_that_goes_on(tmp_path):
    words = f"study --presets tiny-xs --seeds 1 2 --name x --job sft --set {SMALL}".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.pipeline.main", *words],
        cwd=tmp_path,
        env=environment(),
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
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    (line,) = [line for line in err.splitlines() if "goes on" in line or "topped" in line]
    assert line == "stopped by SIGINT: the same command, without REPLACE, goes on"
    assert (tmp_path / "runs/tiny-xs-x/seed1/sft.partial/resume").is_dir()


def environment() -> dict[str, str]:
    root = str(Path(grid.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
