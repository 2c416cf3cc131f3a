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


def files_below(folder: Path) -> list[str]:
    """The files of a folder and of its subfolders."""
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

    assert files_below(runs) == [
        "tiny/seed44413/sft/config.json",
        "tiny/seed44413/sft/manifest.json",
        "tiny/seed44413/sft/metrics.jsonl",
        "tiny/seed44413/sft/samples.jsonl",
    ]
    assert read_lines(folder / "metrics.jsonl") == [{"step": 1, "loss/train": 2.5}]
    assert read_lines(folder / "samples.jsonl") == [row]


def test_the_manifest_is_written_after_every_other_file(runs, monkeypatch):
    files_before_manifest = []
    was_in_place = []

    def record_and_write(path, value):
        if path.name == "manifest.json":
            files_before_manifest.extend(files_below(path.parent))
            was_in_place.append((path.parents[1] / "sft").exists())
        write_json(path, value)

    monkeypatch.setattr(runs_module, "write_json", record_and_write)
    finish(TINY, "sft")

    assert files_before_manifest == ["attempt.json", "config.json", "out.txt"]
    assert was_in_place == [False]


def test_the_manifest_hashes_the_outputs(runs):
    folder = finish(TINY, "sft")
    assert (read_manifest(folder) or {})["outputs"] == {
        "config.json": file_hash(folder / "config.json"),
        "out.txt": file_hash(folder / "out.txt"),
    }


def test_the_manifest_names_what_the_stage_ran_with(runs):
    manifest = read_manifest(finish(TINY, "sft"))

    assert manifest is not None
    assert manifest["stage"] == "sft"
    assert manifest["name"] == "tiny"
    assert manifest["seed"] == 44413
    assert manifest["results"] == {"updates": 3}
    assert manifest["versions"]["torch"]
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


def test_another_machine_makes_nothing_stale(runs, monkeypatch):
    finish(TINY, "sft")
    monkeypatch.setattr(runs_module, "processor", lambda: {"model": "another one"})
    assert find_problem(TINY, "sft") is None


def test_an_interrupted_stage_replaces_nothing_and_the_next_one_starts_over(runs):
    folder = finish(TINY, "sft", text="first")
    hashes = hash_files(folder)

    with pytest.raises(FileNotFoundError), open_stage(TINY, "sft") as run:
        (run.partial / "nothing.txt").read_text()
    (folder.with_name("sft.partial") / "half.txt").write_text("half")
    assert hash_files(folder) == hashes

    finish(TINY, "sft", text="second")
    assert files_below(folder) == ["config.json", "manifest.json", "out.txt"]
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


def test_a_replaced_result_moves_aside_and_an_equal_one_is_not_kept_twice(runs):
    folder = finish(TINY, "sft", text="first")
    finish(TINY, "sft", text="second")
    finish(TINY, "sft", text="second")
    finish(TINY, "sft", text="third")

    aside = folder.parent / "aside"
    texts = {path.name: (path / "out.txt").read_text() for path in aside.iterdir()}
    assert texts == {"sft-1": "first", "sft-2": "second"}


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


def test_an_ablation_takes_its_first_stages_from_its_upstream(runs):
    folder = finish(TINY, "sft")
    ablation = make_config("tiny", name="mine", upstream="tiny")

    assert Run(ablation, "ppo").require("sft") == folder
    assert stage_folder(ablation, "ppo") == runs / "mine" / "seed44413" / "ppo"


def test_an_ablation_does_not_run_the_first_stages_itself(runs):
    finish(TINY, "sft")
    ablation = make_config("tiny", name="mine", upstream="tiny")

    with pytest.raises(UserError, match="leave out UPSTREAM="), open_stage(ablation, "sft"):
        pass

    assert not (runs / "mine").exists()


# -- the version of the code -----------------------------------------------------------------------


def test_a_manifest_names_the_commit_with_which_the_stage_began(runs, monkeypatch):
    """The code may be edited or committed while the stage runs."""
    monkeypatch.setattr("stages.runs.run.code_version", lambda: "begun")
    with open_stage(TINY, "sft") as run:
        monkeypatch.setattr("stages.runs.run.code_version", lambda: "edited")
        run.finish({})
    assert (read_manifest(run.folder) or {})["code_version"] == "begun"


def git(*arguments):
    """Run git as a user with a name."""
    user = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *user, *arguments], check=True)


@pytest.fixture
def repository(place):
    """The current folder as a repository with one commit of code and of a generated page."""
    (place / "reports" / "generated").mkdir(parents=True)
    for name in ("code.py", "reports/page.py", "reports/generated/page.md"):
        (place / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return place


def test_outside_of_a_repository_the_version_is_unknown(place):
    assert code_version() == "unknown"


def test_a_changed_file_makes_the_version_dirty(repository):
    commit = code_version()
    assert len(commit) == 10

    (repository / "reports/page.py").write_text("2")

    assert code_version() == f"{commit}-dirty"


def test_a_changed_generated_page_leaves_the_version_clean(repository):
    commit = code_version()
    (repository / "reports/generated/page.md").write_text("2")
    assert code_version() == commit


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
def another_process(runs):
    """Another process, which has opened the stage sft."""
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

    with another_process(runs):
        assert is_under_way(folder)
        line = refusal_of(finish, TINY, "sft")

    assert line == (
        f"stage sft is already running in another process ({folder.parent}): wait for it or stop it"
    )


def test_another_seed_or_stage_may_run_at_the_same_time(runs, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    other_seed = TINY.changed(seed=1)

    with another_process(runs):
        finish(other_seed, "sft")
        finish(TINY, "rm")

    assert (stage_folder(other_seed, "sft") / "manifest.json").exists()
    assert (stage_folder(TINY, "rm") / "manifest.json").exists()


def test_the_kernel_releases_the_lock_of_a_killed_process(runs):
    with another_process(runs) as process:
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

    assert files_below(runs) == []
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


def interrupt_with(error):
    """Interrupt SFT with an error after it has written a file to resume from."""
    with suppress(type(error)), open_stage(TINY, "sft") as run:
        run.resume.mkdir()
        (run.resume / "checkpoint.txt").write_text("half")
        raise error
    return run


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bad"), UserError("bad")])
def test_an_interrupted_stage_resumes_and_leaves_nothing_of_the_first_attempt(runs, error):
    interrupt_with(error)

    with open_stage(TINY, "sft") as run:
        assert (run.resume / "checkpoint.txt").read_text() == "half"
        assert not (run.partial / "failed.json").exists()
        run.finish({})

    assert files_below(run.folder) == ["config.json", "manifest.json"]


@pytest.mark.parametrize("error", [RuntimeError("bad"), UserError("bad")])
def test_a_failed_stage_is_marked(runs, error):
    run = interrupt_with(error)
    assert (run.partial / "failed.json").exists()


def test_a_stage_that_the_user_stopped_is_not_marked_as_failed(runs):
    run = interrupt_with(KeyboardInterrupt())
    assert not (run.partial / "failed.json").exists()


# -- files -----------------------------------------------------------------------------------------


def test_json_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": "\u00e9"})

    with pytest.raises(TypeError):
        write_json(path, {"x": object()})

    assert json.loads(path.read_text(encoding="utf-8")) == {"x": "\u00e9"}
    assert files_below(tmp_path) == ["a.json"]


def test_the_hashes_of_a_folder_are_sha256_and_cover_subfolders(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"abc")
    # The well-known digest of "abc" (FIPS 180).
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_files(tmp_path) == {"folder/file": digest}
