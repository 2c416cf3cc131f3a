"""A chat server for the tests, and the settings that ask it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from eval.judge import make_judge
from eval.judges.protocol import Comparison, Reply
from stages.config.command_line import make_config
from stages.config.judge import JudgeSettings

GOOD = "Comparison: the first one is accurate.\nPreferred: A"


class Server(ThreadingHTTPServer):
    """Does not print that a client has hung up."""

    request_queue_size = 64

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serving(answer: Callable[[int, Any], Any]) -> Iterator[SimpleNamespace]:
    """A chat server's `url` and `requests`; `answer(number, request)` gives status, body and, if
    it likes, headers."""
    server = SimpleNamespace(requests=[])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
            known = self.path == "/v1/chat/completions"
            status, reply, *headers = answer(number, body) if known else (404, {})
            content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            kind = "text/html" if isinstance(reply, str) else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            for name, value in (headers[0] if headers else {"retry-after-ms": "1"}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with Server(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        threading.Thread(target=http.serve_forever, args=(0.01,)).start()
        try:
            yield server
        finally:
            http.shutdown()


def chat(text: Any, finish_reason: str = "stop", **changes: Any) -> tuple[int, Any]:
    """A whole reply, of 1,000 tokens read and 100 written."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    completion = {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    return 200, {**completion, "model": "judge-2024-01-01", "usage": usage, **changes}


def llm_config(server: Any, **changes):
    judge = JudgeSettings(model="judge", base_url=server.url, max_tokens=100, concurrency=2)
    return make_config("tiny").changed(judge=judge.changed(**changes))


def ask(server: SimpleNamespace, **changes) -> Reply:
    return make_judge(llm_config(server, **changes), {}).reply(
        Comparison("p", "the post", "one", "two")
    )
