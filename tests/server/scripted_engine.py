"""An engine that replays scripts: real deltas, real waiting, no model."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flare.machines.request import EndReason
from flare.request import Delta, GenerationRequest, ScoredToken
from flare.server.engine_api import Health, NotServing, OutputStream

from .tiny_tokens import IM_END, SPECIAL


@dataclass(frozen=True)
class Script:
    """Output tokens (the request's limits apply), after how many of them to wait for `release`, and how it fails."""

    tokens: tuple[int, ...]
    hold_after: int | None = None
    failure: Exception | None = None


def text_script(text: str, hold_after: int | None = None, failure: Exception | None = None) -> Script:
    """A script of a text's bytes and the end mark."""
    return Script((*text.encode(), IM_END), hold_after, failure)


@dataclass
class ScriptedEngine:
    """Accepts every request while it serves; all its methods run on its loop."""

    script: Callable[[GenerationRequest], Script] = lambda _: text_script("hello")
    health: Health = Health.SERVING
    refusal: Exception | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[OutputStream]:
        if self.refusal is not None:
            raise self.refusal
        if self.health is not Health.SERVING:
            raise NotServing(self.health)
        self.requests += requests
        streams = [ScriptedStream(request, self.script(request)) for request in requests]
        self.streams += streams
        return list(streams)

    def graphs(self) -> list[dict[str, object]]:
        return [{"graph": "decode/b1", "kind": "decode", "batch": 1, "prefill_tokens": 0, "duration_ms": 9.5}]

    def running(self) -> int:
        """Streams that have neither ended nor been cancelled."""
        return sum(not (stream.ended or stream.cancelled) for stream in self.streams)

    def release(self) -> None:
        """Let every waiting stream go on."""
        for stream in self.streams:
            stream.gate.set()


class ScriptedStream:
    """A delta a token, in valid UTF-8."""

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request = request
        self.gate = asyncio.Event()
        self.ended = False
        self.cancelled = False
        self.delivered = 0
        self._script = script
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> Delta:
        await asyncio.sleep(0)
        if self.delivered == self._script.hold_after:
            await self.gate.wait()
        if self.cancelled or self.ended:
            raise StopAsyncIteration
        if self._script.failure is not None and self.delivered == len(self._script.tokens) - 1:
            self.ended = True
            raise self._script.failure
        return self._next_delta()

    def cancel(self) -> None:
        self.cancelled = self.cancelled or not self.ended
        self.gate.set()

    def _next_delta(self) -> Delta:
        request = self.request
        prompt_scores = self._prompt_scores() if self.delivered == 0 else None
        if request.max_tokens == 0:
            self.ended = True
            return Delta(prompt_scores=prompt_scores, finish_reason=EndReason.LENGTH)
        token = self._script.tokens[self.delivered]
        self.delivered += 1
        reason = self._reason(token)
        self.ended = reason is not None
        offset = self._characters
        raw = b"" if token in SPECIAL else bytes([token])
        text = self._decoder.decode(raw, final=self.ended)
        self._characters += len(text)
        return Delta(
            text=text,
            tokens=(score(token, request.logprobs),),
            offsets=(offset,),
            prompt_scores=prompt_scores,
            completion_tokens=self.delivered,
            finish_reason=reason,
        )

    def _reason(self, token: int) -> EndReason | None:
        if token == IM_END and not self.request.ignore_eos:
            return EndReason.STOP
        exhausted = self.delivered in (self.request.max_tokens, len(self._script.tokens))
        return EndReason.LENGTH if exhausted else None

    def _prompt_scores(self) -> tuple[ScoredToken, ...] | None:
        wanted = self.request.prompt_logprobs
        if wanted is None:
            return None
        first, *rest = self.request.prompt
        return (ScoredToken(first, None), *(score(token, wanted) for token in rest))


def score(token: int, alternatives: int | None) -> ScoredToken:
    """A made-up score: the token is the best, then its successors."""
    if alternatives is None:
        return ScoredToken(token, None)
    return ScoredToken(token, -0.5, tuple(((token + i) % 256, -0.5 - i) for i in range(alternatives)))
