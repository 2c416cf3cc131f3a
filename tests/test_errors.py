"""Bad input as a user meets it: one line with file, line and field, and nothing left behind."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages import base, ppo, sft
from stages.driving.start import run_module
from stages.settings.checks import say_error

POST = {"id": "p1", "subreddit": "tifu", "title": "A title", "post": "A post.", "summary": "Short."}
POSTS = [POST | {"id": f"p{number}"} for number in (1, 2, 3)]
PAIR: dict[str, Any] = {
    "info": {"id": "p1", "subreddit": "tifu", "title": "A title", "post": "A post."},
    "summaries": [{"text": " One.", "policy": "ref"}, {"text": " Two.", "policy": "sup"}],
    "choice": 0,
    "worker": "w",
    "batch": "b",
    "split": "train",
    "extra": {"confidence": 9},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a small, valid data folder `data`."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    for part in ("train", "validation"):
        write(data / f"sft_{part}.jsonl", POSTS)
        write(data / f"comparisons_{part}.jsonl", [PAIR] * 3)
    return data


def write(path: Path, rows: Sequence[dict | str]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def error_of(capsys, stage=base, *extra: str) -> str:
    """The one line on standard error of a stage that must refuse, with exit status 2."""
    arguments = ["--preset", "tiny", "--name", "mine", "--data", "data", *extra]
    with pytest.raises(SystemExit) as stop:
        run_module(stage, arguments)
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert not list(Path("runs").glob("mine/seed44413/*.partial"))
    assert not list(Path("runs").glob(f"mine/seed44413/{stage.__name__.split('.')[-1]}"))
    return lines[0]


def test_a_missing_file_is_named(folder, capsys):
    (folder / "comparisons_train.jsonl").unlink()
    assert "comparisons_train.jsonl is missing" in error_of(capsys)


def test_a_missing_earlier_stage_names_the_make_command(folder, capsys):
    message = error_of(capsys, ppo)
    assert "make" in message
    assert "DATA=data" in message
    assert "make data" in error_of(capsys, sft)


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
