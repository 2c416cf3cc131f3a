"""A run's folder: finished or absent, never half; nothing opened that is not what it was."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from stages.config.command_line import config_from_arguments, make_config
from stages.config.config import Config, UserError
from stages.runs import run as runs_module
from stages.runs.files import file_hash, hash_files, read_lines, write_json
from stages.runs.machine import code_version
from stages.runs.manifest import make_command, read_manifest, stage_folder, why_not
from stages.runs.run import Run, open_stage
from tests.lib.asserts import refusal_of

TINY = make_config("tiny")
ROOT = Path(__file__).parents[1]


def finish(config: Config, stage: str, *needs: str, text: str = "made") -> Path:
    """A finished stage with one output file."""
    with open_stage(config, stage) as run:
        for need in needs:
            run.require(need)
        (run.partial / "out.txt").write_text(text)
        run.finish({"accuracy": 0.5})
    return run.folder


def refusal(config: Config, stage: str) -> str:
    """The one line with which a stage of this config is not opened as an input."""
    return refusal_of(Run(config, "ppo").require, stage)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# -- a stage under way and finished ----------------------------------------------------------------


def test_a_stage_is_in_its_place_only_when_it_has_finished(runs):
    folder = runs / "tiny" / "seed44413" / "sft"
    row = {"text": "caf\u00e9\u2028two\u2029three\x85four"}  # one line of the file
    with open_stage(TINY, "sft") as run:
        assert json.loads((run.partial / "config.json").read_text())["preset"] == "tiny"
        run.log(1, **{"loss/train": 2.5})
        run.append("samples.jsonl", row)
        assert not folder.exists()
        assert not (run.partial / "manifest.json").exists()
        run.finish({"rouge": 0.25})
    assert everything(runs) == [
        f"tiny/seed44413/sft/{name}"
        for name in ("config.json", "manifest.json", "metrics.jsonl", "samples.jsonl")
    ]
    assert read_lines(folder / "metrics.jsonl") == [{"step": 1, "loss/train": 2.5}]
    assert read_lines(folder / "samples.jsonl") == [row]


def test_the_manifest_is_written_after_every_other_file_and_hashes_them(runs, monkeypatch):
    seen = []
    whole = write_json

    def watched(path, value):
        if path.name == "manifest.json":
            seen.extend([everything(path.parent), (path.parents[1] / "sft").exists()])
        whole(path, value)

    monkeypatch.setattr(runs_module, "write_json", watched)
    folder = finish(TINY, "sft")
    assert seen == [["attempt.json", "config.json", "out.txt"], False]
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest["outputs"] == {
        name: file_hash(folder / name) for name in ("config.json", "out.txt")
    }
    assert (manifest["stage"], manifest["name"], manifest["seed"]) == ("sft", "tiny", 44413)
    assert manifest["results"] == {"accuracy": 0.5}
    for (
        key
    ) in "settings_hash code_version seconds peak_memory_gib device processor versions".split():
        assert manifest[key] not in (None, ""), key
    assert manifest["versions"]["torch"]
    monkeypatch.setattr(runs_module, "processor", lambda: {"model": "another one"})
    assert why_not(TINY, "sft") is None


def test_an_interrupted_stage_replaces_nothing_and_the_next_one_starts_afresh(runs):
    folder = finish(TINY, "sft", text="first")
    before = hash_files(folder)
    with pytest.raises(FileNotFoundError), open_stage(TINY, "sft") as run:
        (run.partial / "nothing.txt").read_text()
    (folder.with_name("sft.partial") / "half.txt").write_text("half")
    assert hash_files(folder) == before
    finish(TINY, "sft", text="second")
    assert everything(folder) == ["config.json", "manifest.json", "out.txt"]
    assert (folder / "out.txt").read_text() == "second"
    assert not (folder.parent / "sft.partial").exists()


def test_a_user_error_leaves_no_file_and_no_folder(runs):
    with pytest.raises(UserError, match="base is missing"), open_stage(TINY, "sft") as run:
        run.require("base")
    assert not runs.exists()


def interrupt(config: Config, stage: str, error: BaseException) -> Path:
    """A stage that stops in the middle, with something to go on from."""
    with suppress(type(error)), open_stage(config, stage) as run:
        run.resume.mkdir(exist_ok=True)
        (run.resume / "kept.txt").write_text("half")
        raise error
    return run.partial


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bad"), UserError("bad")])
def test_what_is_half_done_is_kept_for_the_next_try_and_gone_when_it_has_finished(runs, error):
    partial = interrupt(TINY, "sft", error)
    assert (partial / "failed.json").exists() == (not isinstance(error, KeyboardInterrupt))
    with open_stage(TINY, "sft") as run:
        assert (run.resume / "kept.txt").read_text() == "half"
        assert not (partial / "failed.json").exists()
        run.finish({})
    assert everything(run.folder) == ["config.json", "manifest.json"]


def test_what_is_half_done_with_other_settings_or_inputs_moves_aside(runs):
    interrupt(TINY, "sft", KeyboardInterrupt())
    with open_stage(TINY.changed(sft=TINY.sft.changed(epochs=7)), "sft") as run:
        assert not run.resume.exists()
        run.resume.mkdir()
    finish(TINY, "base")
    with open_stage(TINY.changed(sft=TINY.sft.changed(epochs=7)), "sft") as run:
        assert not run.resume.exists()
    aside = run.folder.parent / "aside"
    assert sorted(path.name for path in aside.iterdir()) == ["sft.partial-1", "sft.partial-2"]


def test_a_stage_killed_between_its_manifest_and_its_name_is_put_in_place(runs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs_module, "put_in_place", lambda config, stage: None)
        finish(TINY, "sft")
    assert read_manifest(stage_folder(TINY, "sft")) is None
    runs_module.put_in_place(TINY, "sft")
    assert read_manifest(stage_folder(TINY, "sft")) is not None
    Run(TINY, "ppo").require("sft")


def test_one_stage_is_not_made_twice_at_once(runs):
    with open_stage(TINY, "sft"):
        named = f"already under way: process {os.getpid()} on "
        with pytest.raises(UserError, match=named), open_stage(TINY, "sft"):
            pass
        with open_stage(TINY.changed(seed=1), "sft"), open_stage(TINY, "rm"):
            pass
    finish(TINY, "sft")


def test_the_lock_of_a_dead_process_is_taken_over(runs):
    code = (
        "import os, signal, sys; from stages.config.command_line import make_config;"
        "from stages.runs.run import open_stage; from stages.config import config;"
        "from pathlib import Path;"
        "config.RUNS = Path(sys.argv[1]); opened = open_stage(make_config('tiny'), 'sft');"
        "opened.__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(runs)], cwd=ROOT, check=False)
    assert found.returncode == -signal.SIGKILL
    lock = runs / "tiny" / "seed44413" / ".sft.lock"
    assert json.loads(lock.read_text())["pid"] > 0
    finish(TINY, "sft")
    assert not lock.exists()


def test_only_the_main_process_writes(runs):
    with open_stage(TINY, "sft", main=False) as run:
        run.log(1, loss=1.0)
        run.append("samples.jsonl", {})
        run.finish({})
    assert not runs.exists()


def test_the_first_stages_of_an_ablation_lie_with_its_upstream(runs):
    folder = finish(TINY, "sft")
    ablation = make_config("tiny", name="mine", upstream="tiny")
    with pytest.raises(UserError, match="belongs to tiny"), open_stage(ablation, "sft"):
        pass
    assert not (runs / "mine").exists()
    assert Run(ablation, "ppo").require("sft") == folder
    assert stage_folder(ablation, "ppo") == runs / "mine" / "seed44413" / "ppo"


# -- opening what another stage made ---------------------------------------------------------------


def test_a_changed_or_removed_output_is_found(runs):
    folder = finish(TINY, "sft")
    (folder / "out.txt").write_text("tampered")
    assert "out.txt" in refusal(TINY, "sft")
    (folder / "out.txt").unlink()
    text = refusal(TINY, "sft")
    assert "out.txt" in text
    assert "`make sft PRESET=tiny SEED=44413 REPLACE=1`, which moves the old one aside" in text


def test_other_settings_are_found_and_memory_knobs_are_not_settings(runs):
    finish(TINY, "sft")
    other = TINY.changed(sft=TINY.sft.changed(epochs=7))
    assert "other settings (sft.epochs: made with 2, asked 7)" in refusal(other, "sft")
    assert "another NAME, or run `make sft" in refusal(other, "sft")
    one_thread = TINY.changed(memory=TINY.memory.changed(cpu_threads=1))
    assert "memory.cpu_threads: made with 2, asked 1" in refusal(one_thread, "sft")
    assert "missing" in refusal(TINY.changed(seed=1), "sft")
    frugal = TINY.changed(memory=TINY.memory.changed(microbatch_size=1))
    Run(frugal, "ppo").require("sft")


def test_what_is_replaced_moves_aside_and_an_equal_one_is_not_kept_twice(runs):
    folder = finish(TINY, "sft", text="first")
    finish(TINY, "sft", text="second")
    finish(TINY, "sft", text="second")
    finish(TINY, "sft", text="third")
    aside = folder.parent / "aside"
    kept = {path.name: (path / "out.txt").read_text() for path in aside.iterdir()}
    assert kept == {"sft-1": "first", "sft-2": "second"}


# -- the command to type ---------------------------------------------------------------------------


def typed(command: str) -> tuple[str, Config]:
    """The goal of a make command, and the config that it asks for, as the Makefile passes it on."""
    make, goal, *words = shlex.split(command)
    assert make == "make"
    given = dict(word.split("=", 1) for word in words)
    own = given["NAME"] if given.get("NAME", given["PRESET"]) != given["PRESET"] else ""
    return goal, make_config(
        given["PRESET"],
        seed=int(given["SEED"]),
        name=own,
        data=given.get("DATA", ""),
        tokenizer=given.get("TOKENIZER", ""),
        upstream=given.get("UPSTREAM", ""),
        overrides=tuple(given.get("SET", "").split()),
    )


def test_the_command_makes_the_very_run_that_needs_the_stage(tmp_path):
    folder = tmp_path / "my posts"
    folder.mkdir()
    for config in (
        make_config("tiny", seed=3),
        make_config("tiny", name="another"),
        make_config("posts", data=str(folder), tokenizer="a tokenizer"),
        make_config("tiny", name="mine", overrides=("ppo.lam=0.5", "ppo.whiten_rewards=true")),
    ):
        for stage, goal in {"base": "data", "sft": "sft", "ppo": "ppo", "judge": "eval"}.items():
            assert typed(make_command(config, stage)) == (goal, config)


def test_the_command_for_an_upstream_stage_makes_the_upstream_run(runs):
    finish(TINY, "base")
    ablation = make_config("tiny", name="mine", upstream="tiny", overrides=("ppo.lam=0.5",))
    assert typed(make_command(ablation, "sft")) == ("sft", TINY)
    assert typed(make_command(ablation, "ppo")) == ("ppo", ablation)
    of_rm = make_config("tiny", name="mine", upstream="tiny", overrides=("rm.epochs=3",))
    assert typed(make_command(of_rm, "sft")) == ("sft", TINY)
    assert typed(make_command(of_rm, "rm")) == ("rm", of_rm)


def test_the_command_for_a_stage_of_a_changed_upstream_leaves_its_settings_to_its_record(runs):
    upstream = make_config("tiny", name="other", overrides=("sft.epochs=3",))
    finish(upstream, "base")
    ablation = make_config("tiny", name="mine", upstream="other", overrides=("ppo.lam=0.5",))
    assert make_command(ablation, "sft") == "make sft SEED=44413 NAME=other"
    args = ["--name", "other", "--seed", "44413"]
    assert config_from_arguments(args, "") == upstream


# -- files and progress ----------------------------------------------------------------------------


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": "\u00e9"})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"x": "\u00e9"}
    assert everything(tmp_path) == ["a.json"]


def test_a_hash_depends_on_every_byte_and_covers_subfolders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"abc")
    # The well-known digest of "abc" (FIPS 180).
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_files(tmp_path) == {"a/one": digest}


def test_a_changed_file_makes_the_code_dirty_and_a_generated_report_does_not(place):
    assert code_version() == "unknown"
    (place / "reports" / "generated").mkdir(parents=True)
    for name in ("code.py", "reports/generated/page.md", "reports/page.py"):
        (place / name).write_text("1")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    clean = code_version()
    assert len(clean) == 10
    (place / "reports/generated/page.md").write_text("2")
    assert code_version() == clean
    (place / "reports/page.py").write_text("2")
    assert code_version() == f"{clean}-dirty"


def test_a_manifest_names_the_code_that_began_the_stage(runs, monkeypatch):
    """An edit or a commit while a stage ran made it the new code's."""
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "begun")
    with open_stage(TINY, "sft") as run:
        monkeypatch.setattr("stages.runs.run.code_version", lambda: "edited")
        run.finish({})
    assert (read_manifest(run.folder) or {})["code_version"] == "begun"
