"""What the system and other libraries refuse is one line with its mend; a defect is a traceback."""

import ast
import errno
import io
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from stages.config.error_messages import describe_user_error, in_one_line
from stages.config.errors import UserError, say_error
from stages.runs.files import read_lines
from stages.training.accelerator import check_threads
from tests.lib.places import ROOT

OURS = [path for part in ("stages", "eval", "reports") for path in ROOT.glob(f"{part}/**/*.py")]
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
def test_what_a_user_can_mend_is_one_line(capsys, error, line):
    with pytest.raises(SystemExit) as ended, in_one_line():
        raise error
    assert ended.value.code == 2
    (line_shown,) = capsys.readouterr().err.splitlines()
    assert line_shown.startswith("error: ")
    assert line in line_shown


def test_a_terminal_of_another_encoding_shows_escapes(monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    with in_one_line():
        print("caf\xe9")
    assert terminal.getvalue() == b"caf\\xe9\n"


@pytest.mark.parametrize(
    "defect",
    [
        KeyError("rate"),
        ValueError("shapes"),
        ZeroDivisionError(),
        ModuleNotFoundError("No module named 'stages.gone'", name="stages.gone"),
    ],
)
def test_a_defect_keeps_its_traceback(defect):
    assert describe_user_error(defect) is None
    with pytest.raises(type(defect)), in_one_line():
        raise defect


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


@pytest.mark.parametrize("goal", ["status", "help"])
def test_a_reader_that_leaves_early_is_no_error(tmp_path, goal):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-B", "-m", "stages", goal]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_long_error_is_folded_on_a_terminal_and_one_line_in_a_log(monkeypatch):
    text = (
        "error: model runs/a-name/seed44413/sft/model has weights that are not finite (gpt_neox):"
        " make or fetch it anew, or run `make sft rm ppo PRESET=pythia-1b SEED=44413 NAME=a-name`"
    )
    for is_terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        say_error(text)
        lines = stream.getvalue().splitlines()
        assert " ".join(lines) == text
        assert len(lines) == (3 if is_terminal else 1)
        assert "`make sft rm ppo PRESET=pythia-1b SEED=44413 NAME=a-name`" in stream.getvalue()
        assert max(map(len, lines)) <= 80 or not is_terminal


def test_no_code_of_a_model_is_ever_run():
    """Whatever loads a model or tokenizer by its folder or id says so."""
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("from_pretrained", "from_config", "load_dataset"):
                continue
            trusted = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
            safe = all(isinstance(word, ast.Constant) and word.value is False for word in trusted)
            assert safe, path
            assert trusted or node.func.attr != "from_pretrained", path


def test_more_threads_than_cores_are_refused():
    check_threads(0)
    check_threads(2)
    with pytest.raises(UserError, match=r"cpu_threads is 9999 but this machine has \d+ cores"):
        check_threads(9999)


CALLED_BY_OURS = ("peer_trl.py",)
BEFORE_INSTALLATION = ("targets.py",)  # `make help`


def test_every_command_ends_in_one_line():
    """A module that is a command decorates its main, or hands all its work to what does."""
    handing_on = {"print_page"}
    for path in OURS:
        text = path.read_text(encoding="utf-8")
        if '"__main__"' not in text or path.name in (*CALLED_BY_OURS, *BEFORE_INSTALLATION):
            continue  # those have callers of ours that read what they say
        (main,) = [
            node
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name == "main"
        ]
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(main)
            if isinstance(node, ast.Call)
        }
        assert "in_one_line" in called or called & handing_on, path
