"""Keys, accounts and CORS (docs/api.md, "Authorization")."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from .events import error_of
from .scripted_engine import ScriptedEngine, text_script
from .serving import Served, serve

KEYS = ("first-key", "zweiter-schlüssel")
ORIGIN = "https://app.example"
OPEN = ("/health", "/ready", "/live", "/metrics", "/version")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    """A server with keys and one allowed origin."""
    with serve(ScriptedEngine(lambda _: text_script("x")), api_keys=KEYS, allowed_origins=(ORIGIN,)) as running:
        yield running


def ask(served: Served, authorization: bytes | None, **fields: object) -> httpx.Response:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    return served.client.post("/v1/completions", json={"prompt": "hi", **fields}, headers=headers)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(guarded: Served, key: str) -> None:
    assert ask(guarded, b"Bearer " + key.encode()).status_code == 200
    assert ask(guarded, b"bearer  " + key.encode()).status_code == 200


WRONG = (
    None,
    b"",
    b"Bearer",
    b"Bearer wrong",
    b"Bearer \xff\xfe",
    b"Bearer first-key2",
    b"Basic first-key",
)


@pytest.mark.parametrize("authorization", [*WRONG, "Bearer schlüssel".encode(), b"first-key"])
def test_everything_else_stays_out(guarded: Served, authorization: bytes | None) -> None:
    error = error_of(ask(guarded, authorization), 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_the_key_comes_before_the_body_and_the_path(guarded: Served) -> None:
    error_of(guarded.client.post("/v1/completions", content=b"{"), 401)
    error_of(guarded.client.get("/nothing"), 401)
    error_of(guarded.client.get("/graphs"), 401)
    error_of(guarded.client.get("/v1/models"), 401)


@pytest.mark.parametrize("path", OPEN)
def test_probes_need_no_key(guarded: Served, path: str) -> None:
    assert guarded.client.get(path).status_code == 200


def test_a_key_is_an_account_whatever_the_user_says(guarded: Served) -> None:
    for key in KEYS:
        for user in (None, "ann"):
            ask(guarded, b"Bearer " + key.encode(), user=user)
    clients = [request.client for request in guarded.engine.requests[-4:]]
    assert clients[0] == clients[1] != clients[2] == clients[3]
    assert all(client.startswith("key-") and not any(key in client for key in KEYS) for client in clients)


def test_without_keys_the_user_is_the_account(served: Served) -> None:
    for user in (None, "", "ann", "ann", "bob"):
        assert ask(served, b"Bearer whatever", user=user).status_code == 200
    clients = [request.client for request in served.engine.requests]
    assert clients[:2] == ["", ""]
    assert clients[2] == clients[3] != clients[4]


def preflight(served: Served, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return served.client.options("/v1/chat/completions", headers=headers)


def test_preflight_needs_no_key(guarded: Served) -> None:
    response = preflight(guarded, ORIGIN)
    assert response.status_code in (200, 204)
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers


def test_the_request_after_it_does(guarded: Served) -> None:
    body = {"prompt": "hi"}
    response = guarded.client.post("/v1/completions", json=body, headers={"origin": ORIGIN})
    error_of(response, 401)
    assert response.headers["access-control-allow-origin"] == ORIGIN


def test_other_origins_are_not_reflected(guarded: Served) -> None:
    assert "access-control-allow-origin" not in preflight(guarded, "https://evil.example").headers
    headers = {"origin": "https://evil.example", "authorization": f"Bearer {KEYS[0]}"}
    response = guarded.client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert "access-control-allow-origin" not in response.headers


def test_no_origin_is_allowed_unless_configured(served: Served) -> None:
    assert "access-control-allow-origin" not in preflight(served, ORIGIN).headers
