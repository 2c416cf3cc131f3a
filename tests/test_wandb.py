"""The mirror at wandb: one run a seed, told stage by stage; nothing of this machine in it.

Walked with the real wandb in its offline mode, in processes of their own: what `wandb sync` would
send is read back from the files that it wrote (`tests/wandb_files.py`).
"""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from reports.sharing import cards
from stages.driving.mirror import MOST_ROWS, Tracker, headline, note_for, open_mirrors, results_of
from stages.finished import read_manifest
from stages.running.files import read_lines, write_json
from stages.runs import mirrored_by, open_stage
from stages.settings.checks import UserError
from stages.settings.command_line import make_config
from stages.settings.config import public_settings, public_value
from tests.resuming import ARGUMENTS
from tests.wandb_files import all_sent

ROOT = Path(__file__).parents[1]
TINY = make_config("tiny")
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed here"
)
SECRET = "http://pa55word.judge.example.org/v1"
OFFLINE = {"WANDB_MODE": "offline", "WANDB_PROJECT": "tldr", "WANDB_TAGS": "mine"}


def process(folder, code, *words, **environment):
    """A process of its own: its exit status and what it says."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
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


# -- a run that was made without wandb, and is shown from its judging on ---------------------------

JUDGED = """
import sys
from eval import controls, win_rate
from reports import run_page
for module in (controls, win_rate, run_page):
    module.main(sys.argv[1:])
"""
SHOWN = ("controls", "win_rate", "report")
NAME = "resumed-seed44413"


@pytest.fixture(scope="module")
def told(whole, tmp_path_factory):
    """A small run whose models were made without wandb; what each later stage would send."""
    folder = tmp_path_factory.mktemp("told")
    seed = folder / "runs/resumed/seed44413"
    shutil.copytree(whole, seed, copy_function=os.link)
    done = process(folder, JUDGED, *ARGUMENTS, f"judge.base_url={SECRET}", **OFFLINE)
    assert done.code == 0, done.errors
    sent = dict(zip(SHOWN, all_sent(folder), strict=True))
    return SimpleNamespace(folder=folder, seed=seed, sent=sent, first=sent["controls"])


def result(told, stage):
    return (read_manifest(told.seed / stage) or {})["results"]


def rows_of(table):
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


@pytest.mark.walk
@needs_wandb
def test_all_stages_of_a_seed_are_one_wandb_run_with_group_and_tags(told):
    runs = [one.run for one in told.sent.values()]
    (number,) = {run.run_id for run in runs}
    assert number.startswith("resumed-44413-")
    assert json.loads((told.seed / "wandb.json").read_text())["id"] == number
    assert {run.display_name for run in runs} == {NAME}
    assert {run.run_group for run in runs} == {"resumed"}
    assert all(run.resume for run in runs)
    assert [one.exit_code for one in told.sent.values()] == [0, 0, 0]
    tags = ["tiny", "sft", "rm", "normalize", "ppo", "dpo", "judge:facts", "mine"]
    assert list(runs[-1].tags) == tags


@pytest.mark.walk
@needs_wandb
def test_win_rates_and_results_are_in_the_summary(told):
    found = result(told, "win_rate/facts")
    summary = told.sent["win_rate"].summary
    for policy, row in found["policies"].items():
        assert summary[f"win_rate/{policy}"] == row["win_rate"]
        assert summary[f"win_rate/{policy}_low"] == row["low"]
    assert summary["win_rate/ppo-sft"] == found["differences"]["ppo-sft"]["estimate"]
    posts = result(told, "controls/facts")["posts"]
    assert told.first.summary["results/controls/facts/posts"] == posts


@pytest.mark.walk
@needs_wandb
def test_judged_summaries_are_a_table(told):
    (path,) = (told.sent["win_rate"].folder / "files/media/table").rglob("texts_*.json")
    scores = read_lines(told.seed / "win_rate/facts/post_scores.jsonl")
    expected = {(row["policy"], row["id"]): row["score"] for row in scores}
    rows = rows_of(json.loads(path.read_text()))
    assert {(row["policy"], row["id"]): row["win"] for row in rows} == expected
    written = read_lines(told.seed / "summaries/ppo.jsonl")
    shown = {row["id"]: row for row in rows if row["policy"] == "ppo"}
    assert written[0].items() <= shown[written[0]["id"]].items()
    assert len(rows) <= 3 * MOST_ROWS


@pytest.mark.walk
@needs_wandb
def test_no_host_folder_key_or_environment_is_sent(told):
    for name, one in told.sent.items():
        assert one.config["judge"]["base_url"] == "set (not shown)"
        assert "judge.base_url=set (not shown)" in one.config["overrides"]
        assert one.run.host == "not shown"
        files = [path for path in (one.folder / "files").rglob("*") if path.is_file()]
        # Beside tables: the libraries' names and versions.
        assert {path.name for path in files if path.parent.name == "files"} == {"requirements.txt"}
        texts = [one.run.SerializeToString(), json.dumps([one.history, one.summary]).encode()]
        host = re.compile(rb"\b" + re.escape(socket.gethostname().encode()) + rb"\b")
        assert not any(host.search(text) for text in texts)
        texts += [path.read_bytes() for path in files]
        for secret in ("pa55word", "judge.example.org", "sk-of-a-judge", str(told.folder)):
            assert not any(secret.encode() in text for text in texts), (name, secret)


# -- a stage under way -----------------------------------------------------------------------------

LIVE = """
import sys
from stages.driving.mirror import open_mirrors
from stages.runs import mirrored_by, open_stage
from stages.settings.checks import UserError, fail
from stages.settings.command_line import make_config
stage, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    with mirrored_by(open_mirrors), open_stage(make_config("tiny"), stage) as run:
        run.resume.mkdir(exist_ok=True)
        for step in range(first, last + 1):
            run.log(step, **{"loss/train": 1 / step})
            run.append("samples.jsonl", {"step": step, "query": "q", "response": "r"})
        if "fail" in sys.argv:
            raise RuntimeError("died")
        run.finish({"loss": 0.5})
