"""Processes that are ended by signals, kills or each other resume to the same weights."""

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
from stages.config.stages import CARD
from stages.runs import signals as stopping
from stages.training.checkpoints import list_checkpoints
from tests.lib.make_stages import run_module
from tests.lib.places import ROOT
from tests.lib.resuming import ARGUMENTS, OFTEN, Killed, compare, kill_at, rows_of, same

# -- code that processes run -----------------------------------------------------------------------

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


SIGNALED_WHILE_ENDING = """
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


def start_process(folder: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    """Start Python with this code in a folder; `variables` are added to the environment."""
    fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **fixed, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until a process has written some lines; fail with its errors if it ends before."""
    limit = time.monotonic() + 180
    while time.monotonic() < limit and process.poll() is None:
        if has_lines(path, count):
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[1])


def last_update(checkpoint: Path) -> int:
    """The number of the update after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.walk
def test_a_process_that_is_killed_resumes_to_the_same_weights(whole, attempt, tmp_path):
    folder = attempt("ppo")
    process = start_process(tmp_path, SCRIPT.format(module="ppo", arguments=OFTEN))
    wait_for_lines(folder.with_name("ppo.partial") / "metrics.jsonl", 2, process)

    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()
    run_module(ppo, OFTEN)

    same(whole / "ppo", folder, tmp_path / "differences.json")


@pytest.mark.walk
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_a_signal_ends_resumes_to_the_same_weights(whole, attempt, tmp_path, number):
    folder = attempt("ppo")
    partial = folder.with_name("ppo.partial")
    process = start_process(tmp_path, SCRIPT.format(module="ppo", arguments=OFTEN))
    wait_for_lines(partial / "metrics.jsonl", 2, process)

    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert list_checkpoints(partial / "resume")
    assert not folder.exists()

    (last_line,) = [line for line in errors.splitlines() if "stopped by" in line]
    assert f"stopped by {number.name}: `make ppo PRESET=tiny" in last_line
    before, _, _ = errors.partition("stopped by")
    assert f"{number.name}: finishing the current update or batch; a second signal" in before
    assert "Traceback" not in errors

    run_module(ppo, OFTEN)
    same(whole / "ppo", folder, tmp_path / "differences.json")


@pytest.mark.walk
def test_a_terminal_that_closes_lets_the_update_finish_and_save(attempt, tmp_path):
    partial = attempt("ppo").with_name("ppo.partial")
    metrics = partial / "metrics.jsonl"
    code = SCRIPT.format(module="ppo", arguments=OFTEN)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        os.execve(sys.executable, [sys.executable, "-c", code], environment)

    limit = time.monotonic() + 180
    while time.monotonic() < limit and not has_lines(metrics, 2):
        time.sleep(0.02)
    os.close(terminal)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    newest, *_ = list_checkpoints(partial / "resume")
    assert last_update(newest) == len(rows_of(metrics))


def wait_until_under_way(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"


def test_a_second_ctrl_c_ends_a_process_at_once(tmp_path):
    process = start_process(tmp_path, UNDER_WAY)
    wait_until_under_way(process)

    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline().startswith("SIGINT: finishing the current update")

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "stopped by SIGINT: `the command` resumes\n"


def test_a_process_under_nohup_ignores_sighup(tmp_path):
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start_process(tmp_path, nohup + UNDER_WAY)
    wait_until_under_way(process)

    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)

    assert "SIGHUP" not in errors
    assert process.returncode == 143


def test_a_signal_that_is_passed_on_while_the_stage_ends_leaves_it_its_line(tmp_path):
    process = start_process(tmp_path, SIGNALED_WHILE_ENDING)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143
    assert errors == "stopped by SIGTERM: `the command` resumes\n"


# -- two processes of one launch -------------------------------------------------------------------


def launch_pair(
    folder: Path, code: str, second_code: str | None = None
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Start two processes of one launch, the second with other code if any is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    first = start_process(folder, code, RANK="0", LOCAL_RANK="0", **launch)
    second = start_process(folder, second_code or code, RANK="1", LOCAL_RANK="1", **launch)
    return first, second


@pytest.mark.walk
def test_two_processes_resume_from_what_one_saved(whole, attempt, tmp_path):
    folder = attempt("ppo")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 4)
        with pytest.raises(Killed):
            run_module(ppo, OFTEN)

    first, second = launch_pair(tmp_path, SCRIPT.format(module="ppo", arguments=OFTEN))
    _, errors = first.communicate(timeout=120)
    _, second_errors = second.communicate(timeout=120)

    assert first.returncode == 0, errors
    assert second.returncode == 0, second_errors
    assert "ppo resumes after update 3" in errors
    assert [row["step"] for row in rows_of(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert compare(whole / "ppo", folder, tmp_path / "differences.json") < 1e-5


@pytest.mark.walk
def test_two_processes_stop_at_the_same_update_and_one_process_resumes(whole, attempt, tmp_path):
    """Only one of them gets the signal, as from a launcher that reaches them one by one."""
    folder = attempt("ppo")
    partial = folder.with_name("ppo.partial")
    first, second = launch_pair(tmp_path, SCRIPT.format(module="ppo", arguments=ARGUMENTS))
    wait_for_lines(partial / "metrics.jsonl", 2, first)

    second.send_signal(signal.SIGINT)
    for process in (first, second):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "stopped by" not in errors  # only the pipeline says so
        assert "Traceback" not in errors
    (checkpoint,) = list_checkpoints(partial / "resume")
    assert last_update(checkpoint) == len(rows_of(partial / "metrics.jsonl"))

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
    print("continued", flush=True)
"""


