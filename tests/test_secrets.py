"""Neither a key nor a password reaches a file, the terminal or a page, whatever goes wrong.

Each test runs the stages of `make judge` in this process, as far as they get. Then everything that
they wrote and printed is searched for the key in all its spellings.
"""

import importlib
import json
import sqlite3
import traceback
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass
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
from tests.lib.rows import write_rows

KEY = "sk-proj-4f8/a9b2+c7d1_E"
PASSWORD = "pa55word-of-mine"
KEY_IN_JSON = json.dumps(KEY).replace("/", "\\/").strip('"')
KEY_IN_ESCAPES = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
KEY_IN_URL = urllib.parse.quote(KEY, safe="")
SECRETS = (KEY, KEY_IN_JSON, KEY_IN_ESCAPES, KEY_IN_URL, PASSWORD)
BEARER = f"Authorization: Bearer {KEY}"
pytestmark = pytest.mark.usefixtures("no_drawing")


# -- a run, and the search through all that it leaves ----------------------------------------------


@pytest.fixture
def options_for(judge_environment, place, monkeypatch):
    """Gives the options of a run that judges two summaries by a server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    write_rows(
        Path("x.jsonl"),
        [
            {"id": 0, "post": "post 0.", "summary": "s 0", "reference": "r"},
            {"id": 1, "post": "post 1.", "summary": "s 1", "reference": "r"},
        ],
    )

    def make(url: str) -> list[str]:
        return [
            "--preset",
            "outputs",
            "--set",
            "outputs.file=x.jsonl",
            "judge.kind=openai",
            "judge.model=judge",
            "judge.max_retries=1",
            f"judge.base_url={url}",
            "checks.control_posts=2",
        ]

    return make


def run_stages(options: list[str]) -> None:
    """Run the stages of `make judge` until one refuses or breaks, and write the page."""
    for stage in (outputs, judge, controls, win_rate):
        run_module(stage, options)
    overrides = options[options.index("--set") + 1 :]
    outputs_page.write_report(make_config("outputs", overrides=tuple(overrides)))


def written_below(folder: Path) -> str:
    """The names and contents of all files, and the rows of the cache."""
    texts = [f"{path}\n{path.read_bytes()!r}" for path in folder.rglob("*") if path.is_file()]
    for path in folder.rglob("*.sqlite"):
        with sqlite3.connect(path) as database:
            rows = database.execute("SELECT * FROM requests").fetchall()
        texts.append(repr(rows))
    return "\n".join(texts)


def run_and_search(options: list[str], capfd: Any, folder: Path) -> str:
    """Run the stages, and return all that they wrote and printed; fail if a secret is in it."""
    with suppress(SystemExit):
        run_stages(options)
    printed = capfd.readouterr()
    everything = written_below(folder) + printed.out + printed.err
    for secret in SECRETS:
        assert secret.lower() not in everything.lower()
    assert "Traceback" not in printed.err
    return everything


def test_the_search_finds_a_key(tmp_path):
    with sqlite3.connect(tmp_path / "x.sqlite") as database:
        database.execute("CREATE TABLE requests (x)")
        database.execute("INSERT INTO requests VALUES (?)", (KEY,))
    (tmp_path / "y").write_text(KEY_IN_ESCAPES)

    everything = written_below(tmp_path)

    assert KEY in everything
    assert KEY_IN_ESCAPES in everything.replace("\\\\", "\\")


# -- what a server answers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a server answers, and a part of what is then printed or kept."""

    answer: tuple[Any, ...]
    """Status, body and, if there are any, headers."""
    shown: str


GOOD_COMPLETION = chat(GOOD)[1]


def with_thought(text: str) -> dict[str, Any]:
    """A completion with the reasoning that led to it."""
    message = {"content": GOOD, "reasoning_content": text}
    return GOOD_COMPLETION | {"choices": [{"message": message, "finish_reason": "stop"}]}


def refusal(text: str) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": text}}