except UserError as error:
    fail(error)
"""


@pytest.mark.walk
@needs_wandb
def test_a_stage_that_goes_on_after_a_failure_goes_on_in_the_same_wandb_run(tmp_path):
    assert process(tmp_path, LIVE, "sft", "1", "3", "fail", **OFFLINE).code == 1
    assert process(tmp_path, LIVE, "sft", "3", "4", **OFFLINE).code == 0
    assert process(tmp_path, LIVE, "ppo", "1", "2", **OFFLINE).code == 0
    first, second, third = all_sent(tmp_path)
    assert len({one.run.run_id for one in (first, second, third)}) == 1
    assert steps(first, "sft") == [1, 2, 3]
    assert steps(second, "sft") == [3, 4]
    assert steps(third, "ppo") == [1, 2]
    assert not third.rows("sft")
    assert third.axes["ppo/*"] == "ppo/step"
    assert [one.exit_code for one in (first, second, third)] == [1, 0, 0]
    paths = sorted((first.folder / "files/media/table/sft").glob("samples_*.json"))
    tables = [rows_of(json.loads(path.read_text())) for path in paths]
    expected = [[{"step": step, "query": "q", "response": "r"}] for step in (1, 2)]
    assert sorted(tables, key=str) == expected  # the third comes with the next step, or at the end
    assert len(list((second.folder / "files/media/table/sft").glob("samples_*.json"))) == 2


def steps(sent, stage):
    return [row["step"] for row in sent.rows(stage) if "loss/train" in row]


def test_what_is_made_anew_begins_a_wandb_run_of_its_own(runs):
    def note(stage, attempt, finished=False):
        made = note_for(TINY, stage, attempt)
        made["begun"] |= {stage: "finished"} if finished else {}
        (runs / "tiny/seed44413").mkdir(parents=True, exist_ok=True)
        write_json(runs / "tiny/seed44413/wandb.json", made)
        return made["id"]

    first = note("sft", "a")
    assert note("sft", "a", finished=True) == first  # went on after an interruption
    assert note("rm", "b") == first
    assert note("judge", "c", finished=True) == first
    assert note("judge", "d") == first  # what has no curves replaces its results
    again = note("sft", "a")  # REPLACE=1
    assert again != first
    assert note("sft", "e") != again  # an interrupted try with other settings
    assert note_for(replace(TINY, seed=7), "sft", "a")["id"].startswith("tiny-7-")


# -- what goes wrong -------------------------------------------------------------------------------


def test_asking_for_wandb_without_it_is_refused_and_leaves_no_file(runs, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "tldr")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with mirrored_by(open_mirrors), pytest.raises(UserError, match="pip install wandb"):
        open_stage(TINY, "sft").__enter__()
    assert not runs.exists()


@pytest.mark.walk
@needs_wandb
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WANDB_MODE": "bogus"}, "'online', 'offline'"),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "a/b"}, "Invalid project name 'a/b'"),
        ({}, "No API key configured"),
        ({"WANDB_API_KEY": "short"}, "API key must have 40+ characters"),
    ],
)
def test_a_bad_setting_of_wandb_is_one_line_and_leaves_no_file(tmp_path, environment, said):
    done = process(tmp_path, LIVE, "sft", "1", "1", **{"WANDB_PROJECT": "tldr"} | environment)
    assert done.code == 2
    (line,) = [one for one in done.errors.splitlines() if one.startswith("error: ")]
    assert said in line
    assert line.endswith("Correct it, or set WANDB_MODE=offline, or unset WANDB_PROJECT")
    assert not (tmp_path / "runs").exists()


@pytest.mark.walk
@needs_wandb
def test_a_server_that_does_not_answer_leaves_the_stage_to_be_recorded_offline(tmp_path):
    code = "from stages.driving import mirror; mirror.INIT_SECONDS = 1.0\n" + LIVE
    away = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    done = process(tmp_path, code, "sft", "1", "2", WANDB_PROJECT="tldr", **away)
    assert done.code == 0, done.errors
    assert "it does not answer (Failed to get resume status" in done.errors
    assert "sends it later" in done.errors
    (one,) = [one for one in all_sent(tmp_path) if one.history]
    assert [row["loss/train"] for row in one.rows("sft") if "loss/train" in row] == [1, 0.5]


class Failing:
    """A client of wandb that fails after the beginning."""

    def define_metric(self, *_, **__):
        pass

    def log(self, _):
        raise ConnectionError("first line\nsecond line")

    def finish(self, exit_code):
        raise ConnectionError("gone")

    sync_dir = "wandb/run-1"


def test_a_failure_of_wandb_is_said_and_the_stage_goes_on(runs, capsys):
    def failing(config, stage, attempt):
        return [Tracker(config, stage, Failing(), note_for(config, stage, attempt))]

    with mirrored_by(failing), open_stage(TINY, "sft") as run:
        for step in (1, 2):
            run.log(step, loss=1.0)
        run.finish({})
    assert [row["step"] for row in read_lines(run.folder / "metrics.jsonl")] == [1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "wandb: logging failed (first line second line): the stage goes on without wandb",
        "wandb: sending failed (gone): `wandb sync wandb/run-1`",
    ]


# -- what is shown, without wandb ------------------------------------------------------------------


def test_servers_addresses_and_folders_are_hidden_and_other_settings_are_not():
    overrides = ("judge.kind=openai", f"judge.base_url={SECRET}", "ppo.kl_coef=0.1")
    config = make_config("tiny", name="mine", overrides=overrides)
    config = replace(config, data=replace(config.data, source="/home/anna/posts"))
    config = replace(config, judge=replace(config.judge, model="https://key@host/model"))
    shown = public_settings(config)
    assert shown["judge"]["base_url"] == shown["judge"]["model"] == "set (not shown)"
    assert shown["overrides"][1:] == ["judge.base_url=set (not shown)", "ppo.kl_coef=0.1"]
    assert shown["data"]["source"] == "folder posts"
    assert (shown["ppo"]["kl_coef"], shown["seed"]) == (0.1, 44413)
    assert not any(one in json.dumps(shown) for one in ("pa55word", "example.org", "anna", "host"))


def test_a_folder_below_this_one_is_shown_by_its_last_name_and_ours_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("clients/acme", "runs/models/smollm2", "here"):
        (tmp_path / folder).mkdir(parents=True)
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
    assert cards.base_id(config) == ""


def test_a_rate_that_may_not_be_given_is_not_in_the_summary():
    def policy(rate, unjudged):
        length = {"length_controlled": {"estimate": None}}
        bounds = {"low": rate - 0.1, "high": rate + 0.1}
        return {"win_rate": rate, "unjudged": unjudged, "statistics": length} | bounds

    policies = {"sft": policy(0.4, 0.021), "ppo": policy(0.6, 0.0), "dpo": policy(0.5, 0.02)}
    pairs = {one: {"estimate": 0.1} for one in ("ppo-sft", "dpo-ppo")}
    found = headline(TINY, {"policies": policies, "differences": pairs})
    assert set(found) == {
        *("judge", "win_rate/dpo-ppo"),
        *(f"win_rate/{one}{end}" for one in ("ppo", "dpo") for end in ("", "_low", "_high")),
    }


def test_results_that_are_texts_stay_here(runs):
    with open_stage(TINY, "base") as run:
        run.finish({"source": "/home/anna/posts", "parameters": 7, "rows": {"sft": {"rows": 3}}})
    found = results_of(TINY, "base")
    assert found["results/base/parameters"] == 7
    assert found["results/base/rows/sft/rows"] == 3
    assert all(isinstance(value, int | float) for value in found.values())
