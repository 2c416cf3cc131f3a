"""wandb and TensorBoard get a stage's metrics while it runs, and nothing private.

wandb is the real library, in its offline mode and in separate processes.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.config.public import public_settings, public_value
from stages.pipeline import model_cards
from stages.runs import trackers
from stages.runs.files import read_lines
from stages.runs.run import open_stage
from stages.runs.trackers import SETTINGS, tracked

ROOT = Path(__file__).parents[1]
TINY = make_config("tiny")
JUDGE_URL = "http://pa55word.judge.example.org/v1"
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed here"
)
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed here"
)

# -- real processes --------------------------------------------------------------------------------

# Logs the loss 1 / step in each step from the first to the last. Step 3 as the last one fails.
LOGGING_STAGE = """
import sys
from stages.runs.run import open_stage
from stages.config.errors import UserError, fail
from stages.config.command_line import make_config
first, last, *overrides = sys.argv[1:]
config = make_config("tiny", name="shown", overrides=tuple(overrides))
try:
    with open_stage(config, "sft") as run:
        run.resume.mkdir(exist_ok=True)
        for step in range(int(first), int(last) + 1):
            run.log(step, **{"loss/train": 1 / step})
        if last == "3":
            raise RuntimeError("died")
        run.finish({"loss": 0.5})
except UserError as error:
    fail(error)
"""


def log_steps(folder, first, last, overrides=(), **environment):
    """Run the stage in a folder, in a separate process without the developer's wandb settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    fixed = {
        "HOME": str(folder),
        "OPENAI_API_KEY": "sk-of-a-judge",
        "PYTHONPATH": str(ROOT),
        "WANDB_SILENT": "true",
    }
    return subprocess.run(
        [sys.executable, "-c", LOGGING_STAGE, str(first), str(last), *overrides],
        cwd=folder,
        env=inherited | fixed | environment,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tracked_folder(tmp_path_factory):
    """A folder in which a stage failed after step 3, was resumed from step 3, and was rerun."""
    folder = tmp_path_factory.mktemp("tracked")
    overrides = ("judge.kind=openai", f"judge.base_url={JUDGE_URL}")
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_PROJECT": "tldr",
        "TENSORBOARD_LOGGING_DIR": "board",
    }

    failed = log_steps(folder, 1, 3, overrides, **environment)
    resumed = log_steps(folder, 3, 4, overrides, **environment)
    rerun = log_steps(folder, 1, 4, overrides, **environment)

    assert failed.returncode == 1
    assert resumed.returncode == 0, resumed.stderr
    assert rerun.returncode == 0, rerun.stderr
    return folder


