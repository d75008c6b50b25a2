"""What the HTTP layer asks of the engine.

Owns the contract alone: the engine (`flare/engine`) implements it, tests of the wire implement it with a script.
Surprising rule: `submit` is all or nothing, so that the choices of one HTTP request never run without each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from flare.request import Delta, GenerationRequest


class Health(StrEnum):
    """Where the engine stands. It accepts requests while SERVING alone."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


class QueueFull(Exception):
    """The bounded queue has no room; try again after `retry_after_s` whole seconds (at least 1)."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotServing(Exception):
    """The engine accepts no requests now: it loads, drains or has died."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestFailed(Exception):
    """The frame that served the request failed; the server lives on. The message is fit for the client."""


class ServerStopping(Exception):
    """The grace time of a shutdown ended before the request did. The message is fit for the client."""


class OutputStream(Protocol):
    """The output of one request: iterate once. The delta with a `finish_reason` is the last.

    Deltas that the reader was too slow for are merged, so nothing grows without bound. `__anext__` raises
    `RequestFailed` or `ServerStopping` where the output ends early, and `StopAsyncIteration` after the last delta or
    a cancellation.
    """

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> Delta: ...

    def cancel(self) -> None:
        """Give the request up: its slot is free within two frames. Idempotent; harmless after the end."""
        ...


class EngineApi(Protocol):
    """The engine as the HTTP layer sees it; every call is made on its event loop."""

    def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[OutputStream]:
        """Accept all requests or none, and return a stream for each, in order. Raises `QueueFull`, `NotServing`."""
        ...

    @property
    def health(self) -> Health:
        """Where the engine stands now."""
        ...

    def graphs(self) -> Sequence[dict[str, object]]:
        """The catalog as JSON objects: name, kind, batch, prefill_tokens and measured durations."""
        ...
