"""The buffer between the engine and one client.

Owns deltas that were published and not yet read. Does not own text or scheduling. Surprising rule: a reader that is
slow finds its deltas merged into one, so that a buffer never holds more than the request may produce, and a slow socket
never holds up the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from flare.request import Delta, join


class Stream:
    """An output stream: the engine pushes, one reader iterates. All on the event loop."""

    __slots__ = ("_cancel", "_closed", "_error", "_pending", "_wake")

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._pending: list[Delta] = []
        self._error: Exception | None = None
        self._closed = False
        self._wake: anyio.Event | None = None

    def push(self, delta: Delta) -> None:
        """Publish a delta; the one with a finish reason is the last."""
        self._pending.append(delta)
        self._closed = self._closed or delta.finish_reason is not None
        self._notify()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, behind what was published."""
        if not self._closed:
            self._error = error
            self._closed = True
            self._notify()

    def cancel(self) -> None:
        """Give the request up; what was published and not read is dropped. Idempotent."""
        if not self._closed:
            self._closed = True
            self._cancel()
        self._pending.clear()
        self._notify()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        """The next delta. Raises StopAsyncIteration after the last, or the error that ended the stream."""
        while not self._pending:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._closed:
                raise StopAsyncIteration
            self._wake = anyio.Event()
            await self._wake.wait()
        deltas, self._pending = self._pending, []
        return join(deltas)

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake.set()
            self._wake = None
