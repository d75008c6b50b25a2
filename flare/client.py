"""What the clients of a server share: its address and its list of models.

Owns how `--url` is read and how a model is chosen where none is named. Does not own connections: each client has its
own. Surprising rule: the address is meant without /v1, and people copy it with.
"""

from __future__ import annotations

import msgspec


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def base_url(url: str) -> str:
    """The address without /v1 and slashes at its end."""
    return url.rstrip("/").removesuffix("/v1")


def first_model(listing: bytes) -> str:
    """The first name in an answer of GET /v1/models. Raises ValueError if there is none."""
    try:
        return msgspec.json.decode(listing, type=_Models).data[0].id
    except (msgspec.DecodeError, IndexError):
        raise ValueError("the server lists no model; name one with --model") from None
