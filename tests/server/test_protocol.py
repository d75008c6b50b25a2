"""Connections as hostile or broken clients make them: raw sockets against the HTTP protocol."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from flare.server import protocol

from .scripted_engine import text_script
from .serving import Served
from .test_cancel import eventually, send

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LIMIT_S = 20.0


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=LIMIT_S)) as connection:
        yield connection


def read_all(connection: socket.socket) -> tuple[int, bytes]:
    """The status and body of the only answer, after which the connection must close."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert received.count(b"HTTP/1.1 ") == 1
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "garbage",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_of_the_usual_shape(served: Served, garbage: bytes) -> None:
    with connected(served) as connection:
        connection.sendall(garbage)
        status, body = read_all(connection)
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("line", [b"X: " + b"a" * 8000 + b"\r\n", b"a" * 8000])
def test_an_endless_head_is_refused(served: Served, line: bytes) -> None:
    """Many headers, and one that never ends."""
    with connected(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(protocol.HEAD_BYTES_MAX // 8000 + 1):
            connection.sendall(line)
        status, body = read_all(connection)
    assert status == 431
    assert str(protocol.HEAD_BYTES_MAX) in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(
    served: Served, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S_MAX", 0.05)
    with connected(served) as connection:
        connection.sendall(begun)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_is_noticed_behind_a_pipelined_request(served: Served, stream: bool) -> None:
    """Reading once stopped at the second request, and the first ran to its end for nobody."""
    served.engine.script = lambda _: text_script("hello", hold_after=1)
    connection = send(served, "/v1/completions", stream=stream)
    eventually(lambda: served.running() == 1)
    connection.sendall(POST + b"Content-Length: 15\r\n\r\n" + b'{"prompt":"hi"}')
    connection.close()
    eventually(lambda: served.running() == 0)
    assert [scripted.cancelled for scripted in served.engine.streams] == [True]


def test_a_pipelined_request_is_left_unanswered(served: Served) -> None:
    """The connection closes behind the first answer, and the client may send the second again."""
    served.engine.script = lambda _: text_script("hello", hold_after=1)
    with closing(send(served, "/v1/completions")) as connection:
        eventually(lambda: served.running() == 1)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        served.release()
        connection.settimeout(LIMIT_S)
        status, body = read_all(connection)
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "hello")
