"""A table of bad inputs through the real commands: one line, status 2, nothing left behind."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import outputs
from eval.judges.openai.cache import ReplyCache
from reports import run_page
from stages import base, pipeline, ppo, sft
from stages.finished import seal_of
from stages.running.files import hash_files
from stages.settings import config as settings
from stages.settings.checks import HIDDEN, in_one_line
from stages.settings.command_line import make_config
from tests import bad_inputs
from tests.chat_server import ask, serving
from tests.fabricated_runs import fabricate
from tests.test_errors import PAIR, POST, POSTS, write

ROOT = Path(__file__).parents[1]
NAMED = ["--preset", "tiny", "--name", "x", "--data", "data"]


def named(rows: list) -> list:
    """The rows of a table, each called by its place and its line."""
    return [
        pytest.param(*row, id=f"{number} {row[-1]}".encode("ascii", "replace").decode())
        for number, row in enumerate(rows)
    ]


def files() -> dict[str, bytes]:
    """All that lies below the working directory; a folder has no bytes."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}


def one_line(capsys, command: Callable[[], object]) -> str:
    """The only line in which a command ends that must refuse, with status 2."""
    before = files()
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert not HIDDEN.search(said)
    assert "usage:" not in said
    (line,) = [line for line in said.splitlines() if "error: " in line]
    assert said.splitlines()[-1] == line
    assert files() == before
    return line


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A working directory with a small folder of good posts and comparisons."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for part in ("train", "validation"):
        write(tmp_path / f"data/sft_{part}.jsonl", POSTS)
        write(tmp_path / f"data/comparisons_{part}.jsonl", [PAIR] * 3)
    return tmp_path / "data"


@pytest.mark.parametrize(("file", "row", "line"), named(bad_inputs.ROWS))
def test_rows(data, capsys, file, row, line):
    good = json.dumps(POST if file.startswith("sft") else PAIR).encode()
    bad = row.encode() if isinstance(row, str) else row
    bad = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    (data / f"{file}.jsonl").write_bytes(b"\n".join([good, bad, good, b""]))
    assert line in one_line(capsys, lambda: base.main(NAMED))


@pytest.mark.parametrize(("words", "line"), named(bad_inputs.SETTINGS))
def test_settings(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    assert line in one_line(capsys, lambda: sft.main(words.split(" ")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "line"), named(bad_inputs.MAKE))
def test_make_variables(tmp_path, words, line):
    command = ["make", "-f", str(ROOT / "Makefile"), "VENV=", f"PYTHON={sys.executable}"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    typed = subprocess.run(
        [*command, *words.split("|")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert typed.returncode == 2
    assert line in typed.stderr
    assert "Traceback" not in typed.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("what", "change", "line"), named(bad_inputs.MODELS))
def test_models(data, policy_folder, capsys, what, change, line):
    shutil.copytree(policy_folder, "model")
    change(Path("model"))
    own = ["--set", "base.checkpoint=model", "base.tokenizer="]
    assert line in one_line(capsys, lambda: base.main([*NAMED, *own])), what


@pytest.mark.parametrize(("what", "change", "line"), named(bad_inputs.TOKENIZERS))
def test_tokenizers(data, tokenizer_folder, capsys, what, change, line):
    shutil.copytree(tokenizer_folder, "tokenizer")
    change(Path("tokenizer"))
    words = [*NAMED, "--tokenizer", "tokenizer"]
    assert line in one_line(capsys, lambda: base.main(words)), what


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a fabricated run, whose manifests name all files as those of stages do."""
    root = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        fabricate(make_config("tiny"))
        row: dict[str, Any] = {
            "policy": "ppo",
            "id": "p",
            "order": "policy_first",
            "verdict": "tie",
        }
        Path("runs/tiny/seed44413/judge/facts/judgements.jsonl").write_text(json.dumps(row) + "\n")
        row = {"step": 1, "query": "q", "response": "r"}
        Path("runs/tiny/seed44413/ppo/samples.jsonl").write_text(json.dumps(row) + "\n")
        for path in Path("runs").rglob("manifest.json"):
            made = json.loads(path.read_text())
            made["outputs"] = hash_files(path.parent, ["manifest.json"])
            made["sizes"] = {name: (path.parent / name).stat().st_size for name in made["outputs"]}
            path.write_text(json.dumps(made | {"seal": seal_of(made)}))
    return root


@in_one_line()
def open_cache() -> None:
    ReplyCache(Path("runs/tiny/seed44413/judge_cache"))


COMMANDS: dict[str, Callable[[], object]] = {
    "look": lambda: pipeline.main(["ppo", "--preset", "tiny", "--dry-run"]),
    "page": lambda: run_page.main(["--preset", "tiny"]),
    "replace": lambda: pipeline.main(["ppo", "--preset", "tiny", "--dry-run", "--replace", "1"]),
    "hub": lambda: base.main(["--preset", "pythia-70m"]),
    "cache": open_cache,
    "named": lambda: pipeline.main(["ppo", "--name", "tiny", "--dry-run"]),
    "upstream": lambda: ppo.main(["--preset", "tiny", "--name", "x", "--upstream", "tiny"]),
}


@pytest.mark.parametrize(("change", "command", "line"), named(bad_inputs.STATE))
def test_state_on_disk(finished, tmp_path, monkeypatch, capsys, change, command, line):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "runs/tiny/seed44413")
    assert line in one_line(capsys, COMMANDS[command])


@pytest.mark.parametrize(("name", "content", "line"), named(bad_inputs.OUTPUTS))
def test_outputs(tmp_path, monkeypatch, capsys, name, content, line):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    words = ["--preset", "outputs", "--set", f"outputs.file={name}", "judge.kind=openai"]
    assert line in one_line(capsys, lambda: outputs.main(words))


@pytest.mark.parametrize(("answer", "line"), named(bad_inputs.SERVER))
def test_server(judge_environment, tmp_path, monkeypatch, capsys, answer, line):
    monkeypatch.chdir(tmp_path)

    @in_one_line()
    def question(server) -> None:
        ask(server, max_retries=1)

    with serving(lambda number, body: answer) as server, pytest.raises(SystemExit) as ended:
        question(server)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
    assert not HIDDEN.search(said)


def test_there_are_enough_of_them():
    tables = [value for name, value in vars(bad_inputs).items() if name.isupper()]
    assert sum(len(table) for table in tables if isinstance(table, list)) >= 120
    assert Path("runs") == settings.RUNS


@pytest.mark.parametrize(
    "module", sorted(path.stem for path in (ROOT / "reports").glob("*_page.py"))
)
def test_an_unknown_option_of_a_page_is_one_line(tmp_path, monkeypatch, capsys, module):
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"reports.{module}").main
    said = one_line(capsys, lambda: main(["--no-such-option", "x"]))
    assert "--" in said  # the option that is unknown, or those that are required
