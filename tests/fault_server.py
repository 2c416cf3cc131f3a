"""A chat server that misbehaves at random, and keeps the books of what it was paid for.

A request gets a fault with a probability of 30 %. The right verdict is in the question: the better
summary says "good". What counts as paid is a whole and right reply that was handed to the socket.
"""

import json
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULT_SHARE = 0.3
SLOW_SECONDS = 2.0  # longer than the judge of the test waits
FAULTS = (
    *("rate limit", "rate limit by date", "server error", "reset", "time-out", "empty body"),
    *("empty text", "truncated", "cut body", "malformed", "wrong letter", "wrong model"),
)


class FaultServer:
    """The books: requests by kind, and whole replies by prompt."""

    def __init__(self, seed: int) -> None:
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.kinds: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()
        self.fault_share = FAULT_SHARE
        self.seconds = 0.005

    def kind_of_next(self) -> str:
        """What the next request will get."""
        with self.lock:
            faulty = self.random.random() < self.fault_share
            kind = self.random.choice(FAULTS) if faulty else "good"
            self.kinds[kind] += 1
        return kind


def verdict(prompt: str) -> str:
    """The letter of the summary that says so itself."""
    shown = re.search(r"<summary-A-\w+>\n(.*?)\n</summary-A", prompt, re.DOTALL)
    assert shown
    return "A" if shown[1].startswith("good") else "B"


def completion(text: str, finish_reason: str = "stop", model: str = "judge") -> str:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    whole = {"id": "1", "object": "chat.completion", "created": 0, "choices": [choice]}
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    return json.dumps({**whole, "model": model, "usage": usage})


class Handler(BaseHTTPRequestHandler):
    """One request; `books` is set by `start`."""

    books: FaultServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a reply that counts as paid lies in the server for 40 ms

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        kind = self.books.kind_of_next()
        time.sleep(self.books.seconds)
        letter = verdict(prompt)
        good = json.dumps({"comparison": "One is better.", "preferred": letter})
        if kind == "good":
            self.send(200, completion(good))
            with self.books.lock:
                self.books.paid[prompt] += 1
        elif kind in ("reset", "cut body", "time-out"):
            self.break_off(kind, completion(good))
        else:
            self.send(*ANSWERS[kind](good, letter))

    def send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def break_off(self, kind: str, text: str) -> None:
        """No reply within the client's patience, half a reply, or a reset."""
        self.close_connection = True
        if kind == "time-out":
            time.sleep(SLOW_SECONDS)
        elif kind == "cut body":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[: len(text) // 2].encode())
        else:
            at_once = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self.connection.close()

    def log_message(self, *args):
        pass


def date(seconds: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + seconds))


ANSWERS: dict[str, Any] = {
    "rate limit": lambda good, letter: (429, "{}", {"Retry-After": "0.1"}),
    "rate limit by date": lambda good, letter: (429, "{}", {"Retry-After": date(0)}),
    "server error": lambda good, letter: (500, '{"error": {"message": "down"}}'),
    "empty body": lambda good, letter: (200, ""),
    "empty text": lambda good, letter: (200, completion("")),
    "truncated": lambda good, letter: (200, completion(good[:-3], "length")),
    "malformed": lambda good, letter: (200, completion(good)[:-9]),
    "wrong letter": lambda good, letter: (200, completion(good.replace(f'"{letter}"', '"C"'))),
    "wrong model": lambda good, letter: (
        200,
        completion(good.replace(f'"{letter}"', '"B"' if letter == "A" else '"A"'), model="other"),
    ),
}


class Server(ThreadingHTTPServer):
    """Dies with the test, and does not print that a killed client has hung up."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address):
        pass


def start(books: FaultServer) -> tuple[Server, str]:
    """A running server and its URL."""
    handler = type("Bound", (Handler,), {"books": books})
    http = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    return http, f"http://127.0.0.1:{http.server_port}/v1"
