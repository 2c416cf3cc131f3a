"""Stages that one interpreter forks: loaded once, and each ends as a process of its own would."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.pipeline import maker
from tests.lib.resuming import ARGUMENTS

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.walk,
    pytest.mark.skipif(not maker.can_be_forked(), reason="nothing is forked here"),
]

STAGE = """
import os, signal, sys, time
print("loads", flush=True)
if os.environ.get("LOADS_LONG"):
    time.sleep(60)

def main(arguments):
    try:
        run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)

def run(arguments):
    print("stage", os.getpid(), os.getppid(), *arguments, repr(sys.stdin.read()), flush=True)
    match arguments:
        case ["says", status]:
            sys.exit(int(status))
        case ["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["breaks"]:
            raise ZeroDivisionError
        case ["waits"]:
            time.sleep(60)
"""
CALLER = """
import sys
from stages.pipeline.maker import START, Maker
from stages.config.faults import in_one_line
with in_one_line(), Maker() as maker:
    codes = [maker.call([*START, "stage_here", *stage.split()]) for stage in sys.argv[1:]]
    print("codes", codes, maker.stopped, flush=True)
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """In which the module `stage_here` can be imported."""
    (tmp_path / "stage_here.py").write_text(STAGE)
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def caller(environment) -> Iterator:
    """Starts a process that calls stages one after the other; it has a process group."""
    started = []

    def start(*stages: str, **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CALLER, *stages],
            env={**environment, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str], word: str) -> list[str]:
    """The next line that begins with a word, as words."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [word]:
            return line.split()
    raise AssertionError(f"no line begins with {word}")


def test_the_libraries_are_loaded_once_and_each_stage_has_its_own_end(caller):
    calls = ("says 0", "says 2", "dies", "breaks", "fine")
    out, err = caller(*calls).communicate(timeout=60)
    stages = [line.split() for line in out.splitlines() if line.startswith("stage")]
    assert out.count("loads") == 1
    assert len({stage[1] for stage in stages}) == len(calls)
    assert len({stage[2] for stage in stages}) == 1
    assert all(stage[-1] == "''" for stage in stages)
    assert out.splitlines()[-1] == "codes [0, 2, 137, 1, 0] 0"
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1] == "ZeroDivisionError"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_pipeline_alone_is_handed_on_to_the_stage(caller, number):
    process = caller("waits")
    stage = int(line_of(process, "stage")[1])
    process.send_signal(number)
    assert line_of(process, "codes") == ["codes", f"[{128 + number}]", f"{128 + number}"]
    assert not Path(f"/proc/{stage}").exists()


def test_a_ctrl_c_reaches_the_stage_and_nobody_prints_a_traceback(caller):
    process = caller("waits")
    line_of(process, "stage")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, err) == ("codes [130] 130\n", "")


def test_a_ctrl_c_while_libraries_load_is_one_line(caller):
    process = caller("fine", LOADS_LONG="1")
    line_of(process, "loads")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == "stage_here was stopped before it began: the same command begins it\n"


def test_a_stage_ends_with_the_pipeline_that_was_killed(caller):
    process = caller("waits")
    stage = int(line_of(process, "stage")[1])
    process.kill()
    patience = time.monotonic() + 10
    while Path(f"/proc/{stage}").exists() and time.monotonic() < patience:
        time.sleep(0.1)
    assert not Path(f"/proc/{stage}").exists()


def test_forked_stages_put_out_what_those_of_their_own_interpreters_do(tmp_path):
    """The second comes after another in the same interpreter; its weights are the same bytes."""
    weights = {}
    for before in ("", "import torch; "):  # where torch is there already, nothing is forked
        folder = tmp_path / f"{before != ''}"
        folder.mkdir()
        code = f"import sys; {before}from stages.pipeline.main import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", code, "sft", *ARGUMENTS]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        weights[before] = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.glob("runs/resumed/*/*/model/*.safetensors")
        }
    assert len(weights[""]) == 2
    assert weights[""] == weights["import torch; "]


def test_stages_are_forked_where_there_is_no_accelerator(monkeypatch, tmp_path):
    monkeypatch.setattr(maker, "Path", lambda _: tmp_path)
    assert maker.can_be_forked()
    (tmp_path / "nvidia0").touch()
    assert not maker.can_be_forked()
