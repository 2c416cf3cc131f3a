"""Connections that break, stall or never end.

The request is sent again; if that does not help, one line says why the judge stopped.
"""

import socket
import struct
import sys
import time
from types import SimpleNamespace

import pytest

from stages.config.errors import UserError
from tests.lib.chat_server import ask
from tests.lib.raw_server import BODY, raw_serving, response

pytestmark = pytest.mark.usefixtures("judge_environment")


def answer_well(number: int, connection: socket.socket) -> None:
    connection.sendall(response())


# -- connections that break ------------------------------------------------------------------------


def cut_in_the_body(connection: socket.socket) -> None:
    connection.sendall(response()[:-40])


def cut_without_a_length(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY[:-40])


def cut_in_a_chunk(connection: socket.socket) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head + b"ff\r\n" + BODY[:100])


def cut_in_the_headers(connection: socket.socket) -> None:
    connection.sendall(response()[:30])


def closed_without_a_byte(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def reset_in_the_body(connection: socket.socket) -> None:
    connection.sendall(response()[:-40])
    time.sleep(0.05)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def no_http(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


BREAKS = [
    cut_in_the_body,
    cut_without_a_length,
    cut_in_a_chunk,
    cut_in_the_headers,
    closed_without_a_byte,
    reset_in_the_body,
    no_http,
]


@pytest.mark.parametrize("break_connection", BREAKS)
def test_a_request_whose_connection_breaks_once_is_sent_again(break_connection):
    def answer(number: int, connection: socket.socket) -> None:
        if number == 0:
            break_connection(connection)
        else:
            answer_well(number, connection)

    with raw_serving(answer) as server:
        reply = ask(server, max_retries=1)

    assert reply.choice == "A"
    assert server.requests == 2


@pytest.mark.parametrize("break_connection", BREAKS)
def test_a_connection_that_always_breaks_stops_the_judge_with_one_line(break_connection):
    with (
        raw_serving(lambda number, connection: break_connection(connection)) as server,
        pytest.raises(UserError, match=r"^judge judge: .*run the same command again") as stop,
    ):
        ask(server, max_retries=2)

    assert server.requests == 3
    assert "\n" not in str(stop.value)


# -- replies that take too long --------------------------------------------------------------------


def trickle(connection: socket.socket, text: bytes) -> None:
    """Send two bytes every 0.1 s: each comes in time, and all of them take half a minute."""
    for start in range(0, len(text), 2):
        connection.sendall(text[start : start + 2])
        time.sleep(0.1)


def trickling_body(connection: socket.socket) -> None:
    head, _, body = response().partition(b"\r\n\r\n")
    connection.sendall(head + b"\r\n\r\n")
    trickle(connection, body)


def trickling_headers(connection: socket.socket) -> None:
    trickle(connection, response())


def trickling_error(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 999\r\n\r\n")
    trickle(connection, b" " * 999)


def stalled_body(connection: socket.socket) -> None:
    connection.sendall(response()[:-40])
    time.sleep(30)


@pytest.mark.parametrize(
    "answer_slowly", [trickling_body, trickling_headers, trickling_error, stalled_body]
)
def test_request_seconds_is_the_limit_for_a_complete_reply(answer_slowly):
    start = time.monotonic()
    with (
        raw_serving(lambda number, connection: answer_slowly(connection)) as server,
        pytest.raises(UserError, match=r"no reply within 0.5 s: raise judge\.request_seconds"),
    ):
        ask(server, request_seconds=0.5, max_retries=1)

    assert server.requests == 2
    assert time.monotonic() - start < 5


def test_a_reply_that_never_ends_is_given_up_at_the_maximum_size():
    sent_bytes = []

    def endless(number: int, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            sent_bytes.append(65536)

    with (
        raw_serving(endless) as server,
        pytest.raises(UserError, match="a reply has more than 4,000,000 bytes"),
    ):
        ask(server, max_retries=0)

    assert sum(sent_bytes) < 40_000_000  # what the sockets' buffers take beyond the 4 MB


def test_a_server_that_does_not_exist_stops_the_judge_with_one_line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free_port = listener.getsockname()[1]

    with pytest.raises(UserError, match=r"[Cc]onnect.*run the same command again"):
        ask(SimpleNamespace(url=f"http://127.0.0.1:{free_port}/v1"), max_retries=1)


# -- proxies and certificates ----------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["ALL_PROXY", "https_proxy"])
def test_a_socks_proxy_without_its_package_stops_the_judge_with_one_line(monkeypatch, variable):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv(variable, "socks5://127.0.0.1:1080")

    with (
        raw_serving(answer_well) as server,
        pytest.raises(UserError, match=r"ALL_PROXY needs a package: .*socksio"),
    ):
        ask(server)


def test_an_invalid_proxy_address_is_reported_without_its_password(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "ftp://me:pa55word@127.0.0.1:1080")

    with (
        raw_serving(answer_well) as server,
        pytest.raises(UserError, match=r"HTTP_PROXY.* is not the address of a proxy") as stop,
    ):
        ask(server)

    assert "pa55word" not in str(stop.value)


def test_unreadable_certificates_stop_the_judge_with_one_line(monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "nowhere.pem")

    with pytest.raises(UserError, match=r"certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot"):
        ask(SimpleNamespace(url="https://judge.example/v1"), max_retries=0)


def test_a_proxy_that_does_not_answer_is_named_as_a_possible_cause(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    with pytest.raises(UserError, match=r"http://judge\.example/v1/: .*check .*HTTP_PROXY"):
        ask(SimpleNamespace(url="http://judge.example/v1"), max_retries=0)
