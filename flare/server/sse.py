"""Answers in pieces: server-sent events.

Owns the framing of a stream and its end. Does not own a choice's JSON (`shapes`). Surprising rules: a piece of plain
text is three joined byte strings, since 64 streams of 100 tokens/s share one loop; and the streams are cancelled when
the response ends in whatever way, also before its first event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio
import structlog
from anyio.abc import ObjectSendStream
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from flare.request import Delta

from .engine_api import OutputStream
from .envelope import Envelope, json_line
from .errors import error_body, translate
from .shapes import Shape

DONE = b"data: [DONE]\n\n"

log = structlog.get_logger(__name__)


class ChunkWriter:
    """Writes the events of one response. `chunk` is called once a delta, in order for each index."""

    def __init__(self, envelope: Envelope, shape: Shape, choices: int, include_usage: bool) -> None:
        head = json_line(envelope.fields(shape.chunk_name))[:-1]
        self._head = b"data: " + head + b',"choices":['
        self._tail = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        frames = [shape.text_frame(index) for index in range(choices)]
        self._open = [self._head + before for before, _ in frames]
        self._close = [after + self._tail for _, after in frames]
        self._shape = shape
        self._scored = shape.scored
        self._started = [False] * choices
        self._include_usage = include_usage
        self._envelope = envelope
        self._completion_tokens = [0] * choices

    def chunk(self, index: int, delta: Delta) -> bytes | None:
        """The event for a delta; None where there is nothing to tell, such as half of a character."""
        self._completion_tokens[index] = delta.completion_tokens
        if delta.finish_reason is None and not (self._scored and (delta.tokens or delta.prompt_scores)):
            if not delta.text:
                return None
            if self._started[index]:
                return self._open[index] + json_line(delta.text) + self._close[index]
        first = not self._started[index]
        self._started[index] = True
        return self._head + json_line(self._shape.chunk(index, delta, first)) + self._tail

    def ending(self) -> bytes:
        """The last events of a stream that succeeded."""
        if not self._include_usage:
            return DONE
        usage = json_line(self._envelope.usage(sum(self._completion_tokens)))
        return self._head + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that did not."""
        answer = translate(error)
        log.error("server.stream_failed", error=repr(error), code=answer.code, exc_info=answer.code == "internal_error")
        return b"data: " + json_line(error_body(answer)) + b"\n\n"


class TokenEvents(EventSourceResponse):
    """The response of one streamed request: all its choices, in order of arrival.

    A single choice is written as it is read. Several are read by a task each, which meet in a channel without room, so
    that a slow client holds all of them back and their deltas merge.
    """

    def __init__(self, streams: Sequence[OutputStream], writer: ChunkWriter, ping_s: int) -> None:
        self._streams = streams
        self._writer = writer
        if len(streams) == 1:
            super().__init__(self._single(), ping=ping_s, sep="\n")
            return
        self._sender, receiver = anyio.create_memory_object_stream[bytes](0)
        self._receiver = receiver
        super().__init__(receiver, ping=ping_s, sep="\n", data_sender_callable=self._several)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self._streams:
                stream.cancel()
            if len(self._streams) > 1:
                self._sender.close()
                self._receiver.close()

    async def _single(self) -> AsyncIterator[bytes]:
        write = self._writer.chunk
        try:
            async for delta in self._streams[0]:
                event = write(0, delta)
                if event is not None:
                    yield event
        except Exception as error:  # noqa: BLE001 - told to the client and logged
            yield self._writer.failure(error)
        else:
            yield self._writer.ending()

    async def _several(self) -> None:
        failures: list[Exception] = []

        async def pump(index: int, stream: OutputStream, sender: ObjectSendStream[bytes]) -> None:
            try:
                async for delta in stream:
                    event = self._writer.chunk(index, delta)
                    if event is not None:
                        await sender.send(event)
            except Exception as error:  # noqa: BLE001 - told to the client and logged
                failures.append(error)
                group.cancel_scope.cancel()

        async with self._sender as sender:
            async with anyio.create_task_group() as group:
                for index, stream in enumerate(self._streams):
                    group.start_soon(pump, index, stream, sender)
            await sender.send(self._writer.failure(failures[0]) if failures else self._writer.ending())
