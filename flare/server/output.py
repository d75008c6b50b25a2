"""What a request produced, gathered for an answer in one piece.

Owns collecting streams while watching the client. Does not own how an answer looks (`shapes`). Surprising rule:
starlette notices a client's departure only while it streams, so that here a task waits for the disconnect message.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from flare.machines.request import EndReason
from flare.request import Delta, join

from .engine_api import OutputStream


class NothingToGenerate:
    """The output of a request for no tokens, which asks nothing of the engine."""

    def __init__(self) -> None:
        self._left = [Delta(finish_reason=EndReason.LENGTH)]

    def __aiter__(self) -> NothingToGenerate:
        return self

    async def __anext__(self) -> Delta:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()

    def cancel(self) -> None:
        self._left.clear()


async def collect(streams: Sequence[OutputStream], receive: Receive) -> list[Delta]:
    """The whole output of every stream, in order.

    However it ends, no stream runs on: a failed one or a departed client cancels them all. Raises what the first failed
    stream raised, or `ClientDisconnect`.
    """
    outputs: list[list[Delta]] = [[] for _ in streams]
    failures: list[Exception] = []

    async def read(stream: OutputStream, output: list[Delta]) -> None:
        try:
            async for delta in stream:
                output.append(delta)
        except Exception as error:  # noqa: BLE001 - kept, and raised below for the one translation
            failures.append(error)
            readers.cancel_scope.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        failures.append(ClientDisconnect())
        readers.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            async with anyio.create_task_group() as readers:
                for stream, output in zip(streams, outputs, strict=True):
                    readers.start_soon(read, stream, output)
            group.cancel_scope.cancel()
    finally:
        for stream in streams:
            stream.cancel()
    if failures:
        raise failures[0]
    return [join(output) for output in outputs]
