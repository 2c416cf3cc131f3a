"""Real processes that signals, kills and each other end; each goes on to the same weights."""

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from stages import base, ppo
from stages.config.command_line import make_config
from stages.config.stages import CARD
from stages.runs import signals as stopping
from stages.runs.manifest import stage_folder
from stages.training.checkpoints import list_checkpoints
from tests.lib.make_stages import run_module
from tests.lib.places import ROOT
from tests.lib.resuming import ARGUMENTS, OFTEN, Killed, compare, kill_at, rows_of, same

# -- real processes --------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from stages import {module}
from stages.pipeline.start import end_process
from stages.runs.run import Run
from tests.lib.make_stages import run_module
log = Run.log
def slow(run, step, **metrics):
    log(run, step, **metrics)
    time.sleep(0.3)
Run.log = slow
run_module({module}, {arguments!r})
end_process()
"""


SLOW_PIPELINE = """
import time
from stages.__main__ import main
from stages.runs.run import Run
log = Run.log
def slow(run, step, **metrics):
    log(run, step, **metrics)
    time.sleep(0.3 if run.stage == "ppo" else 0)
Run.log = slow
main({words!r})
"""


UNDER_WAY = """
import time
from stages.runs.signals import Stopped, finishing_first, stop_asked, stopping_on_signals
with stopping_on_signals("the command"):
    with finishing_first():
        print("under way", flush=True)
        until = time.monotonic() + 20
        while time.monotonic() < until and stop_asked() != 15:
            time.sleep(0.05)
    raise Stopped(stop_asked())
"""


TOLD_AGAIN = """
import os, signal
from stages.runs import signals
say = signals.say_stopped
def passed_on(number, command):
    os.kill(os.getpid(), number)
    say(number, command)
signals.say_stopped = passed_on
with signals.stopping_on_signals("the command"):
    os.kill(os.getpid(), signal.SIGTERM)
"""


def start_process(folder: Path, code: str, **environment: str) -> subprocess.Popen[str]:
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 180
    while time.monotonic() < limit and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


@pytest.mark.walk
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_a_signal_ends_goes_on_to_the_same_weights(whole, attempt, tmp_path, number):
    folder = attempt("ppo")
    process = start_process(tmp_path, SCRIPT.format(module="ppo", arguments=OFTEN))
    wait_for_lines(folder.with_name("ppo.partial") / "metrics.jsonl", 2, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        config = make_config("tiny", name="resumed", overrides=tuple(OFTEN[5:]))
        lines = [line for line in said.splitlines() if "stopped by" in line]
        assert len(lines) == 1
        answer = f"{number.name}: finishing the current update or batch; a second signal"
        assert answer in said.split("stopped by")[0]
        assert f"stopped by {number.name}: `make ppo PRESET=tiny" in lines[0]
        assert "Traceback" not in said
        assert list_checkpoints(stage_folder(config, "ppo").with_name("ppo.partial") / "resume")
    assert not folder.exists()
    run_module(ppo, OFTEN)
    same(whole / "ppo", folder, tmp_path / "differences.json")


@pytest.mark.walk
def test_a_terminal_that_closes_lets_the_update_finish_and_save(attempt, tmp_path):
    partial = attempt("ppo").with_name("ppo.partial")
    code = SCRIPT.format(module="ppo", arguments=OFTEN)
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        os.execve(sys.executable, [sys.executable, "-c", code], environment)
    patience = time.monotonic() + 180
    metrics = partial / "metrics.jsonl"
    while time.monotonic() < patience and not (metrics.exists() and len(rows_of(metrics)) > 1):
        time.sleep(0.02)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    (newest, *_) = list_checkpoints(partial / "resume")
    assert int(newest.name.split("-")[1]) == len(rows_of(partial / "metrics.jsonl"))


def test_a_second_ctrl_c_ends_at_once_and_nohup_is_obeyed(tmp_path):
    process = start_process(tmp_path, UNDER_WAY)
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("SIGINT: finishing the current update")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "stopped by SIGINT: `the command` resumes\n"
    deaf = start_process(tmp_path, "import signal; signal.signal(1, signal.SIG_IGN)\n" + UNDER_WAY)
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == "under way\n"
    deaf.send_signal(signal.SIGHUP)
    deaf.send_signal(signal.SIGTERM)
    _, said = deaf.communicate(timeout=30)
    assert "SIGHUP" not in said
    assert deaf.returncode == 143


def test_a_signal_that_is_passed_on_while_the_stage_ends_leaves_it_its_line(tmp_path):
    process = start_process(tmp_path, TOLD_AGAIN)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143
    assert said == "stopped by SIGTERM: `the command` resumes\n"


@pytest.mark.walk
def test_two_processes_go_on_from_what_one_saved(whole, attempt, tmp_path):
    folder = attempt("ppo")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(Killed):
            run_module(ppo, OFTEN)
    pair = launch_pair(tmp_path, SCRIPT.format(module="ppo", arguments=OFTEN))
    said = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert "ppo resumes after update 3" in said[0]
    assert [row["step"] for row in rows_of(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert compare(whole / "ppo", folder, tmp_path / "differences.json") < 1e-5


def launch_pair(folder: Path, code: str, second: str = "") -> list[subprocess.Popen[str]]:
    """Two processes of one launch, the second with code of its own if any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        start_process(
            folder,
            own,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank, own in enumerate((code, second or code))
    ]


