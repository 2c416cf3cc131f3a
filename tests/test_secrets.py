"""Neither a key nor a password reaches a file, the terminal, a page or wandb, whatever goes wrong.

Each fault runs the stages of `make judge` in this process, as far as they get, and then everything
that they wrote and said is searched for the key in all its spellings.
"""

import importlib
import json
import sqlite3
import traceback
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eval import controls, judge, outputs, win_rate
from reports import outputs as outputs_page
from stages import sft
from stages.config.command_line import make_config
from stages.config.errors import UserError
from tests.lib.chat_server import GOOD, chat, serving
from tests.lib.make_stages import run_module

KEY = "sk-proj-4f8/a9b2+c7d1_E"
PASSWORD = "pa55word-of-mine"
SPELLED = (
    KEY,
    json.dumps(KEY).replace("/", "\\/")[1:-1],
    "".join(f"\\u{ord(letter):04x}" for letter in KEY),
    urllib.parse.quote(KEY, safe=""),
    PASSWORD,
)
ESCAPED = SPELLED[2]
BEARER = f"Authorization: Bearer {KEY}"
Answer = Callable[[int, Any], Any]
pytestmark = pytest.mark.usefixtures("no_drawing")


def refusal(status: int, text: str = f"what you sent was {BEARER}", **more: Any) -> Answer:
    return lambda number, body: (status, {"error": {"message": text, **more}})


def reply(text: str, **more: Any) -> Answer:
    return lambda number, body: chat(text, **more)


def raw(text: str) -> Answer:
    return lambda number, body: (200, text)


THINKS = {
    **chat(GOOD)[1],
    "choices": [{"message": {"content": GOOD, "reasoning_content": KEY}, "finish_reason": "stop"}],
}
COMPLETION = json.dumps(chat(GOOD)[1])
# What a server does -> a part of what is then said, or kept.
FAULTS: dict[str, tuple[Answer, str]] = {
    "a reply": (reply(f"Comparison: the key is {KEY}.\nPreferred: A"), "the key is [key]"),
    "a reply in escapes": (raw(COMPLETION.replace("accurate", ESCAPED)), "is [key]."),
    "a thought": (lambda number, body: (200, THINKS), "accurate"),
    "another model's name": (reply(GOOD, model=KEY), "the reply is [key]'s"),
    "headers": (lambda number, body: (*chat(GOOD), {"x-echo": KEY, "retry-after": KEY}), "reply"),
    "a bad key": (refusal(401, f"Incorrect API key provided: {KEY}"), "provided: [key]"),
    "no such model": (
        refusal(404, f"no model for {urllib.parse.quote(KEY, safe='')}"),
        "for [key]",
    ),
    "a web page": (raw(f"<html>{BEARER}</html>"), "Bearer [key]"),
}


