"""A server that writes what it likes to its connections, and the text of an HTTP response."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from tests.lib.chat_server import GOOD, chat

BODY = json.dumps(chat(GOOD)[1]).encode()


def response(body: bytes = BODY) -> bytes:
    """A complete HTTP response."""
    head = (
        "HTTP/1.1 200 OK\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n"
        "\r\n"
    )
    return head.encode() + body


def read_request(connection: socket.socket) -> None:
    """Read an HTTP request with its body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)


@contextmanager
def raw_serving(answer: Callable[[int, socket.socket], Any]) -> Iterator[SimpleNamespace]:
    """Serve connections; yields the server's `url` and its number of `requests`.

    `answer(number, connection)` writes to the connection of a request.
    """
    server = SimpleNamespace(requests=0)

    def handle(number: int, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client hangs up
            read_request(connection)
            answer(number, connection)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = listener.accept()
                number = server.requests
                server.requests += 1
                threading.Thread(target=handle, args=(number, connection), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
