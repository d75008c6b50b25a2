"""One generation request, timed.

Owns the body of a request and the reading of its event stream. Does not own when requests are sent or what is made of
the times. Surprising rule: only chunks that hold text count as deliveries; tokens are counted by the server's usage,
and by chunks where it gives none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from flare.event_stream import DONE, EventSplitter

from .http import HttpError, Server, request

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for with every prompt. `temperature` 0 makes runs comparable."""

    model: str
    output_tokens: int
    ignore_eos: bool = True
    endpoint: Endpoint = "completions"
    temperature: float = 0.0

    def body(self, prompt: str) -> bytes:
        """The request's body as JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:  # not of OpenAI's API: left out where it is not wanted, for servers that refuse it
            fields["ignore_eos"] = True
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        return msgspec.json.encode(fields)

    @property
    def path(self) -> str:
        """Where it is asked."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


@dataclass(slots=True)
class Record:
    """One request as the client saw it; instants are of `time.perf_counter_ns`.

    `delivered_ns` are the arrivals of chunks with text. `prompt_tokens` is None and `output_tokens` counts chunks when
    the server gives no usage (`counted`: False). `error` None means that the answer came whole.
    """

    sent_ns: int
    ended_ns: int = 0
    delivered_ns: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    error: str | None = None

    @property
    def first_token_ns(self) -> int | None:
        """Time to the first chunk with text; None if none came."""
        return self.delivered_ns[0] - self.sent_ns if self.delivered_ns else None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class EventReader:
    """Fills a `Record` from the pieces of an event stream; `ended` once the stream has said so."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._events = EventSplitter()
        self.ended = False

    def feed(self, arrived_ns: int, piece: bytes) -> None:
        """Take the next piece of the body. A chunk that is not understood is kept as the record's error."""
        for data in self._events.feed(piece):
            self._event(arrived_ns, data)

    @property
    def rest(self) -> bytes:
        """What came after the last whole line: all of a one-line body that is no event stream."""
        return self._events.rest

    def _event(self, arrived_ns: int, data: bytes) -> None:
        record = self._record
        if data == DONE:
            self.ended = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            record.error = record.error or f"a chunk is not understood: {error}"
            return
        if chunk.error is not None:
            record.error = msgspec.json.encode(chunk.error).decode()
        for choice in chunk.choices:
            if choice.text or (choice.delta is not None and choice.delta.content):
                record.delivered_ns.append(arrived_ns)
            record.finish_reason = choice.finish_reason or record.finish_reason
        if chunk.usage is not None:
            record.prompt_tokens, record.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            record.counted = True


async def generate(server: Server, ask: Ask, prompt: str) -> Record:
    """Send one request and read its stream to the end. Never raises for a bad answer: it is in the record."""
    body = ask.body(prompt)
    record = Record(sent_ns=time.perf_counter_ns())
    reader = EventReader(record)
    try:
        status = await request(server, "POST", ask.path, body, reader.feed)
    except HttpError as error:
        record.error = record.error or str(error)
    else:
        if status != 200:
            record.error = f"HTTP {status}: {reader.rest[:200].decode(errors='replace')}"
        elif not reader.ended:
            record.error = record.error or "the stream ended without [DONE]"
    record.ended_ns = time.perf_counter_ns()
    if not record.counted:
        record.output_tokens = len(record.delivered_ns)
    return record
