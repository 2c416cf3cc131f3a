"""An error that a user can fix is one line that says how; a bug keeps its traceback."""

import ast
import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from stages.config.error_messages import describe_user_error, in_one_line
from stages.config.errors import UserError, say_error
from stages.runs.files import read_lines
from stages.training.accelerator import check_threads
from tests.lib.places import ROOT

OUR_FILES = [
    *ROOT.glob("stages/**/*.py"),
    *ROOT.glob("eval/**/*.py"),
    *ROOT.glob("reports/**/*.py"),
]
ERRORS: list[tuple[Exception, str]] = [
    (
        OSError(errno.ENOSPC, "No space left on device", "x"),
        "x: No space left on device: free some disk space",
    ),
    (PermissionError(errno.EACCES, "Permission denied", "x"), "x: Permission denied: make it read"),
    (
        NotADirectoryError(errno.ENOTDIR, "Not a directory", "x"),
        "there is a file in place of",
    ),
    (
        OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"),
        "a -> b: Invalid cross-dev",
    ),
    (RuntimeError("I/O error: No space left on device (os error 28)"), "free some disk space"),
    (
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")] * 2),
        "error: No space left on device: free some disk space",
    ),
    (SafetensorError("HeaderTooSmall"), "a file is damaged (SafetensorError"),
    (RuntimeError("PytorchStreamReader failed reading zip archive"), "a file is damaged"),
    (MemoryError(), "out of memory: free some, or try memory.gradient_checkpointing"),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: free some"),
    (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "No module named 'gguf': `make i"),
    (UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates"), "a text has an unpaired surrogate"),
    (
        UnicodeEncodeError("ascii", "caf\xe9", 3, 4, "ordinal not in range(128)"),
        "the encoding ascii has no character '\\xe9': set PYTHONIOENCODING=utf-8",
    ),
]


@pytest.mark.parametrize(("error", "line"), ERRORS)
def test_what_a_user_can_fix_is_one_line(capsys, error, line):
    with pytest.raises(SystemExit) as ended, in_one_line():
        raise error
    assert ended.value.code == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("error: ")
    assert line in printed


def test_a_terminal_of_another_encoding_shows_escapes(monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    with in_one_line():
        print("caf\xe9")
    assert terminal.getvalue() == b"caf\\xe9\n"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("rate"),
        ValueError("shapes"),
        ZeroDivisionError(),
        ModuleNotFoundError("No module named 'stages.gone'", name="stages.gone"),
    ],
    ids=repr,
)
def test_a_bug_keeps_its_traceback(error):
    assert describe_user_error(error) is None
    with pytest.raises(type(error)), in_one_line():
        raise error


def test_a_line_that_is_no_row_is_named_with_its_file(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n[2]\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2 is not a JSON object"):
        read_lines(path)


def test_a_ctrl_c_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, in_one_line():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped by SIGINT: run the same command to start again\n"


@pytest.mark.parametrize("target", ["status", "help"])
def test_a_reader_that_leaves_early_is_no_error(tmp_path, target):
    reading_end, writing_end = os.pipe()
    os.close(reading_end)

    done = subprocess.run(
        [sys.executable, "-B", "-m", "stages", target],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing_end,
        stderr=subprocess.PIPE,
    )
    os.close(writing_end)

    assert done.returncode == 0
    assert done.stderr == b""


COMMAND = "`make sft rm ppo PRESET=pythia-1b SEED=44413 NAME=a-name`"
LONG_ERROR = (
    "error: model runs/a-name/seed44413/sft/model has weights that are not finite (gpt_neox):"
    f" make or fetch it again, or run {COMMAND}"
)


def test_a_long_error_is_one_line_in_a_log(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    say_error(LONG_ERROR)
    assert stream.getvalue() == f"{LONG_ERROR}\n"


def test_a_long_error_is_broken_on_a_terminal_but_not_within_its_command(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)

    say_error(LONG_ERROR)

    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert " ".join(lines) == LONG_ERROR
    assert max(len(line) for line in lines) <= 80
    assert COMMAND in stream.getvalue()


def calls_in(path: Path) -> Iterator[ast.Call]:
    """Every call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def called_name(call: ast.Call) -> str:
    """The name of the function or method that is called; empty for other expressions."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ""


def test_no_code_of_a_model_is_ever_run():
    """Whatever loads a model or tokenizer by its folder or id says so."""
    for path in OUR_FILES:
        for call in calls_in(path):
            name = called_name(call)
            if name not in ("from_pretrained", "from_config", "load_dataset"):
                continue
            settings = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
            for setting in settings:
                assert isinstance(setting, ast.Constant), path
                assert setting.value is False, path
            if name == "from_pretrained":
                assert settings, path


def test_more_threads_than_cores_are_refused():
    check_threads(0)
    check_threads(2)
    with pytest.raises(UserError, match=r"cpu_threads is 9999 but this machine has \d+ cores"):
        check_threads(9999)


def is_command(path: Path) -> bool:
    """Whether a module is a command; `make help` runs before the installation and is left out."""
    return '"__main__"' in path.read_text(encoding="utf-8") and path.name != "targets.py"


def test_every_command_ends_in_one_line():
    """A module that is a command decorates its main."""
    for path in OUR_FILES:
        if not is_command(path):
            continue
        functions = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == "main":
                functions.append(node)
        (main,) = functions
        calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
        names = {called_name(call) for call in calls}
        assert "in_one_line" in names, path
