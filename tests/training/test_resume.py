"""Interrupted and resumed equals uninterrupted: weights, metrics and samples, bit for bit."""

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eval import judge, summaries
from eval.judges import protocol
from stages.config.command_line import make_config
from stages.runs import run as runs_module
from stages.runs.files import read_lines
from stages.runs.inputs import current_inputs
from stages.runs.manifest import ATTEMPT, read_manifest
from stages.runs.run import WHILE_WORKING, Run, open_stage
from stages.runs.staleness import find_problem
from stages.training.row_by_row import KeptRows
from tests.lib.make_stages import run_module
from tests.lib.resuming import (
    ARGUMENTS,
    OFTEN,
    SETTINGS,
    Killed,
    kill_at,
    rows_of,
    same,
    stage_modules,
)

TINY = make_config("tiny")
NOT_FROM_UPSTREAM = ("ppo.", "eval.", "memory.")
"""Sections whose settings an upstream does not supply."""


@pytest.mark.parametrize(
    ("stage", "step"), [("ppo", 1), ("ppo", 2), ("sft", 4), ("rm", 4), ("ppo", 4), ("dpo", 4)]
)
def test_training_that_was_killed_resumes_to_the_same_weights(
    whole, attempt, tmp_path, capsys, stage, step
):
    folder = attempt(stage)
    module = stage_modules()[stage]
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            run_module(module, OFTEN)
    assert not folder.exists()

    run_module(module, OFTEN)
    same(whole / stage, folder, tmp_path / "differences.json")
    resumed = f"{stage} resumes after update {step - 1}" in capsys.readouterr().err
    assert resumed == (step > 1)


@pytest.mark.parametrize("stage", ["sft", "rm", "normalize", "dpo", "summaries"])
def test_a_measurement_that_was_killed_continues_where_it_was(
    whole, attempt, tmp_path, monkeypatch, stage
):
    """Two kills, each after half a line was written."""
    folder = attempt(stage)
    module = stage_modules()[stage]
    parts_before_kills = [1, 3]
    kept_parts: list[tuple[str, tuple[int, ...]]] = []
    add = KeptRows.add

    def add_or_die(kept: KeptRows, rows: Any, measured: Any) -> None:
        if parts_before_kills and len(kept_parts) == parts_before_kills[0]:
            parts_before_kills.pop(0)
            with kept.path.open("a") as lines:
                lines.write('{"rows": [1, 2], "meas')
            raise Killed
        kept_parts.append((kept.path.name, tuple(rows)))
        add(kept, rows, measured)

    monkeypatch.setattr(KeptRows, "add", add_or_die)
    attempts = 1
    while not folder.exists():
        try:
            run_module(module, ARGUMENTS)
        except Killed:
            attempts += 1
    assert attempts >= 2
    same(whole / stage, folder, tmp_path / "differences.json")
    assert len(set(kept_parts)) == len(kept_parts)  # what was kept is not measured again


def test_judging_that_was_killed_asks_only_for_what_is_missing(
    whole, attempt, tmp_path, monkeypatch
):
    folder = attempt("judge")
    append = Run.append
    written: list[dict[str, Any]] = []

    def append_or_die(run: Run, name: str, row: dict[str, Any]) -> None:
        written.append(row)
        if len(written) == 8:
            with (run.partial / name).open("a") as lines:
                lines.write(json.dumps(row)[:20])
            raise Killed
        append(run, name, row)

    monkeypatch.setattr(Run, "append", append_or_die)
    with pytest.raises(Killed):
        run_module(judge, ARGUMENTS)

    asked: list[int] = []
    real = protocol.judge_all

    def judge_all(judge: Any, todo: Any, concurrency: int, earlier: Any) -> Any:
        asked.append(len(todo))
        return real(judge, todo, concurrency, earlier)

    monkeypatch.setattr("eval.judge.judge_all", judge_all)
    run_module(judge, ARGUMENTS)
    total = len(rows_of(whole / "judge/facts/judgements.jsonl"))
    assert asked == [total - 7]
    same(whole / "judge/facts", folder / "facts", tmp_path / "differences.json")