def wandb_folders(folder):
    """The folders of wandb's offline runs, the oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"))


def sent_bytes(folder):
    """What wandb would send of each of its offline runs, the oldest first."""
    return [next(run.glob("*.wandb")).read_bytes() for run in wandb_folders(folder)]


@pytest.mark.walk
@needs_wandb
def test_a_resumed_stage_continues_its_wandb_run_and_a_rerun_begins_another(tracked_folder):
    failed, resumed, rerun = (
        re.sub(r"offline-run-\d+_\d+-", "", run.name) for run in wandb_folders(tracked_folder)
    )
    assert failed.startswith("shown-sft-")
    assert resumed == failed
    assert rerun != failed
    assert not (tracked_folder / "runs/shown/seed44413/sft/tracked.json").exists()


@pytest.mark.walk
@needs_wandb
def test_wandb_gets_the_metrics_and_at_the_end_the_results(tracked_folder):
    failed, resumed, rerun = sent_bytes(tracked_folder)

    loss_of_step_3 = str(1 / 3).encode()
    assert loss_of_step_3 in failed
    assert loss_of_step_3 in resumed
    assert loss_of_step_3 in rerun

    assert b"results/sft/loss" not in failed
    assert b"results/sft/loss" in resumed
    assert b"results/sft/loss" in rerun


@pytest.mark.walk
@needs_wandb
def test_wandb_gets_no_key_address_or_name_of_this_machine(tracked_folder):
    host = re.compile(rb"\b" + re.escape(socket.gethostname().encode()) + rb"\b")
    for sent in sent_bytes(tracked_folder):
        assert b"set (not shown)" in sent  # in place of the judge's address
        assert not host.search(sent)
        for secret in ("pa55word", "judge.example.org", "sk-of-a-judge", str(tracked_folder)):
            assert secret.encode() not in sent, secret


@pytest.mark.walk
@needs_wandb
def test_the_only_file_that_wandb_gets_lists_the_versions_of_libraries(tracked_folder):
    for run in wandb_folders(tracked_folder):
        files = [path for path in (run / "files").rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"requirements.txt"}


@pytest.mark.walk
@needs_wandb
@needs_tensorboard
def test_tensorboard_gets_the_metrics_of_every_step(tracked_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked_folder / "board/shown/seed44413/sft"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("loss/train")}

    assert losses == pytest.approx({1: 1.0, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4})


@pytest.mark.walk
@needs_wandb
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"WANDB_MODE": "bogus"}, "'online', 'offline'"),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "a/b"}, "Invalid project name 'a/b'"),
        ({}, "No API key configured"),
    ],
    ids=["unknown mode", "invalid project", "no key"],
)
def test_if_wandb_cannot_start_one_line_says_so_and_the_stage_finishes(
    tmp_path, environment, reason
):
    done = log_steps(tmp_path, 1, 1, **({"WANDB_PROJECT": "tldr"} | environment))

    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("wandb cannot start")]
    assert reason in line
    assert line.endswith("the stage continues without it")


# -- errors of a library ---------------------------------------------------------------------------


@pytest.mark.parametrize("library", SETTINGS)
def test_a_missing_library_is_refused_in_one_line_before_any_file_is_written(
    runs, monkeypatch, library
):
    monkeypatch.setenv(SETTINGS[library], "x")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"pip install {library}"), tracked(TINY, "sft"):
        pass
    assert not runs.exists()


class FailingTracker:
    """A tracker one of whose methods always fails."""

    def __init__(self, failing_method):
        self.failing_method = failing_method

    def __getattr__(self, name):
        def call(*arguments, **options):
            if name == self.failing_method:
                raise ConnectionError("first line\nsecond line")

        return call


@pytest.mark.parametrize("method", ["log", "finish"])
def test_if_a_tracker_fails_one_line_says_so_and_the_stage_finishes(
    runs, monkeypatch, capsys, method
):
    monkeypatch.setattr(trackers, "make_tracker", lambda *_: FailingTracker(method))
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setenv("WANDB_PROJECT", "tldr")

    with open_stage(TINY, "sft") as run:
        run.log(1, loss=1.0)
        run.log(2, loss=1.0)
        run.finish({})

    assert [row["step"] for row in read_lines(run.folder / "metrics.jsonl")] == [1, 2]
    lines = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert lines == [f"wandb: {method} failed (first line): the stage continues without it"]


# -- private settings ------------------------------------------------------------------------------


def test_addresses_and_folders_are_hidden_and_other_settings_are_shown():
    overrides = ("judge.kind=openai", f"judge.base_url={JUDGE_URL}", "ppo.kl_coef=0.1")
    config = make_config("tiny", name="mine", overrides=overrides)
    config = config.changed(data=config.data.changed(source="/home/anna/posts"))
    config = config.changed(judge=config.judge.changed(model="https://key@host/model"))

    shown = public_settings(config)

    assert shown["judge"]["base_url"] == "set (not shown)"
    assert shown["judge"]["model"] == "set (not shown)"
    assert shown["overrides"] == [
        "judge.kind=openai",
        "judge.base_url=set (not shown)",
        "ppo.kl_coef=0.1",
    ]
    assert shown["data"]["source"] == "folder posts"
    assert shown["ppo"]["kl_coef"] == 0.1
    assert shown["seed"] == 44413
    text = json.dumps(shown)
    for private in ("pa55word", "example.org", "anna", "host"):
        assert private not in text


@pytest.fixture
def own_folders(place):
    """A current folder with three folders below it."""
    for folder in ("clients/acme", "runs/models/smollm2", "here"):
        (place / folder).mkdir(parents=True)


LONG_PROMPT = f"r/{'x' * 5000}"


@pytest.mark.usefixtures("own_folders")
@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("base.tokenizer", "clients/acme", "folder acme"),
        ("base.checkpoint", "EleutherAI/pythia-14m", "EleutherAI/pythia-14m"),
        ("base.checkpoint", "runs/models/smollm2", "runs/models/smollm2"),
        ("judge.model", "accounts/fireworks/models/x", "accounts/fireworks/models/x"),
        ("data.source", "clients/gone", "folder gone"),
        ("outputs.file", "clients/acme/out.jsonl", "folder out.jsonl"),
        ("outputs.file", "runs/tiny/seed1", "runs/tiny/seed1"),
        ("data.source", "here", "here"),
        pytest.param("data.prompt", LONG_PROMPT, LONG_PROMPT, id="long prompt"),
    ],
)
def test_a_folder_is_shown_by_its_last_name_and_one_below_runs_in_full(setting, value, shown):
    assert public_value(setting, value) == shown


@pytest.mark.usefixtures("own_folders")
def test_a_folder_of_the_base_model_is_in_neither_settings_nor_model_card():
    overrides = ("base.checkpoint=clients/acme", "base.tokenizer=")
    config = make_config("tiny", name="mine", overrides=overrides)
    assert "clients" not in json.dumps(public_settings(config))
    assert model_cards.base_model_id(config) == ""
