"""A chat server for the tests, replies that it can give, and judges that ask it."""

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

# A usable reply, which prefers the summary that is shown first.
GOOD = "Comparison: the first one is accurate.\nPreferred: A"

# From the number of a request, from 0, and its body to status, body and perhaps headers.
Answer = Callable[[int, Any], Any]


class Server(ThreadingHTTPServer):
    """Does not print that a client has hung up."""

    request_queue_size = 64

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serving(answer: Answer) -> Iterator[SimpleNamespace]:
    """Serve chat completions; yields the server's `url` and the `requests` that it received.

    A body that `answer` gives as text is sent as it is, and any other as JSON. Without headers,
    the client is told to try again after a millisecond.
    """
    server = SimpleNamespace(requests=[])
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            with lock:
                number = len(server.requests)
                server.requests.append(request)
            if self.path == "/v1/chat/completions":
                self.send(*answer(number, request))
            else:
                self.send(404, {})

        def send(self, status, body, headers=None):
            if isinstance(body, str):
                content_type = "text/html"
                content = body.encode()
            else:
                content_type = "application/json"
                content = json.dumps(body).encode()
            if headers is None:
                headers = {"retry-after-ms": "1"}
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
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


# -- answers ---------------------------------------------------------------------------------------


def chat(text: Any, finish_reason: str = "stop", **changes: Any) -> tuple[int, Any]:
    """A completion, for which 1,000 tokens were read and 100 written."""
    message = {"role": "assistant", "content": text}
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "model": "judge-2024-01-01",
        "usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100},
    }
    return 200, completion | changes


def always(reply: Any) -> Answer:
    """Answer every request with this reply."""
    return lambda number, body: reply


def in_turn(*replies: Any) -> Answer:
    """Answer the first request with the first reply, and so on; further requests break."""
    return lambda number, body: replies[number]


def prompt_of(body: Any) -> str:
    """The text that a request asks about."""
    return str(body["messages"][-1]["content"])


# -- judges ----------------------------------------------------------------------------------------


def llm_config(server: Any, **changes):
    """The config of a run whose judge asks this server."""
    judge = JudgeSettings(model="judge", base_url=server.url, max_tokens=100, concurrency=2)
    return make_config("tiny").changed(judge=judge.changed(**changes))


def ask(server: SimpleNamespace, **changes) -> Reply:
    """The reply of a new judge to one question, always the same one."""
    judge = make_judge(llm_config(server, **changes), {})
    question = Comparison(post_id="p", query="the post", first="one", second="two")
    return judge.reply(question)


def questions(count: int) -> list[Comparison]:
    """Questions about the posts p0, p1, ..."""
    return [
        Comparison(post_id=f"p{number}", query=f"post {number}.", first="one", second="two")
        for number in range(count)
    ]
