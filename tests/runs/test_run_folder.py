"""A stage's folder: finished or absent, never half-written, and written by one process."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stages.config.command_line import make_config
from stages.config.errors import UserError
from stages.runs import locks
from stages.runs import run as runs_module
from stages.runs.code import code_version
from stages.runs.files import file_hash, hash_files, read_lines, write_json
from stages.runs.locks import held, is_under_way
from stages.runs.manifest import lock_of, read_manifest, stage_folder
from stages.runs.run import Run, open_stage
from stages.runs.staleness import find_problem
from tests.lib.asserts import refusal_of
from tests.lib.fake_stages import finish_alone as finish

TINY = make_config("tiny")
ROOT = Path(__file__).parents[2]


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# -- a stage under way and finished ----------------------------------------------------------------


def test_a_stage_is_in_its_place_only_when_it_has_finished(runs):
    folder = runs / "tiny" / "seed44413" / "sft"
    row = {"text": "caf\u00e9\u2028two\u2029three\x85four"}  # One line of the file.
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


def test_the_manifest_is_written_after_every_other_file(runs, monkeypatch):
    files_before = []
    is_finished_before = []

    def watched(path, value):
        if path.name == "manifest.json":
            files_before.extend(everything(path.parent))
            is_finished_before.append((path.parents[1] / "sft").exists())
        write_json(path, value)

    monkeypatch.setattr(runs_module, "write_json", watched)
    finish(TINY, "sft")
    assert files_before == ["attempt.json", "config.json", "out.txt"]
    assert is_finished_before == [False]


def test_the_manifest_hashes_the_outputs_and_names_what_the_stage_ran_with(runs):
    folder = finish(TINY, "sft")
    manifest = read_manifest(folder)
    assert manifest is not None
    hashes = {name: file_hash(folder / name) for name in ("config.json", "out.txt")}
    assert manifest["outputs"] == hashes
    assert (manifest["stage"], manifest["name"], manifest["seed"]) == ("sft", "tiny", 44413)
    assert manifest["results"] == {"updates": 3}
    for key in (
        "settings_hash",
        "code_version",
        "seconds",
        "peak_memory_gib",
        "device",
        "processor",
        "versions",
    ):
        assert manifest[key] not in (None, ""), key
    assert manifest["versions"]["torch"]


def test_another_machine_makes_nothing_stale(runs, monkeypatch):
    finish(TINY, "sft")
    monkeypatch.setattr(runs_module, "processor", lambda: {"model": "another one"})
    assert find_problem(TINY, "sft") is None


def test_an_interrupted_stage_replaces_nothing_and_the_next_one_starts_over(runs):
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


def test_a_stage_killed_between_its_manifest_and_its_name_is_put_in_place(runs, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runs_module, "put_in_place", lambda config, stage: None)
        finish(TINY, "sft")
    assert read_manifest(stage_folder(TINY, "sft")) is None
    runs_module.put_in_place(TINY, "sft")
    assert read_manifest(stage_folder(TINY, "sft")) is not None
    Run(TINY, "ppo").require("sft")


def test_what_is_replaced_moves_aside_and_an_equal_one_is_not_kept_twice(runs):
    folder = finish(TINY, "sft", text="first")
    finish(TINY, "sft", text="second")
    finish(TINY, "sft", text="second")
    finish(TINY, "sft", text="third")
    aside = folder.parent / "aside"
    kept = {path.name: (path / "out.txt").read_text() for path in aside.iterdir()}
    assert kept == {"sft-1": "first", "sft-2": "second"}


def test_a_result_without_its_manifest_moves_aside(runs):
    folder = finish(TINY, "sft", text="first")
    (folder / "manifest.json").unlink()
    finish(TINY, "sft", text="second")
    assert (folder / "out.txt").read_text() == "second"
    assert (folder.parent / "aside/sft-1/out.txt").read_text() == "first"


def test_only_the_main_process_writes(runs):
    with open_stage(TINY, "sft", is_main=False) as run:
        run.log(1, loss=1.0)
        run.append("samples.jsonl", {})
        run.finish({})
    assert not runs.exists()


def test_the_first_stages_of_an_ablation_are_in_its_upstream(runs):
    folder = finish(TINY, "sft")
    ablation = make_config("tiny", name="mine", upstream="tiny")
    with pytest.raises(UserError, match="leave out UPSTREAM="), open_stage(ablation, "sft"):
        pass
    assert not (runs / "mine").exists()
    assert Run(ablation, "ppo").require("sft") == folder
    assert stage_folder(ablation, "ppo") == runs / "mine" / "seed44413" / "ppo"


def test_a_manifest_names_the_commit_with_which_the_stage_began(runs, monkeypatch):
    """It may be edited or committed while the stage runs."""
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "begun")
    with open_stage(TINY, "sft") as run:
        monkeypatch.setattr("stages.runs.run.code_version", lambda: "edited")
        run.finish({})
    assert (read_manifest(run.folder) or {})["code_version"] == "begun"


def test_a_changed_file_makes_the_code_dirty_and_a_generated_report_does_not(place):
    assert code_version() == "unknown"
    (place / "reports" / "generated").mkdir(parents=True)
    for name in ("code.py", "reports/generated/page.md", "reports/page.py"):
        (place / name).write_text("1")
    user = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "."], [*user, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    clean = code_version()
    assert len(clean) == 10
    (place / "reports/generated/page.md").write_text("2")
    assert code_version() == clean
    (place / "reports/page.py").write_text("2")
    assert code_version() == f"{clean}-dirty"


# -- locks -----------------------------------------------------------------------------------------

OPEN_AND_WAIT = """
import sys, time
from pathlib import Path
from stages.config import paths
from stages.config.command_line import make_config
from stages.runs.run import open_stage
paths.RUNS = Path(sys.argv[1])
with open_stage(make_config("tiny"), "sft"):
    print("open", flush=True)
    time.sleep(600)
