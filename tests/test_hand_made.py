"""Folders that no run wrote end in one line wherever runs are looked for: never in a traceback."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest

from eval import win_rate
from eval.judge import Task, kept_judgements
from reports import scaling_page
from reports.parts import collect
from reports.sharing.status import status
from stages.config.command_line import make_config, recorded_config
from stages.config.config import UserError
from stages.rl.algorithms import ALGORITHMS
from stages.runs import hub
from stages.runs.files import KeptRows, read_json, write_json
from stages.runs.inputs import Source
from stages.runs.machine import start_of
from stages.runs.manifest import why_not
from stages.runs.progress import say_if_killed
from stages.runs.run import holder_of
from tests.lib.asserts import refused_by
from tests.lib.fabricated_runs import fabricate

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
def test_status_and_pages_pass_over_settings_that_no_run_recorded(runs, capsys, config):
    folder = hand_made(runs, config=config)
    assert recorded_config(folder) is None
    assert any(line.startswith("mine 44413") for line in status())
    with pytest.raises(UserError, match="no finished run in"):
        collect.find_runs("mine")
    assert "no finished run in" in refused_by(capsys, scaling_page.main, "--names", "mine")


def test_a_stage_that_needs_a_hand_made_one_says_so_in_one_line(runs, capsys):
    hand_made(runs)
    config = make_config("tiny", name="mine")
    with pytest.raises(UserError, match="is no manifest of this version: move /"):
        why_not(config, "summaries")
    line = refused_by(capsys, win_rate.main, "--preset", "tiny", "--name", "mine")
    assert "summaries/manifest.json is no manifest of this version" in line


def test_status_shows_a_record_with_a_value_of_another_type_and_goes_on(runs):
    fabricate(make_config("tiny"))
    path = runs / "tiny/seed44413/sft/config.json"
    write_json(path, read_json(path) | {"seed": "one"})
    lines = status()
    assert any(line.startswith("tiny 44413") and " fail " in line for line in lines)
    assert "seed must be of type int, not 'one'" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("line", ["[1]", "5", '{"policy": "a"}', '{"verdict": "nobody"}'])
def test_verdicts_that_no_judge_wrote_are_asked_for_again(tmp_path, line):
    row = {"id": "p", "query": "q", "summary": "s", "reference": "r"}
    good = {"policy": "a", "id": "p", "order": "policy_first", "verdict": "tie"}
    path = tmp_path / "judgements.jsonl"
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    orders = ("policy_first", "reference_first")
    tasks = [Task(policy="a", row=row, order=order) for order in orders]
    assert kept_judgements(path, tasks) == [good]
    assert path.read_text() == json.dumps(good) + "\n"


def test_kept_measurements_that_no_stage_wrote_are_named(tmp_path):
    kept = KeptRows(tmp_path, "scores", 0)
    kept.add([1], [0.5])
    assert KeptRows(tmp_path, "scores", 0).known == {1: 0.5}
    kept.path.write_text('{"rows": 5}\n')
    with pytest.raises(UserError, match=r"scores\.0\.jsonl holds a line that no stage wrote"):
        KeptRows(tmp_path, "scores", 0)


def test_a_process_that_nobody_waits_for_holds_no_lock(tmp_path):
    lock = tmp_path / ".ppo.lock"
    here = {"pid": os.getpid(), "started": start_of(os.getpid()), "host": platform.node()}
    lock.write_text(json.dumps(here))
    assert holder_of(lock) is not None
    lock.write_text(json.dumps(here | {"started": "7"}))  # its number was used before
    assert holder_of(lock) is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    lock.write_text(json.dumps(here | {"pid": ended.pid, "started": start_of(ended.pid)}))
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert holder_of(lock) is None
    ended.wait()


def test_a_stage_that_was_killed_is_named_and_one_that_failed_has_said_so(capsys):
    say_if_killed("ppo", 137)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: stage ppo was killed (SIGKILL), by somebody or for lack of mem")
    for status_of_stage in (0, 1, 2, 130, 143):
        say_if_killed("ppo", status_of_stage)
    assert capsys.readouterr().err == ""


def test_a_run_of_a_preset_that_is_gone_is_one_line(runs):
    fabricate(make_config("tiny", name="old"))
    path = runs / "old/seed44413/sft/config.json"
    write_json(path, json.loads(path.read_text()) | {"preset": "tiny-huge"})
    with pytest.raises(UserError, match=r"sft/config.json: unknown preset 'tiny-huge'"):
        recorded_config(path.parent)


# Settings that PPO got after runs had been recorded.
NEWER = (
    "kl_correction",
    "kl_target",
    "kl_horizon",
    "entropy_coef",
    "critic_max_grad_norm",
    "lam_value",
    "ptx_coef",
)


@pytest.fixture
def older_ppo(runs):
    """PPO's folder of a finished run that was recorded without the newer settings."""
    fabricate(make_config("tiny"))
    folder = runs / "tiny/seed44413/ppo"
    manifest = read_json(folder / "manifest.json")
    record = read_json(folder / "config.json")
    for name in NEWER:
        del manifest["settings"]["ppo"][name], record["ppo"][name]
    manifest["settings_hash"] = "older"
    write_json(folder / "manifest.json", manifest)
    write_json(folder / "config.json", record)
    return folder


def test_a_run_recorded_without_newer_settings_loads_and_counts_as_the_same(older_ppo):
    config = make_config("tiny")
    assert recorded_config(older_ppo) == config
    assert why_not(config, "ppo") is None


def test_a_newer_setting_that_has_an_effect_makes_another_run(older_ppo):
    config = replace(make_config("tiny"), ppo=replace(make_config("tiny").ppo, kl_target=6.0))
    assert "ppo.kl_target: made with nothing, asked 6.0" in str(why_not(config, "ppo"))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_a_run_recorded_before_an_algorithm_was_added_has_its_defaults(runs, algorithm):
    fabricate(make_config("tiny"))
    folder = runs / "tiny/seed44413/ppo"
    record = read_json(folder / "config.json")
    del record[algorithm]
    write_json(folder / "config.json", record)
    read = recorded_config(folder)
    assert getattr(read, algorithm) == ALGORITHMS[algorithm].settings()
    assert read is not None
    assert read.ppo == make_config("tiny").ppo


def test_a_setting_that_a_record_lacks_had_its_default(runs):
    config = make_config("tiny", name="older", overrides=("lora.rank=2",))
    fabricate(config)
    folder = runs / "older/seed44413/sft"
    manifest, record = read_json(folder / "manifest.json"), read_json(folder / "config.json")
    del manifest["settings"]["lora"]["target_modules"], record["lora"]["target_modules"]
    manifest["settings_hash"] = "older"
    write_json(folder / "manifest.json", manifest)
    write_json(folder / "config.json", record)

    assert recorded_config(folder) == config
    assert why_not(config, "sft") is None

    overrides = ("lora.rank=2", "lora.target_modules=dense")
    other = make_config("tiny", name="older", overrides=overrides)
    assert "lora.target_modules: made with nothing, asked dense" in str(why_not(other, "sft"))


def test_of_two_runs_at_once_the_first_says_which_commit_both_use(runs):
    source = Source(setting="base.checkpoint", kind="model", name="me/model")
    assert [hub._record(source, commit) for commit in ("a" * 40, "b" * 40)] == ["a" * 40] * 2
