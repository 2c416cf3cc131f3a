"""Bad input as a user meets it: one line with file, line and field, and nothing left behind."""

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stages import base, ppo, sft
from stages.settings.checks import say_error

ROOT = Path(__file__).parents[1]
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
        stage.main(arguments)
    assert stop.value.code == 2
    lines = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert len(lines) == 1
    assert not list(Path("runs").glob("mine/seed44413/*.partial"))
    assert not list(Path("runs").glob(f"mine/seed44413/{stage.__name__.split('.')[-1]}"))
    return lines[0]


def test_valid_data_is_accepted(folder):
    base.main(["--preset", "tiny", "--name", "mine", "--data", "data"])
    assert (Path("runs/mine/seed44413/base/manifest.json")).exists()


@pytest.mark.parametrize(
    ("file", "row", "expected"),
    [
        ("sft_train", '{"id": "p1", ', ["sft_train.jsonl:2", "not JSON"]),
        ("sft_train", {**POST, "title": None}, ["sft_train.jsonl:2", "title", "missing"]),
        (
            "sft_validation",
            {**POST, "summary": " "},
            ["sft_validation.jsonl:2", "summary", "empty"],
        ),
        ("sft_train", {**POST, "post": 7}, ["sft_train.jsonl:2", "post", "int"]),
        ("comparisons_train", {**PAIR, "choice": 2}, ["comparisons_train.jsonl:2", "choice", "2"]),
        ("comparisons_train", {**PAIR, "choice": True}, ["comparisons_train.jsonl:2", "choice"]),
        (
            "comparisons_validation",
            {**PAIR, "summaries": PAIR["summaries"][:1]},
            ["comparisons_validation.jsonl:2", "summaries", "1"],
        ),
        ("sft_train", {**POST, "title": "x " * 400}, ["sft_train.jsonl:2", "cannot be cut to fit"]),
        ("sft_train", {**POST, "summary": "x " * 90}, ["sft_train.jsonl:2", "summary", "limit"]),
    ],
)
def test_a_bad_row_is_refused_with_its_place(folder, capsys, file, row, expected):
    good = POST if file.startswith("sft") else PAIR
    write(folder / f"{file}.jsonl", [good, row, good])
    message = error_of(capsys)
    assert all(part in message for part in expected), message


def test_a_missing_file_is_named(folder, capsys):
    (folder / "comparisons_train.jsonl").unlink()
    assert "comparisons_train.jsonl is missing" in error_of(capsys)


def test_a_missing_earlier_stage_names_the_make_command(folder, capsys):
    message = error_of(capsys, ppo)
    assert "make" in message
    assert "DATA=data" in message
    assert "make data" in error_of(capsys, sft)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["PRESET=nope"], "unknown preset 'nope'"),
        (["SET=ppo.klcoef=1", "NAME=x"], "unknown setting 'ppo.klcoef'"),
        (["SET=ppo.kl_coef=high", "NAME=x"], "ppo.kl_coef takes a value of type float"),
        (["SET=ppo.kl_coef=0.1"], "ppo.kl_coef=0.1 needs a run name of its own"),
        (["PRESET=posts"], "needs a folder of posts"),
        (["PRESET=smollm2"], "needs a folder of posts"),
        (["PRESET=smollm2", "DATA=."], "is not there: run `make smollm`"),
        (["PRESET=posts", "DATA=."], "needs a tokenizer folder"),
        (["NAME=x", "UPSTREAM=gone"], "make rm PRESET=tiny SEED=44413 NAME=gone"),
        (["PRESET=tny"], "did you mean tiny"),
    ],
)
def test_make_refuses_bad_settings_before_anything_runs(tmp_path, arguments, expected):
    command = ["make", "-f", str(ROOT / "Makefile"), "ppo", "VENV=", f"PYTHON={sys.executable}"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert found.returncode == 2
    assert expected in found.stderr
    assert "Traceback" not in found.stderr
    assert not list(tmp_path.iterdir())


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


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        base.main(["--preset", "pythia-70m"])
    message = capsys.readouterr().err.splitlines()[-1]
    posts = "vwxyzjn/summarize_from_feedback_tldr_3_filtered"
    assert message.startswith(f"error: data.sft_dataset: dataset {posts} is not in the hub's cache")
