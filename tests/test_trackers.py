"""wandb and TensorBoard: a stage under way is shown, goes on, and nothing else is sent.

wandb is the real one, in its offline mode and in processes of their own.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed here"
)
SECRET = "http://pa55word.judge.example.org/v1"
OFFLINE = {"WANDB_MODE": "offline", "WANDB_PROJECT": "tldr"}
LIVE = """
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


def process(folder, code, *words, **environment):
    """A process of its own: its exit status and what it says."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    own = {"HOME": str(folder), "OPENAI_API_KEY": "sk-of-a-judge", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=inherited | own | {"WANDB_SILENT": "true"} | environment,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
        check=False,
    )
    return SimpleNamespace(code=done.returncode, errors=done.stderr)


@pytest.mark.walk
@needs_wandb
def test_a_stage_that_goes_on_goes_on_in_its_run_and_nothing_of_this_machine_is_sent(tmp_path):
    words = ("judge.kind=openai", f"judge.base_url={SECRET}")
    environment = OFFLINE | {"TENSORBOARD_LOGGING_DIR": "board"}
    codes = [
        process(tmp_path, LIVE, *steps, *words, **environment).code
        for steps in (("1", "3"), ("3", "4"), ("1", "4"))
    ]
    assert codes == [1, 0, 0]
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    first, second, again = (re.sub(r"offline-run-\d+_\d+-", "", path.name) for path in folders)
    assert first == second != again  # what is made anew begins a run of its own
    assert first.startswith("shown-sft-")
    sent = [next(folder.glob("*.wandb")).read_bytes() for folder in folders]
    assert all(f"{1 / 3}".encode() in one for one in sent)  # the loss of step 3
    assert [b"results/sft/loss" in one for one in sent] == [False, True, True]
    assert all(b"set (not shown)" in one for one in sent)  # the judge's address
    host = re.compile(rb"\b" + re.escape(socket.gethostname().encode()) + rb"\b")
    for folder in folders:
        files = [path for path in (folder / "files").rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"requirements.txt"}  # libraries' versions
    for one in sent:
        assert not host.search(one)
        for secret in ("pa55word", "judge.example.org", "sk-of-a-judge", str(tmp_path)):
            assert secret.encode() not in one, secret
    assert not (tmp_path / "runs/shown/seed44413/sft/tracked.json").exists()
    if importlib.util.find_spec("tensorboard") is not None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "board/shown/seed44413/sft"))
        events.Reload()
        losses = {event.step: event.value for event in events.Scalars("loss/train")}
        assert losses == pytest.approx({step: 1 / step for step in (1, 2, 3, 4)})


@pytest.mark.walk
@needs_wandb
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WANDB_MODE": "bogus"}, "'online', 'offline'"),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "a/b"}, "Invalid project name 'a/b'"),
        ({}, "No API key configured"),
    ],
)
def test_a_wandb_that_cannot_begin_is_one_line_and_the_stage_goes_on(tmp_path, environment, said):
    done = process(tmp_path, LIVE, "1", "1", **{"WANDB_PROJECT": "tldr"} | environment)
    assert done.code == 0
    (line,) = [line for line in done.errors.splitlines() if line.startswith("wandb cannot start")]
    assert said in line
    assert line.endswith("the stage continues without it")


@pytest.mark.parametrize("library", SETTINGS)
def test_a_library_that_is_missing_is_one_line_and_leaves_no_file(runs, monkeypatch, library):
    monkeypatch.setenv(SETTINGS[library], "x")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=f"pip install {library}"), tracked(TINY, "sft"):
        pass
    assert not runs.exists()


@pytest.mark.parametrize("call", ["log", "finish"])
def test_what_fails_there_is_one_line_and_the_stage_goes_on(runs, monkeypatch, capsys, call):
    class Failing:
        def __getattr__(self, name):
            def answer(*_, **__):
                if name == call:
                    raise ConnectionError("first line\nsecond line")

            return answer

    monkeypatch.setattr(trackers, "make_tracker", lambda *_: Failing())
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setenv("WANDB_PROJECT", "tldr")
    with open_stage(TINY, "sft") as run:
        for step in (1, 2):
            run.log(step, loss=1.0)
        run.finish({})
    assert [row["step"] for row in read_lines(run.folder / "metrics.jsonl")] == [1, 2]
    lines = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    reason = "first line"
    assert lines == [f"wandb: {call} failed ({reason}): the stage continues without it"]


def test_servers_addresses_and_folders_are_hidden_and_other_settings_are_not():
    overrides = ("judge.kind=openai", f"judge.base_url={SECRET}", "ppo.kl_coef=0.1")
    config = make_config("tiny", name="mine", overrides=overrides)
    config = config.changed(data=config.data.changed(source="/home/anna/posts"))
    config = config.changed(judge=config.judge.changed(model="https://key@host/model"))
    shown = public_settings(config)
    assert shown["judge"]["base_url"] == shown["judge"]["model"] == "set (not shown)"
    assert shown["overrides"] == [
        "judge.kind=openai",
        "judge.base_url=set (not shown)",
        "ppo.kl_coef=0.1",
    ]
    assert shown["data"]["source"] == "folder posts"
    assert (shown["ppo"]["kl_coef"], shown["seed"]) == (0.1, 44413)
    assert not any(one in json.dumps(shown) for one in ("pa55word", "example.org", "anna", "host"))


def test_a_folder_below_this_one_is_shown_by_its_last_name_and_ours_in_full(place):
    for folder in ("clients/acme", "runs/models/smollm2", "here"):
        (place / folder).mkdir(parents=True)
    seen = {
        ("base.tokenizer", "clients/acme"): "folder acme",
        ("base.checkpoint", "EleutherAI/pythia-14m"): "EleutherAI/pythia-14m",
        ("base.checkpoint", "runs/models/smollm2"): "runs/models/smollm2",
        ("judge.model", "accounts/fireworks/models/x"): "accounts/fireworks/models/x",
        ("data.source", "clients/gone"): "folder gone",
        ("outputs.file", "clients/acme/out.jsonl"): "folder out.jsonl",
        ("outputs.file", "runs/tiny/seed1"): "runs/tiny/seed1",
        ("data.source", "here"): "here",
        ("data.prompt", f"r/{'x' * 5000}"): f"r/{'x' * 5000}",
    }
    assert {(name, text): public_value(name, text) for name, text in seen} == seen
    own = ("base.checkpoint=clients/acme", "base.tokenizer=")
    config = make_config("tiny", name="mine", overrides=own)
    assert "clients" not in json.dumps(public_settings(config))
    assert model_cards.base_model_id(config) == ""
