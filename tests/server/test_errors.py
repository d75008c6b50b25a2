"""Refusals around the endpoints: bodies, sizes, paths, a full queue, own faults (docs/api.md, "Errors")."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import ANY

import pytest
from structlog.testing import capture_logs

from flare.server.engine_api import Health, QueueFull

from .events import error_of
from .scripted_engine import ScriptedEngine
from .serving import SMALL_LIMITS, Served, serve

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
MALFORMED = (
    *(b'{"model":"m",x}', b"", b'{"prompt":"a"', b"\xff\xfe", b"[]", b"true", b"null", b"123", b'"s"', b"{}{}"),
    *(b'{"prompt":"\\ud800"}', b'{"\xff":1}', b'{"x":' + b"[" * 60_000, b'{"a":' * 10_000, b"nan", b"NaN"),
    b"9" * 5000,
)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_bodies(served: Served, path: str, body: bytes) -> None:
    assert error_of(served.client.post(path, content=body), 400, ANY)["type"] == "invalid_request_error"
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("text", [r"\ud800", r"\ud800 and more", r"\udc00", r"\ud83d\ud83d"])
def test_half_of_a_surrogate_pair(served: Served, text: str) -> None:
    for body in (f'{{"prompt":"{text}"}}', f'{{"{text}":NaN}}'):
        error = error_of(served.client.post("/v1/completions", content=body), 400)
        assert "half of a UTF-16 surrogate pair" in error["message"]


def test_a_number_of_many_digits(served: Served) -> None:
    body = b'{"prompt":"hi","max_tokens":' + b"9" * 5000 + b"}"
    assert served.client.post("/v1/completions", content=body).status_code == 400


def test_wrong_paths_and_methods(served: Served) -> None:
    assert error_of(served.client.get("/v1/nothing"), 404)["type"] == "not_found_error"
    assert error_of(served.client.post("/v1/completions/"), 404)["code"] == "not_found"
    response = served.client.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    error_of(served.client.delete("/v1/models"), 405)


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_other_media_types(served: Served, media: str) -> None:
    response = served.client.post("/v1/completions", content=b'{"prompt":"hi"}', headers={"content-type": media})
    assert "application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize("media", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
def test_json_media_types(served: Served, media: str) -> None:
    response = served.client.post("/v1/completions", content=b'{"prompt":"hi"}', headers={"content-type": media})
    assert response.status_code == 200


def test_compressed_bodies(served: Served) -> None:
    error_of(served.client.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"}), 415)


def test_a_declared_size_is_refused_before_reading(served: Served) -> None:
    response = served.client.post("/v1/completions", json={"prompt": "x" * (SMALL_LIMITS.body_bytes + 1)})
    assert error_of(response, 413)["code"] == "body_too_large"


def test_an_undeclared_size_is_refused_while_reading(served: Served) -> None:
    """The client sends a hundred times the limit without saying so."""

    def chunks() -> Iterator[bytes]:
        yield b'{"prompt":"'
        for _ in range(100):
            yield b"x" * SMALL_LIMITS.body_bytes

    error_of(served.client.post("/v1/completions", content=chunks()), 413)
    assert served.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_a_large_body_within_the_limit_is_parsed_off_the_loop(served: Served) -> None:
    body = {"prompt": [7] * (SMALL_LIMITS.inline_bytes), "max_tokens": 1}
    error_of(served.client.post("/v1/completions", json=body), 400, "prompt")
    body = {"messages": [{"role": "user", "content": "hi"}] * 1000}
    error_of(served.client.post("/v1/chat/completions", json=body), 400, "messages")


def test_a_full_queue(served: Served) -> None:
    served.engine.refusal = QueueFull(7)
    for stream in (False, True):
        response = served.client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert error_of(response, 503)["code"] == "queue_full"
        assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("health", [Health.LOADING, Health.DRAINING, Health.DEAD])
def test_no_requests_unless_serving(served: Served, health: Health) -> None:
    served.engine.health = health
    response = served.client.post("/v1/completions", json={"prompt": "hi"})
    assert error_of(response, 503)["code"] == "not_serving"
    assert "retry-after" in response.headers
    for path in ("/health", "/ready"):
        answer = served.client.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": health.value})
    assert served.client.get("/live").status_code == 200


def test_the_servers_own_faults_keep_their_secrets(served: Served) -> None:
    served.engine.refusal = ZeroDivisionError("secret detail")
    with capture_logs() as lines:
        error = error_of(served.client.post("/v1/completions", json={"prompt": "hi"}), 500)
    assert [line["event"] for line in lines] == ["server.internal_error"]
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    served.engine.refusal = None
    assert served.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_without_a_chat_template() -> None:
    with serve(ScriptedEngine(), chat=None) as served:
        response = served.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert "/v1/completions" in error_of(response, 400, "messages")["message"]
