"""Who may ask, and for whose account.

Owns the key check and the client's account. Does not own CORS (starlette's middleware stands before this one).
Surprising rule: keys are compared as bytes, every one of them, whatever the header holds, so that neither time nor
encoding tells anything about them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/live", "/metrics", "/version"})
"""Paths for probes and scrapers, which hold no key."""

CLIENT_SCOPE = "flare.client"


class KeyCheck:
    """ASGI middleware: 401 without a configured key, where any is configured."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            key = bearer(scope)
            # Counted rather than searched: no key may be skipped because an earlier one matched.
            if sum(hmac.compare_digest(key, known) for known in self._keys) == 0:
                await error_response(_unauthorized())(scope, receive, send)
                return
            scope[CLIENT_SCOPE] = account("key", key)
        await self._app(scope, receive, send)


def bearer(scope: Scope) -> bytes:
    """The bytes after `Bearer ` in the Authorization header; empty where there are none."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return bytes(key.strip()) if scheme.lower() == b"bearer" else b""
    return b""


def client_of(scope: Scope) -> str:
    """The account of a request: its key's, else its user's, else the one of everybody, the empty string."""
    client: str = scope.get(CLIENT_SCOPE, "")
    return client


def name_user(scope: Scope, user: str | None) -> None:
    """Give the request to the account of `user`, unless a key has an account already."""
    if user and CLIENT_SCOPE not in scope:
        scope[CLIENT_SCOPE] = account("user", user.encode())


def account(kind: str, secret: bytes) -> str:
    """A short stable name that reveals neither keys nor people."""
    return f"{kind}-{hashlib.sha256(secret).hexdigest()[:12]}"


def _unauthorized() -> ApiError:
    message = "A valid API key is required: send it as `Authorization: Bearer KEY`."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