@pytest.fixture
def words(judge_environment, place, monkeypatch):
    """Gives the command line of a run that judges two summaries by a server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    rows = [
        {"id": k, "post": f"post {k}.", "summary": f"s {k}", "reference": "r"} for k in range(2)
    ]
    Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(url: str) -> list[str]:
        settings = [
            "outputs.file=x.jsonl",
            "judge.kind=openai",
            "judge.model=judge",
        ]
        settings += ["judge.max_retries=1", f"judge.base_url={url}", "checks.control_posts=2"]
        return ["--preset", "outputs", "--set", *settings]

    return make


def run_stages(words: list[str]) -> None:
    """The stages of `make judge`, until one refuses or breaks, and the page."""
    for stage in (outputs, judge, controls, win_rate):
        run_module(stage, words)
    outputs_page.write_report(make_config("outputs", overrides=tuple(words[3:])))


def written(folder: Path) -> str:
    """The names and contents of all files, and the rows of the cache."""
    texts = [f"{path}\n{path.read_bytes()!r}" for path in folder.rglob("*") if path.is_file()]
    for path in folder.rglob("*.sqlite"):
        with sqlite3.connect(path) as file:
            texts += [repr(file.execute(f"SELECT * FROM {name}").fetchall()) for name in TABLES]
    return "\n".join(texts)


TABLES = ("requests",)


def run_and_search(words: list[str], capfd: Any, folder: Path) -> str:
    """All that a run wrote and said, in which no secret is."""
    with suppress(SystemExit):
        run_stages(words)
    shown = capfd.readouterr()
    everything = written(folder) + shown.out + shown.err
    for secret in SPELLED:
        assert secret.lower() not in everything.lower()
    assert "Traceback" not in shown.err
    return everything


@pytest.mark.parametrize("fault", FAULTS)
def test_a_key_that_a_server_repeats_is_nowhere(words, capfd, tmp_path, fault):
    answer, shown = FAULTS[fault]
    with serving(answer) as server:
        everything = run_and_search(words(server.url), capfd, tmp_path)
    assert server.requests
    assert shown in everything.replace("\\\\", "\\").replace('\\"', '"')


def test_the_search_finds_a_key(tmp_path):
    with sqlite3.connect(tmp_path / "x.sqlite") as file:
        for name in TABLES:
            file.execute(f"CREATE TABLE {name} (x)")
        file.execute("INSERT INTO requests VALUES (?)", (KEY,))
    (tmp_path / "y").write_text(ESCAPED)
    everything = written(tmp_path)
    assert KEY in everything
    assert ESCAPED in everything.replace("\\\\", "\\")


@pytest.fixture
def http():
    """The library below the client: httpx, or what has taken its place."""
    from openai import OpenAI

    *_, base, _ = type(OpenAI(api_key="x")._client).__mro__
    return importlib.import_module(base.__module__.split(".")[0])


@pytest.mark.parametrize(
    ("error", "shown"),
    [("ReadTimeout", "no reply within"), ("ConnectError", "Bearer [key]"), (None, "Bearer [key]")],
)
def test_a_key_in_an_error_of_the_client_is_nowhere(
    words, capfd, tmp_path, monkeypatch, http, error, shown
):
    async def fails(self: Any, request: Any, **_: Any) -> Any:
        kind = getattr(http, error) if error else LookupError  # which is a defect
        raise kind(f"sent: {request.headers['authorization']}")

    monkeypatch.setattr(http.AsyncClient, "send", fails)
    try:
        said = run_and_search(words("http://127.0.0.1:9/v1"), capfd, tmp_path)
    except RuntimeError:
        assert error is None
        said = traceback.format_exc() + written(tmp_path)
    assert shown in said
    assert KEY not in said


def test_a_key_is_not_in_the_traceback_of_a_defect_of_ours(words, tmp_path, monkeypatch):
    def breaks(text: str) -> None:
        raise ZeroDivisionError(text)

    monkeypatch.setattr("eval.judges.openai.client.read_completion", breaks)
    with serving(reply(KEY)) as server, pytest.raises(ZeroDivisionError) as broken:
        run_stages(words(server.url))
    said = "".join(traceback.format_exception(broken.value)) + written(tmp_path)
    assert "[key]" in said
    assert KEY not in said


def test_a_password_in_the_servers_address_is_refused_before_anything_is_written(
    words, capfd, tmp_path, monkeypatch
):
    url = f"http://me:{PASSWORD}@127.0.0.1:9/v1"
    with pytest.raises(SystemExit):
        run_module(sft, ["--preset", "tiny", "--set", f"judge.base_url={url}"])
    assert not (tmp_path / "runs").exists()
    assert "contains a user name or a password" in run_and_search(words(url), capfd, tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    assert "contains a user name or a password" in run_and_search(words(""), capfd, tmp_path)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("base_url=http://h/v1?api_key=abcdefgh", "contains a query or a key"),
        ("base_url=http://h/v1/sk-0123456789abcdefgh", "contains a query or a key"),
        ("base_url=http://h/token-of-my-own-server/v1", "contains a query or a key"),
        ("base_url=localhost:8000/v1", "is not an address"),
        ("model=sk-proj-0123456789abcdef", "looks like a key"),
        ("model=aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3", "looks like a key"),
    ],
)
def test_an_address_or_a_model_that_tells_a_key_is_refused_without_repeating_it(
    monkeypatch, setting, line
):
    monkeypatch.setenv("OPENAI_API_KEY", "token-of-my-own-server")
    with pytest.raises(UserError, match=line) as refused:
        make_config("tiny", name="x", overrides=("judge.kind=openai", f"judge.{setting}"))
    assert setting.partition("=")[2] not in str(refused.value)