@pytest.mark.walk
def test_two_processes_stop_at_one_update_and_one_process_goes_on_from_it(whole, attempt, tmp_path):
    """One of them is told alone, as by a launcher that reaches them one after the other."""
    folder = attempt("ppo")
    partial = folder.with_name("ppo.partial")
    pair = launch_pair(tmp_path, SCRIPT.format(module="ppo", arguments=ARGUMENTS))
    wait_for_lines(partial / "metrics.jsonl", 2, pair[0])
    pair[1].send_signal(signal.SIGINT)
    said = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [130, 130], said
    assert not any("stopped by" in text for text in said)  # the pipeline says so
    assert "Traceback" not in "".join(said)
    (checkpoint,) = list_checkpoints(partial / "resume")
    assert int(checkpoint.name.split("-")[1]) == len(rows_of(partial / "metrics.jsonl"))
    run_module(ppo, ARGUMENTS)
    assert [row["step"] for row in rows_of(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert compare(whole / "ppo", folder, tmp_path / "differences.json") < 1e-5


MEASURING = """
import os, signal, time
from pathlib import Path
from stages.runs.signals import stopping_on_signals
from stages.training.accelerator import make_accelerator
from stages.training.memory import MemoryBudget, PassSize
from stages.training.row_by_row import measure_share
from stages.config.command_line import make_config
from stages.config.stages import CARD
accelerator = make_accelerator(make_config("tiny"))
def measure(part):
    if accelerator.process_index == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGTERM)
    return [len(part)]
with stopping_on_signals("the command"):
    measure_share(
        accelerator,
        MemoryBudget.from_settings(make_config("tiny").memory),
        label="rows",
        sort_keys=[1] * 4,
        size=PassSize(rows=1),
        measure=measure,
        keep=Path("kept"),
    )
    print("went on", flush=True)
"""


@pytest.mark.walk
def test_a_process_that_has_measured_its_rows_stops_with_the_one_that_is_told(tmp_path):
    (tmp_path / "kept").mkdir()
    pair = launch_pair(tmp_path, MEASURING)
    found = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [143, 143], found
    assert "went on" not in "".join(out or "" for out, _ in found)
    assert [len(rows_of(path)) for path in sorted((tmp_path / "kept").iterdir())] == [2, 1]


@pytest.mark.walk
def test_where_one_of_two_processes_dies_the_other_ends_with_one_line(attempt, tmp_path):
    attempt("rm")
    code = SCRIPT.format(module="rm", arguments=OFTEN)
    dying = code.replace("    time.sleep(0.3)", "    import os\n    if step == 2: os._exit(9)")
    pair = launch_pair(tmp_path, code, dying)
    assert pair[1].wait(timeout=60) == 9
    _, said = pair[0].communicate(timeout=60)
    assert pair[0].returncode == 2, said
    assert "another process of this launch has died" in said
    assert "Traceback" not in said
    assert list_checkpoints(tmp_path / "runs/resumed/seed44413/rm.partial/resume")


def test_a_signal_waits_for_what_is_under_way_and_a_second_one_does_not(monkeypatch):
    stopping.forget_signals()
    try:
        with pytest.raises(stopping.Stopped):  # nothing is under way
            stopping.note_signal(signal.SIGINT)
        stopping.forget_signals()
        with stopping.finishing_first():
            assert stopping.note_signal(signal.SIGTERM)
            assert stopping.stop_asked() == signal.SIGTERM
            assert stopping.note_signal(signal.SIGTERM)  # the pipeline's, after the group's
            assert not stopping.note_signal(signal.SIGINT)
            monkeypatch.setenv("WORLD_SIZE", "2")
            assert stopping.note_signal(signal.SIGINT)  # a launcher's echo of the first
        assert stopping.stop_asked() == signal.SIGTERM
    finally:
        stopping.forget_signals()


def test_a_run_folder_that_is_read_only_is_one_line_with_its_mend(small_disk, monkeypatch, capsys):
    monkeypatch.chdir(small_disk("ro,size=200k"))
    with pytest.raises(SystemExit) as stop:
        run_module(base, ARGUMENTS)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Read-only file system: make it writable, then run `make data" in line


LOADING = """
import sys, time
from stages import __main__ as command
def slow(config, stage):
    print("loading", flush=True)
    time.sleep(60)
command.stage_function = slow
command.main(sys.argv[1:])
"""


def test_a_command_that_is_stopped_while_libraries_load_says_one_line(tmp_path):
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job behind & ignores it
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING, "sft"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=listens,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "loading\n":
        pass
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "stopped by SIGINT: `make sft` resumes\n"


@pytest.mark.walk
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_a_signal_ends_resumes_to_the_same_weights(whole, tmp_path, number):
    """The whole pipeline, in its one process: sft, rm and ppo, stopped while ppo trains."""
    variables = ["NAME=resumed", f"SET={' '.join(OFTEN[OFTEN.index('--set') + 1 :])}"]
    words = ["sft", "rm", "ppo", *variables]
    code = SLOW_PIPELINE.format(words=words)
    process = start_process(tmp_path, code)
    partial_folder = tmp_path / "runs/resumed/seed44413/ppo.partial"
    wait_for_lines(partial_folder / "metrics.jsonl", 2, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"stopped by {number.name}: `make sft rm ppo NAME=resumed" in said
    assert "Traceback" not in said
    again = start_process(tmp_path, f"from stages.__main__ import main; main({words!r})")
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert "ppo resumes after update" in said
    folder = partial_folder.with_name("ppo")
    for card in folder.rglob(CARD):  # which only the pipeline writes
        card.unlink()
    same(whole / "ppo", folder, tmp_path / "differences.json")
