"""Clients that leave (docs/api.md, "Leaving")."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from .scripted_engine import text_script
from .serving import Served

PATIENCE_S = 20.0
PATHS = ("/v1/completions", "/v1/chat/completions")


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it holds; the limit only ends a test that fails."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def send(served: Served, path: str, **fields: object) -> socket.socket:
    """Send a request over a connection of its own."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = json.dumps({**prompt, "max_tokens": 100, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hold_after", [0, 3])
def test_leaving_cancels(served: Served, path: str, stream: bool, n: int, hold_after: int) -> None:
    """Before the first token (queued or in prefill), and between tokens."""
    served.engine.script = lambda _: text_script("hello", hold_after=hold_after)
    connection = send(served, path, stream=stream, n=n)
    eventually(lambda: [scripted.delivered for scripted in served.engine.streams] == [hold_after] * n)
    assert served.running() == n
    connection.close()
    eventually(lambda: served.running() == 0)
    assert all(scripted.cancelled for scripted in served.engine.streams)


def test_half_a_close_is_a_leave(served: Served) -> None:
    served.engine.script = lambda _: text_script("hello", hold_after=1)
    connection = send(served, "/v1/completions", stream=True)
    eventually(lambda: served.running() == 1)
    connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: served.running() == 0)
    connection.close()


def test_leaving_in_the_middle_of_a_body_asks_nothing(served: Served) -> None:
    connection = socket.create_connection(("127.0.0.1", served.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert served.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
    assert len(served.engine.requests) == 1


def test_finished_requests_are_not_cancelled(served: Served) -> None:
    for stream in (False, True):
        served.client.post("/v1/completions", json={"prompt": "hi", "stream": stream, "n": 2})
    eventually(lambda: served.running() == 0)
    assert all(scripted.ended and not scripted.cancelled for scripted in served.engine.streams)
    assert len(served.engine.streams) == 4


def test_all_leave_at_once(served: Served) -> None:
    served.engine.script = lambda _: text_script("hello", hold_after=2)
    connections = [send(served, "/v1/completions", stream=index % 2 == 0) for index in range(16)]
    eventually(lambda: served.running() == 16)
    for connection in connections:
        connection.close()
    eventually(lambda: served.running() == 0)