FAULTS = {
    "a reply": Fault(
        answer=chat(f"Comparison: the key is {KEY}.\nPreferred: A"),
        shown="the key is [key]",
    ),
    "a reply in escapes": Fault(
        answer=(200, json.dumps(GOOD_COMPLETION).replace("accurate", KEY_IN_ESCAPES)),
        shown="is [key].",
    ),
    "a thought": Fault(
        answer=(200, with_thought(KEY)),
        shown="accurate",
    ),
    "another model's name": Fault(
        answer=chat(GOOD, model=KEY),
        shown="the reply is [key]'s",
    ),
    "headers": Fault(
        answer=(200, GOOD_COMPLETION, {"x-echo": KEY, "retry-after": KEY}),
        shown="reply",
    ),
    "a bad key": Fault(
        answer=(401, refusal(f"Incorrect API key provided: {KEY}")),
        shown="provided: [key]",
    ),
    "no such model": Fault(
        answer=(404, refusal(f"no model for {KEY_IN_URL}")),
        shown="for [key]",
    ),
    "a web page": Fault(
        answer=(200, f"<html>{BEARER}</html>"),
        shown="Bearer [key]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_key_that_a_server_repeats_is_nowhere(options_for, capfd, tmp_path, fault):
    with serving(lambda number, body: fault.answer) as server:
        everything = run_and_search(options_for(server.url), capfd, tmp_path)
    assert server.requests
    assert fault.shown in everything.replace("\\\\", "\\").replace('\\"', '"')


# -- errors of the client and of our code ----------------------------------------------------------


UNREACHABLE = "http://127.0.0.1:9/v1"


@pytest.fixture
def http():
    """The HTTP library of the client: httpx, or what has taken its place."""
    from openai import OpenAI

    *_, base, _ = type(OpenAI(api_key="x")._client).__mro__
    return importlib.import_module(base.__module__.split(".")[0])


@pytest.fixture
def fail_with(http, monkeypatch):
    """Makes every request fail with an error of this class that contains the key."""

    def patch(error_class: type[Exception]) -> None:
        async def send(self: Any, request: Any, **options: Any) -> Any:
            raise error_class(f"sent: {request.headers['authorization']}")

        monkeypatch.setattr(http.AsyncClient, "send", send)

    return patch


@pytest.mark.parametrize(
    ("error", "shown"), [("ReadTimeout", "no reply within"), ("ConnectError", "Bearer [key]")]
)
def test_a_key_in_an_error_of_the_client_is_nowhere(
    options_for, capfd, tmp_path, http, fail_with, error, shown
):
    fail_with(getattr(http, error))
    assert shown in run_and_search(options_for(UNREACHABLE), capfd, tmp_path)


def test_a_key_is_not_in_the_traceback_of_a_bug_in_the_client(options_for, tmp_path, fail_with):
    fail_with(LookupError)
    with pytest.raises(RuntimeError) as raised:
        run_stages(options_for(UNREACHABLE))
    everything = "".join(traceback.format_exception(raised.value)) + written_below(tmp_path)
    assert "Bearer [key]" in everything
    assert KEY not in everything


def test_a_key_is_not_in_the_traceback_of_a_bug_in_our_code(options_for, tmp_path, monkeypatch):
    def fail(text: str) -> None:
        raise ZeroDivisionError(text)

    monkeypatch.setattr("eval.judges.openai.client.read_completion", fail)
    with (
        serving(lambda number, body: chat(KEY)) as server,
        pytest.raises(ZeroDivisionError) as raised,
    ):
        run_stages(options_for(server.url))
    everything = "".join(traceback.format_exception(raised.value)) + written_below(tmp_path)
    assert "[key]" in everything
    assert KEY not in everything


# -- secrets in settings ---------------------------------------------------------------------------

URL_WITH_PASSWORD = f"http://me:{PASSWORD}@127.0.0.1:9/v1"


def test_a_password_in_the_servers_address_is_refused_before_anything_is_written(place):
    options = ["--preset", "tiny", "--set", f"judge.base_url={URL_WITH_PASSWORD}"]
    with pytest.raises(SystemExit):
        run_module(sft, options)
    assert not (place / "runs").exists()


def test_a_password_in_the_servers_address_is_not_printed(options_for, capfd, tmp_path):
    everything = run_and_search(options_for(URL_WITH_PASSWORD), capfd, tmp_path)
    assert "contains a user name or a password" in everything


def test_a_password_in_the_address_of_the_environment_is_not_printed(
    options_for, capfd, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_BASE_URL", URL_WITH_PASSWORD)
    everything = run_and_search(options_for(""), capfd, tmp_path)
    assert "contains a user name or a password" in everything


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("base_url=http://h/v1?api_key=abcdefgh", "contains a query or a key"),
        ("base_url=http://h/v1/sk-0123456789abcdefgh", "contains a query or a key"),
        ("base_url=http://h/token-of-my-own-server/v1", "contains a query or a key"),
        ("base_url=localhost:8000/v1", "is not an address"),
        ("model=sk-proj-0123456789abcdef", "looks like a key"),
        ("model=aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3aB3", "looks like a key"),
    ],
)
def test_an_address_or_a_model_that_contains_a_key_is_refused_without_repeating_it(
    monkeypatch, setting, error
):
    monkeypatch.setenv("OPENAI_API_KEY", "token-of-my-own-server")
    with pytest.raises(UserError, match=error) as refused:
        make_config("tiny", name="x", overrides=("judge.kind=openai", f"judge.{setting}"))
    _, _, value = setting.partition("=")
    assert value not in str(refused.value)
