"""The mirror in trackio: told what wandb is told; a warning where the critic fails.

The module of the tests stands for trackio. Where the real one is installed it is walked as well.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stages.driving.mirror import Tracker, note_for, open_mirrors
from stages.runs import mirrored_by, open_stage
from stages.settings.checks import UserError
from stages.settings.command_line import make_config

ROOT = Path(__file__).parents[1]
TINY = make_config("tiny")
EXPLAINED = "val/explained_variance"


class FakeRun:
    """A run of trackio, 0.43: `log`, `alert` and `finish`, and nothing else."""

    def __init__(self, **request):
        self.request, self.rows, self.alerts, self.ended = request, [], [], 0
        print("* Trackio project initialized")

    def log(self, metrics, step=None):
        self.rows.append(metrics)

    def alert(self, title, text=None, level="warn", step=None, webhook_url=None):
        self.alerts.append((title, text))

    def finish(self):
        self.ended += 1


class FakeTable:
    def __init__(self, columns=None, data=None):
        self.rows = [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def opened(monkeypatch):
    """The runs that a module in trackio's place has opened."""
    module, made = ModuleType("trackio"), []

    def init(**request):
        made.append(FakeRun(**request))
        return made[-1]

    module.__dict__.update(init=init, finish=lambda: made[-1].finish(), Table=FakeTable)
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("TRACKIO_PROJECT", "tldr")
    return made


def tell(stage, rows, config=TINY, results=None):
    with mirrored_by(open_mirrors), open_stage(config, stage) as run:
        for step, metrics in enumerate(rows, start=1):
            run.log(step, **metrics)
            run.append("samples.jsonl", {"step": step, "response": "r"})
        run.finish(results or {})


def test_all_stages_of_a_seed_are_one_run_with_steps_results_and_tables(runs, opened, capsys):
    tell("sft", [{"loss/train": 2.0}, {"loss/train": 1.0}], results={"rougeL": 0.4})
    tell("rm", [{"loss/train": 0.6}])
    first, second = opened
    (number,) = {run.request["name"] for run in opened}
    assert json.loads((runs / "tiny/seed44413/trackio.json").read_text())["id"] == number
    assert not (runs / "tiny/seed44413/wandb.json").exists()
    assert first.request["project"] == "tldr"
    assert first.request["group"] == "tiny"
    assert first.request["resume"] == "allow"
    assert first.request["config"]["seed"] == 44413
    assert second.request["config"]["tags"] == ["tiny", "sft", "rm", "judge:facts"]
    losses = [row for row in first.rows if "sft/loss/train" in row]
    assert losses == [{"sft/step": 1, "sft/loss/train": 2.0}, {"sft/step": 2, "sft/loss/train": 1}]
    tables = [row["sft/samples"].rows for row in first.rows if "sft/samples" in row]
    assert tables == [[{"step": step, "response": "r"}] for step in (1, 2)]
    assert first.rows[-1]["results/sft/rougeL"] == 0.4
    assert [run.ended for run in opened] == [1, 1]
    assert capsys.readouterr().out == ""
    # A stage that learns anew begins another run.
    tell("sft", [{"loss/train": 2.0}], replace(TINY, sft=replace(TINY.sft, epochs=1)))
    assert opened[-1].request["name"] != number


def test_a_critic_that_is_worse_than_a_constant_is_one_warning(runs, opened):
    alone = TINY.ppo.critic_updates
    rows = [{EXPLAINED: -2.0}] * alone + [{EXPLAINED: 0.1}, {EXPLAINED: -0.31}, {EXPLAINED: -4.0}]
    tell("ppo", rows)
    (run,) = opened
    said = f"it is -0.31 at step {alone + 2}: the critic is worse than a constant"
    assert run.alerts == [(f"ppo: {EXPLAINED} below 0", said)]


def test_wandb_is_warned_too(runs):
    alerts = []
    client = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        log=lambda _: None,
        alert=lambda title, text, level: alerts.append((title, level)),
    )
    (runs / "tiny/seed44413").mkdir(parents=True)
    tracker = Tracker(TINY, "ppo", client, note_for(TINY, "ppo", "a"))
    tracker.log(TINY.ppo.critic_updates + 1, {EXPLAINED: -0.5})
    assert alerts == [(f"ppo: {EXPLAINED} below 0", "WARN")]


def test_trackio_that_is_missing_or_refuses_a_setting_is_one_line(runs, opened, monkeypatch):
    def refuse(**_):
        raise ValueError("Invalid project name 'a/b'.")

    monkeypatch.setattr(sys.modules["trackio"], "init", refuse, raising=False)
    with mirrored_by(open_mirrors), pytest.raises(UserError, match=r"a/b'.*unset TRACKIO_PROJECT"):
        open_stage(TINY, "sft").__enter__()
    monkeypatch.setitem(sys.modules, "trackio", None)
    with mirrored_by(open_mirrors), pytest.raises(UserError, match="pip install trackio"):
        open_stage(TINY, "sft").__enter__()
    assert not runs.exists()


def test_a_failure_of_trackio_is_said_and_the_stage_goes_on(runs, opened, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("disk is full")

    monkeypatch.setattr(FakeRun, "log", fail)
    tell("sft", [{"loss/train": 2.0}])
    monkeypatch.setattr(sys.modules["trackio"], "init", fail, raising=False)
    tell("rm", [{"loss/train": 2.0}])
    assert [line for line in capsys.readouterr().err.splitlines() if "trackio" in line] == [
        "trackio: logging failed (disk is full): the stage goes on without trackio",
        "trackio: it fails (disk is full): the stage goes on without trackio",
    ]
    assert (runs / "tiny/seed44413/rm/manifest.json").exists()


REAL = """
import sys
from tests.test_trackio import EXPLAINED, TINY, tell
tell("sft", [{"loss/train": 2.0}, {"loss/train": 1.0}], results={"rougeL": 0.4})
tell("ppo", [{EXPLAINED: 0.5}] * TINY.ppo.critic_updates + [{EXPLAINED: -0.5}])
import trackio
(run,) = trackio.Api().runs("tldr")
print(run.config["_Group"], [alert["title"] for alert in run.alerts()])
print(len(trackio.sqlite_storage.SQLiteStorage.get_logs("tldr", run.name)))
"""


@pytest.mark.walk
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_the_real_trackio_keeps_a_seed_as_one_run_with_its_warning(tmp_path):
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    own = {"HOME": str(tmp_path), "TRACKIO_PROJECT": "tldr", "PYTHONPATH": paths}
    own |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    about, rows = done.stdout.splitlines()
    assert about == f"tiny ['ppo: {EXPLAINED} below 0']"
    assert int(rows) > TINY.ppo.critic_updates
