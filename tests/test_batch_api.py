"""The batch API: half the price, resumed after a kill, and nothing paid for twice."""

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval.judge import make_judge
from eval.judges.protocol import Comparison, judge_all
from stages.settings.config import UserError
from tests.chat_server import chat, llm_config

pytestmark = pytest.mark.usefixtures("judge_environment")
ROOT = Path(__file__).parents[1]
PRICES = {"input_price": 100, "output_price": 1000}  # a reply costs 0.20 USD, in a batch 0.10


class BatchServer:
    """Files and batches of the OpenAI protocol; a batch is done at its third look.

    Keeps its state here, so that a client may be killed and come back.
    """

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.answered: list[str] = []
        self.single = 0
        self.looks = 3
        self.url = ""

    def verdict(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line of the result: post 1 fails once, post 2 is cut off at 100 tokens."""
        prompt = line["body"]["messages"][0]["content"]
        whole = {"id": "r", "custom_id": line["custom_id"], "error": None}
        if "post 1." in prompt and len(self.batches) == 1:
            return {**whole, "response": {"status_code": 500, "body": {"error": "down"}}}
        cut = "post 2." in prompt and line["body"]["max_tokens"] == 100
        self.answered.append(line["custom_id"])
        body = chat("Preferred: B", "length" if cut else "stop")[1]
        return {**whole, "response": {"status_code": 200, "request_id": "q", "body": body}}

    def finish(self, batch: dict[str, Any]) -> None:
        lines = [json.loads(one) for one in self.files[batch["input_file_id"]].splitlines()]
        results = [self.verdict(one) for one in lines]
        for kind, good in (("output", True), ("error", False)):
            some = [one for one in results if (one["response"]["status_code"] == 200) == good]
            if some:
                name = f"{batch['id']}-{kind}"
                self.files[name] = "".join(json.dumps(one) + "\n" for one in some)
                batch[f"{kind}_file_id"] = name
        batch["status"] = "completed"

    def get(self, path: str) -> Any:
        *_, kind, name = path.split("?")[0].rstrip("/").split("/")
        if name == "content":
            return self.files[kind]
        if name == "batches":
            rows = list(self.batches.values())
            return {"object": "list", "data": rows, "has_more": False}
        batch = self.batches[name]
        batch["looks"] += 1
        if batch["looks"] == self.looks:
            self.finish(batch)
        return batch

    def post(self, path: str, headers: Any, content: bytes) -> Any:
        if path.endswith("/chat/completions"):
            self.single += 1
            return chat("Preferred: B")[1]
        if path.endswith("/files"):
            head = f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode()
            (file,) = [
                part.get_payload(decode=True)
                for part in BytesParser().parsebytes(head + content).walk()
                if part.get_filename()
            ]
            name = f"file-{len(self.files)}"
            assert isinstance(file, bytes)
            self.files[name] = file.decode()
            return {"id": name, "object": "file", "purpose": "batch"}
        name = f"batch-{len(self.batches)}"
        asked = json.loads(content)
        assert (asked["endpoint"], asked["completion_window"]) == ("/v1/chat/completions", "24h")
        self.batches[name] = {
            **{"id": name, "object": "batch", "status": "in_progress", "looks": 0},
            **asked,
        }
        return self.batches[name]


@contextmanager
def batch_server() -> Iterator[BatchServer]:
    server = BatchServer()

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: Any) -> None:
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self):
            self.reply(server.get(self.path))

        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(server.post(self.path, self.headers, content))

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        try:
            yield server
        finally:
            http.shutdown()


def questions(count: int) -> list[Comparison]:
    return [Comparison("p", f"post {k}.", "one", "two") for k in range(count)]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("eval.judges.openai.batch_api.POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_a_batch_is_asked_again_for_what_failed_or_was_cut_off_and_costs_half(runs, capsys):
    with batch_server() as server:
        config = llm_config(server, batch=True, **PRICES)
        replies = list(judge_all(make_judge(config, {}), questions(8), 2))
        assert [reply.choice for reply in replies] == ["B"] * 8
        # One by itself, seven in the first batch, the failed and the cut-off one in the second.
        assert (server.single, len(server.batches), len(server.answered)) == (1, 2, 8)
        assert len(set(server.answered)) == 8
        list(judge_all(make_judge(config, {}), questions(8), 2))
        assert (server.single, len(server.batches)) == (1, 2)
    with sqlite3.connect(runs / "judge_cache" / "replies.sqlite") as file:
        ((spent,),) = file.execute("SELECT SUM(usd) FROM tries").fetchall()
        assert file.execute("SELECT name FROM notes WHERE name LIKE 'batch %'").fetchall() == []
    assert spent == pytest.approx(0.20 + 8 * 0.10)
    out = capsys.readouterr().out
    assert "0 of 8 replies" in out


@pytest.mark.usefixtures("quick")
def test_a_batch_is_split_at_the_servers_limits(monkeypatch):
    monkeypatch.setattr("eval.judges.openai.batch_api.MOST_REQUESTS", 3)
    with batch_server() as server:
        list(judge_all(make_judge(llm_config(server, batch=True), {}), questions(9), 2))
        sizes = [
            len(server.files[one["input_file_id"]].splitlines()) for one in server.batches.values()
        ]
    assert sizes[:3] == [3, 3, 2]
    monkeypatch.setattr("eval.judges.openai.batch_api.MOST_BYTES", 3000)
    with batch_server() as server:
        list(judge_all(make_judge(llm_config(server, batch=True), {}), questions(9), 2))
        files = [server.files[one["input_file_id"]] for one in server.batches.values()]
    assert all(len(file) <= 3000 for file in files)
    assert len(files) >= 4


@pytest.mark.usefixtures("quick")
def test_a_batch_that_could_cross_the_cap_is_not_sent():
    with batch_server() as server:
        config = llm_config(server, batch=True, max_cost=0.8, **PRICES)
        with pytest.raises(UserError, match=r"judge.max_cost=0.8"):
            list(judge_all(make_judge(config, {}), questions(30), 2))
    assert (server.single, server.files) == (1, {})


@pytest.mark.usefixtures("quick")
def test_a_batch_of_which_nothing_comes_back_stops_with_one_line(monkeypatch):
    monkeypatch.setattr(
        BatchServer,
        "verdict",
        lambda self, line: {
            "custom_id": line["custom_id"],
            "response": {"status_code": 400, "body": {"error": "no\nsuch thing"}},
        },
    )
    with batch_server() as server, pytest.raises(UserError, match=r"no.*such thing"):
        list(judge_all(make_judge(llm_config(server, batch=True), {}), questions(3), 2))
    assert len(server.batches) == 1


@pytest.mark.usefixtures("quick")
def test_a_batch_that_was_left_is_collected_without_the_batch_api_too(runs, monkeypatch, capsys):
    """Left under way: named. Left and done: its replies are not paid for again."""
    with batch_server() as server:
        config = llm_config(server, batch=True, **PRICES)
        with monkeypatch.context() as patch:
            patch.setattr("eval.judges.openai.batch_api.Batches._wait", kill)
            with pytest.raises(KeyboardInterrupt):
                list(judge_all(make_judge(config, {}), questions(8), 2))
        single = llm_config(server, **PRICES)
        server.looks = 10**9
        list(judge_all(make_judge(single, {}), questions(1), 2))
        assert "batch-0 is under way" in capsys.readouterr().out
        assert server.single == 1
        server.batches["batch-0"]["looks"], server.looks = 0, 1
        list(judge_all(make_judge(single, {}), questions(8), 2))
        # The one that failed and the one that was cut off.
        assert (server.single, len(server.batches)) == (3, 1)
    with sqlite3.connect(runs / "judge_cache" / "replies.sqlite") as file:
        ((spent,),) = file.execute("SELECT SUM(usd) FROM tries").fetchall()
    assert spent == pytest.approx(3 * 0.20 + 6 * 0.10)


def kill(*args):
    raise KeyboardInterrupt


@pytest.mark.usefixtures("quick")
def test_a_line_that_is_no_json_or_hides_its_tokens_spoils_no_other(runs, monkeypatch):
    finish = BatchServer.finish

    def spoil(self, batch):
        finish(self, batch)
        name = batch["output_file_id"]
        lines = [json.loads(one) for one in self.files[name].splitlines()]
        del lines[-1]["response"]["body"]["usage"]
        self.files[name] = "\n".join(["{cut", "7", *map(json.dumps, lines)])

    monkeypatch.setattr(BatchServer, "finish", spoil)
    with batch_server() as server:
        config = llm_config(server, batch=True, **PRICES)
        replies = list(judge_all(make_judge(config, {}), questions(1) + questions(8)[3:], 2))
    assert [reply.choice for reply in replies] == ["B"] * 6
    with sqlite3.connect(runs / "judge_cache" / "replies.sqlite") as file:
        ((spent,),) = file.execute("SELECT SUM(usd) FROM tries").fetchall()
    assert 0.20 + 4 * 0.10 + 0.10 < spent < 0.20 + 4 * 0.10 + 0.13  # at the most 0.24 / 2


DRIVER = """
import sys
from dataclasses import replace
from pathlib import Path
import eval.judges.openai.batch_api
from eval.judge import make_judge
from eval.judges.protocol import judge_all
from stages.settings import config as settings
from tests.test_batch_api import PRICES, questions
from tests.chat_server import llm_config
from types import SimpleNamespace
eval.judges.openai.batch_api.POLL_SECONDS = 0.05
settings.RUNS = Path(sys.argv[2])
config = llm_config(SimpleNamespace(url=sys.argv[1]), batch=True, **PRICES)
replies = list(judge_all(make_judge(config, {}), questions(8), 2))
print([reply.choice for reply in replies])
"""


def test_a_killed_process_finds_its_batch_again(runs, monkeypatch):
    """Killed while it waits; once more with the batch's id forgotten, as if killed before that."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with batch_server() as server:
        server.looks = 10**9
        command = [sys.executable, "-c", DRIVER, server.url, str(runs)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            while "under way" not in process.stdout.readline():
                assert process.poll() is None
            process.kill()
        path = runs / "judge_cache" / "replies.sqlite"
        with sqlite3.connect(path) as file:
            ((name, value),) = file.execute("SELECT * FROM notes WHERE name LIKE 'batch %'")
            forgotten = json.dumps({**json.loads(value), "batch": None})
            file.execute("UPDATE notes SET value = ? WHERE name = ?", (forgotten, name))
        assert len(server.batches) == 1
        server.batches["batch-0"]["looks"], server.looks = 0, 2
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        assert done.stdout.splitlines()[-1] == str(["B"] * 8)
        assert (server.single, len(server.batches), len(server.answered)) == (1, 2, 8)
