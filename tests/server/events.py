"""Reading server-sent events as strictly as they are promised."""

from __future__ import annotations

import json
from typing import Any

import httpx

Json = dict[str, Any]


def read_events(response: httpx.Response) -> list[Json]:
    """All JSON events of a stream that ends with exactly one `[DONE]`. Fails on anything else."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    payloads = split_events(response.content)
    assert payloads[-1] == b"[DONE]"
    assert payloads.count(b"[DONE]") == 1
    return [json.loads(payload) for payload in payloads[:-1]]


def split_events(content: bytes) -> list[bytes]:
    """The data of each event: one `data: ` line and an empty line, with LF alone."""
    assert b"\r" not in content
    assert content.endswith(b"\n\n")
    events = content[:-2].split(b"\n\n")
    for event in events:
        assert event.startswith(b"data: "), event
        assert len(event.decode().splitlines()) == 1, event
    return [event.removeprefix(b"data: ") for event in events]


def texts(events: list[Json], choices: int = 1) -> list[str]:
    """The joined text of every choice, from completions or from chat."""
    joined = [""] * choices
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] += piece
    return joined


def error_of(response: httpx.Response, status: int, param: str | None = None) -> Json:
    """The error of a refused request, checked to have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.content)
    assert list(body) == ["error"]
    error: Json = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    return error