@pytest.mark.parametrize("step", [(shutil, "rmtree"), (Path, "unlink"), (Path, "rename")])
def test_a_kill_while_a_finished_stage_is_put_in_place_leaves_no_checkpoint(
    runs, monkeypatch, step
):
    def kill(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, open_stage(TINY, "sft") as run:
        patch.setattr(runs_module, "put_in_place", lambda config, stage: None)
        (run.resume / "checkpoint-0000001").mkdir(parents=True)
        run.finish({})
    with monkeypatch.context() as patch:
        patch.setattr(*step, kill)
        with pytest.raises(KeyboardInterrupt):
            runs_module.put_in_place(TINY, "sft")
    runs_module.put_in_place(TINY, "sft")
    assert find_problem(TINY, "sft") is None
    assert not {path.name for path in run.folder.iterdir()} & {*WHILE_WORKING}


def test_a_stage_behind_a_link_is_made_again_and_what_the_link_names_stays(runs):
    def make() -> Path:
        with open_stage(TINY, "sft") as run:
            run.finish({})
        return run.folder

    folder, elsewhere = make(), runs / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    make()
    assert find_problem(TINY, "sft") is None
    assert (elsewhere / "manifest.json").exists()


def test_a_file_that_a_full_disk_left_half_written_is_no_output(runs, monkeypatch):
    def write_half(path: Path, value: Any) -> None:
        path.with_name(f"{path.name}.partial").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    for is_full in (True, False):
        with suppress(OSError), monkeypatch.context() as patch, open_stage(TINY, "sft") as run:
            run.resume.mkdir(exist_ok=True)
            if is_full:
                (run.partial / "progress.json.partial").write_text("{")
                patch.setattr(runs_module, "write_json", write_half)
            run.finish({})
    assert find_problem(TINY, "sft") is None
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert [*manifest["outputs"]] == ["config.json"]


def test_the_time_of_earlier_attempts_counts_as_the_stages(runs):
    for seconds in (1000, 500):
        with suppress(KeyboardInterrupt), open_stage(TINY, "sft") as run:
            run.resume.mkdir(exist_ok=True)
            raise KeyboardInterrupt
        began = run.partial / ATTEMPT  # as if it had worked so long before it was killed
        then = began.stat().st_mtime - seconds
        os.utime(began, (then, then))
    with open_stage(TINY, "sft") as run:
        run.finish({})
    manifest = read_manifest(run.folder)
    assert manifest is not None
    assert manifest["seconds"] == pytest.approx(1500, abs=60)


@pytest.mark.parametrize("change", ["none", "damage", "code", "processor", "sft", "reward"])
def test_only_the_summaries_of_a_policy_that_joins_are_sampled(whole, attempt, monkeypatch, change):
    """Without a rival first; then with DPO, beside a run that made all at once."""
    folder = attempt("dpo").with_name("summaries")
    run_module(summaries, ARGUMENTS)
    before = {name: read_lines(folder / f"{name}.jsonl") for name in ("sft", "ppo", "ppo-3")}
    shutil.copytree(whole / "dpo", folder.with_name("dpo"))
    first = (read_manifest(folder) or {})["seconds"]
    if change == "damage":
        (folder / "ppo.jsonl").write_text("")
    elif change == "code":
        monkeypatch.setattr(summaries, "has_same_code", lambda *_: False)
    elif change == "processor":
        monkeypatch.setattr(summaries, "processor", lambda: {"model": "another"})
    elif change == "sft":
        other = {"sft": "other weights"}
        monkeypatch.setattr(summaries, "current_inputs", lambda *of: current_inputs(*of) | other)
    elif change == "reward":
        edited = {"reward.function": "edited"}
        monkeypatch.setattr(summaries, "current_inputs", lambda *of: current_inputs(*of) | edited)
    names: list[str] = []

    def sample(evaluation, policy):
        names.append(policy)
        return sample_summaries(evaluation, policy)

    sample_summaries = summaries.sample_summaries
    monkeypatch.setattr(summaries, "sample_summaries", sample)
    run_module(summaries, ARGUMENTS)
    assert names == (["dpo"] if change == "none" else ["sft", "ppo", "dpo", "ppo-3"])
    manifest, at_once = (read_manifest(of) or {} for of in (folder, whole / "summaries"))
    assert manifest["inputs"] == at_once["inputs"]
    assert list(manifest["results"]["policies"]) == ["sft", "ppo", "dpo", "ppo-3"]
    for name in ("sft", "ppo", "dpo", "ppo-3"):
        rows = read_lines(folder / f"{name}.jsonl")
        assert name == "dpo" or change != "none" or rows == before[name]
        for row, other_row in zip(rows, read_lines(whole / f"summaries/{name}.jsonl"), strict=True):
            assert row["summary"] == other_row["summary"]
            assert row["score"] == pytest.approx(other_row["score"], abs=1e-4)
    if change == "none":
        assert manifest["seconds"] >= first


@pytest.mark.parametrize("change", ["lam", "temperature", "made later"])
def test_summaries_of_sft_and_its_best_are_the_upstreams(attempt, monkeypatch, change):
    """Unless the best were sampled at another temperature: that is PPO's. The upstream may make
    them after a first attempt was killed that had sampled and scored its own.
    """
    upstreams = attempt("dpo").with_name("summaries")
    of_run = ["--preset", "tiny", "--name", "other", "--upstream", "resumed"]
    setting = "temperature" if change == "temperature" else "lam"
    of_run += ["--set", "eval.best_of=2", f"ppo.{setting}=0.8"]
    of_run += [setting for setting in SETTINGS if setting.startswith(NOT_FROM_UPSTREAM)]
    run_module(stage_modules()["ppo"], of_run)
    if change == "made later":
        with monkeypatch.context() as patch:
            patch.setattr(summaries, "kl_from_sft", killed)
            with pytest.raises(Killed):
                run_module(summaries, of_run)
    run_module(summaries, [*ARGUMENTS, "eval.best_of=2"])
    names: list[str] = []

    def sample(evaluation, policy):
        names.append(policy)
        return sample_summaries(evaluation, policy)

    sample_summaries = summaries.sample_summaries
    monkeypatch.setattr(summaries, "sample_summaries", sample)
    run_module(summaries, of_run)
    from_there = change != "temperature"
    assert names == ([] if from_there else ["sft"]) + ["ppo", "ppo-3"]
    own = Path("runs/other/seed44413/summaries")
    assert read_lines(own / "sft.jsonl") == read_lines(upstreams / "sft.jsonl")
    alike = read_lines(own / "best-of-2.jsonl") == read_lines(upstreams / "best-of-2.jsonl")
    assert alike == from_there
    results = (read_manifest(own) or {})["results"]["policies"]
    assert list(results) == ["sft", "ppo", "ppo-3", "best-of-2"]


def killed(*_):
    raise Killed