@pytest.mark.walk
def test_a_process_that_has_measured_its_rows_stops_with_the_one_that_gets_a_signal(tmp_path):
    (tmp_path / "kept").mkdir()

    for process in launch_pair(tmp_path, MEASURING):
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 143, errors
        assert "continued" not in output

    rows = [len(rows_of(path)) for path in sorted((tmp_path / "kept").iterdir())]
    assert rows == [2, 1]


@pytest.mark.walk
def test_if_one_of_two_processes_dies_the_other_ends_with_one_line(attempt, tmp_path):
    attempt("rm")
    code = SCRIPT.format(module="rm", arguments=OFTEN)
    dying_code = code.replace("    time.sleep(0.3)", "    import os\n    if step == 2: os._exit(9)")
    surviving, dying = launch_pair(tmp_path, code, dying_code)

    assert dying.wait(timeout=60) == 9
    _, errors = surviving.communicate(timeout=60)

    assert surviving.returncode == 2, errors
    assert "another process of this launch has died" in errors
    assert "Traceback" not in errors
    assert list_checkpoints(tmp_path / "runs/resumed/seed44413/rm.partial/resume")


# -- the handling of a signal ----------------------------------------------------------------------


@pytest.fixture
def no_signals():
    """No signal has come before the test, and none is left after it."""
    stopping.forget_signals()
    yield
    stopping.forget_signals()


@pytest.mark.usefixtures("no_signals")
def test_a_signal_ends_a_process_at_once_if_nothing_is_under_way():
    with pytest.raises(stopping.Stopped):
        stopping.note_signal(signal.SIGINT)


@pytest.mark.usefixtures("no_signals")
def test_a_signal_waits_for_what_is_under_way_and_a_second_one_does_not():
    with stopping.finishing_first():
        assert stopping.note_signal(signal.SIGTERM)
        assert stopping.stop_asked() == signal.SIGTERM
        assert stopping.note_signal(signal.SIGTERM)  # the pipeline's, after the group's
        assert not stopping.note_signal(signal.SIGINT)
    assert stopping.stop_asked() == signal.SIGTERM


@pytest.mark.usefixtures("no_signals")
def test_in_a_launched_process_a_second_signal_is_the_launchers_echo_of_the_first(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with stopping.finishing_first():
        assert stopping.note_signal(signal.SIGTERM)
        assert stopping.note_signal(signal.SIGINT)
    assert stopping.stop_asked() == signal.SIGTERM


def test_a_read_only_run_folder_is_refused_in_one_line_with_the_fix(
    small_disk, monkeypatch, capsys
):
    monkeypatch.chdir(small_disk("ro,size=200k"))
    with pytest.raises(SystemExit) as ended:
        run_module(base, ARGUMENTS)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Read-only file system: make it writable, then run `make data" in line


# -- the whole command -----------------------------------------------------------------------------


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
    # A shell starts background jobs in such a way that they ignore SIGINT.
    heed_ctrl_c = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING, "sft"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_ctrl_c,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "loading\n":
        pass

    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode == 130
    assert errors == "stopped by SIGINT: `make sft` resumes\n"


SETTINGS_OF_OFTEN = OFTEN[OFTEN.index("--set") + 1 :]
WORDS = ["sft", "rm", "ppo", "NAME=resumed", f"SET={' '.join(SETTINGS_OF_OFTEN)}"]


def end_while_ppo_trains(tmp_path: Path, number: signal.Signals) -> subprocess.Popen[str]:
    """Run the whole pipeline in its one process, and send it a signal while PPO trains."""
    process = start_process(tmp_path, SLOW_PIPELINE.format(words=WORDS))
    metrics = tmp_path / "runs/resumed/seed44413/ppo.partial/metrics.jsonl"
    wait_for_lines(metrics, 2, process)
    process.send_signal(number)
    return process


def assert_the_same_command_resumes(whole: Path, tmp_path: Path) -> None:
    """Fail unless the same command resumes PPO and trains the weights of an uninterrupted run."""
    process = start_process(tmp_path, f"from stages.__main__ import main; main({WORDS!r})")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "ppo resumes after update" in errors

    folder = tmp_path / "runs/resumed/seed44413/ppo"
    for card in folder.rglob(CARD):  # which only the pipeline writes
        card.unlink()
    same(whole / "ppo", folder, tmp_path / "differences.json")


@pytest.mark.walk
def test_a_command_that_ctrl_c_ends_resumes_to_the_same_weights(whole, tmp_path):
    process = end_while_ppo_trains(tmp_path, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT: `make sft rm ppo NAME=resumed" in errors
    assert "Traceback" not in errors
    assert_the_same_command_resumes(whole, tmp_path)


@pytest.mark.walk
def test_a_command_that_is_killed_resumes_to_the_same_weights(whole, tmp_path):
    process = end_while_ppo_trains(tmp_path, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "Traceback" not in errors
    assert_the_same_command_resumes(whole, tmp_path)