"""


@contextmanager
def other_process(runs):
    """Another process that has opened the stage sft."""
    command = [sys.executable, "-c", OPEN_AND_WAIT, str(runs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_stage_is_not_run_twice_at_once(runs, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    folder = stage_folder(TINY, "sft")
    with other_process(runs):
        assert is_under_way(folder)
        line = refusal_of(finish, TINY, "sft")
        assert line == (
            f"stage sft is already running in another process ({folder.parent}): "
            "wait for it or stop it"
        )
        # Other seeds and stages of the same run may run.
        finish(TINY.changed(seed=1), "sft")
        finish(TINY, "rm")


def test_the_kernel_releases_the_lock_of_a_killed_process(runs):
    with other_process(runs) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = stage_folder(TINY, "sft")
    assert lock_of(folder).exists()
    assert not is_under_way(folder)
    finish(TINY, "sft")
    assert not lock_of(folder).exists()


def test_looking_at_a_lock_writes_nothing_and_leaves_it_free(runs):
    folder = stage_folder(TINY, "sft")
    folder.parent.mkdir(parents=True)
    assert not is_under_way(folder)
    assert everything(runs) == []
    with held(lock_of(folder), "sft"):
        assert is_under_way(folder)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_disk_that_cannot_lock_files_is_one_line(runs, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    line = refusal_of(finish, TINY, "sft")
    assert line.endswith(f"{os.strerror(number)}: put runs/ on a disk that can lock files")
    assert not is_under_way(stage_folder(TINY, "sft"))


# -- interrupted stages ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bad"), UserError("bad")])
def test_what_is_half_done_is_kept_for_the_next_attempt_and_removed_at_the_end(runs, error):
    with suppress(type(error)), open_stage(TINY, "sft") as run:
        run.resume.mkdir()
        (run.resume / "kept.txt").write_text("half")
        raise error
    assert (run.partial / "failed.json").exists() == (not isinstance(error, KeyboardInterrupt))

    with open_stage(TINY, "sft") as run:
        assert (run.resume / "kept.txt").read_text() == "half"
        assert not (run.partial / "failed.json").exists()
        run.finish({})
    assert everything(run.folder) == ["config.json", "manifest.json"]


# -- files -----------------------------------------------------------------------------------------


def test_json_is_written_completely_or_not_at_all(tmp_path):
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
