"""A logical request and its execution: from arrival to the release of all that it held.

Owns a request's state, its counters of committed work and its times. Does not own its slot, pages or text: the
scheduler gives and takes those. Surprising rule: an ended, cancelled or failed request keeps its slot and pages until
the last frame that serves it has completed; only then is it retired.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .ids import Fence, PageId, RequestHandle, RequestId
from .prices import ServicePrices
from .table import State, Transitions, next_state


class RequestState(State):
    """States of a request (docs/architecture.md, "State machines")."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RETIRED = "retired"


class EndReason(StrEnum):
    """What ended the output, in OpenAI's words: a stop token or string, or a limit of length."""

    STOP = "stop"
    LENGTH = "length"


class RequestSpec(msgspec.Struct, frozen=True):
    """What scheduling needs to know of a request. Endpoints are exclusive token positions in the prompt.

    `needs_feedback`: every step reads what only the host knows (stop strings, penalties, minimum length).
    `max_tokens` 0 is for requests that only score their prompt.
    """

    client: str
    prompt_tokens: int
    max_tokens: int
    system_end: int = 0
    messages: tuple[int, ...] = ()
    scored: bool = False
    needs_feedback: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError("prompt_tokens must be at least 1")
        if self.max_tokens < 0 or (self.max_tokens == 0 and not self.scored):
            raise ValueError("max_tokens must be at least 1 (0 only where the prompt is scored)")
        ends = (0, *self.messages, self.prompt_tokens)
        if any(a > b for a, b in itertools.pairwise(ends)) or not 0 <= self.system_end <= self.prompt_tokens:
            raise ValueError("endpoints must rise and not pass the prompt's end")


class Admitted(msgspec.Struct, frozen=True):
    """It was given a slot, and pages for its prompt and all that it may produce."""

    handle: RequestHandle
    pages: tuple[PageId, ...]


class Dispatched(msgspec.Struct, frozen=True):
    """A frame that serves it was submitted."""

    fence: Fence


class ChunkCommitted(msgspec.Struct, frozen=True):
    """A frame consumed prompt tokens, and more are left."""

    tokens: int


class PromptCommitted(msgspec.Struct, frozen=True):
    """A frame consumed the last prompt tokens and drew the first output token."""

    tokens: int
    at_ns: int


class PromptScored(msgspec.Struct, frozen=True):
    """A frame consumed the last prompt tokens of a request that wants nothing but their scores."""

    tokens: int


class TokensCommitted(msgspec.Struct, frozen=True):
    """A frame drew output tokens (none, for a row that had ended on the device)."""

    tokens: int


class End(msgspec.Struct, frozen=True):
    """Its output is complete."""

    reason: EndReason


class Cancel(msgspec.Struct, frozen=True):
    """Nobody wants it any longer."""


class Fail(msgspec.Struct, frozen=True):
    """A frame that served it failed."""


class Release(msgspec.Struct, frozen=True):
    """No frame in flight serves it any longer; its slot and pages are free."""


RequestEvent = (
    Admitted
    | Dispatched
    | ChunkCommitted
    | PromptCommitted
    | PromptScored
    | TokensCommitted
    | End
    | Cancel
    | Fail
    | Release
)

_S = RequestState
TRANSITIONS: Transitions[RequestState] = {
    (_S.QUEUED, Admitted): _S.PREFILLING,
    (_S.QUEUED, Cancel): _S.RETIRED,
    (_S.PREFILLING, Dispatched): _S.PREFILLING,
    (_S.PREFILLING, ChunkCommitted): _S.PREFILLING,
    (_S.PREFILLING, PromptCommitted): _S.DECODING,
    (_S.PREFILLING, PromptScored): _S.ENDED,
    (_S.PREFILLING, Cancel): _S.CANCELLED,
    (_S.PREFILLING, Fail): _S.FAILED,
    (_S.DECODING, Dispatched): _S.DECODING,
    (_S.DECODING, TokensCommitted): _S.DECODING,
    (_S.DECODING, End): _S.ENDED,
    (_S.DECODING, Cancel): _S.CANCELLED,
    (_S.DECODING, Fail): _S.FAILED,
    (_S.ENDED, Release): _S.RETIRED,
    (_S.CANCELLED, Release): _S.RETIRED,
    (_S.FAILED, Release): _S.RETIRED,
}

RUNNABLE = frozenset({RequestState.PREFILLING, RequestState.DECODING})
"""States in which a request can be served, and takes part in service accounting."""

FENCED = frozenset({RequestState.ENDED, RequestState.CANCELLED, RequestState.FAILED})
"""States in which only the release of its resources is left."""


class RequestStep(msgspec.Struct, frozen=True):
    """One move of a request, for the trace."""

    before: RequestState
    after: RequestState


@dataclass(slots=True, eq=False)
class Request:
    """The machine. Counters are of validated completions, never of queued work.

    `visible_at_ns` is the last visible output, or the start of decoding before any.
    """

    id: RequestId
    spec: RequestSpec
    state: RequestState = RequestState.QUEUED
    handle: RequestHandle | None = None
    pages: tuple[PageId, ...] = ()
    consumed: int = 0
    produced: int = 0
    visible_at_ns: int = 0
    last_fence: Fence = field(default_factory=lambda: Fence(0))
    end_reason: EndReason | None = None
    prices: ServicePrices = field(default_factory=ServicePrices)

    def apply(self, event: RequestEvent) -> RequestStep:
        """Move by one event. Raises `IllegalTransition`, or ValueError for counters that pass their limits; then
        nothing has changed."""
        before = self.state
        after = next_state("request", TRANSITIONS, before, event)
        match event:
            case Admitted(handle, pages):
                self.handle, self.pages = handle, pages
            case Dispatched(fence):
                self.last_fence = fence
            case ChunkCommitted(tokens):
                self._consume(tokens)
            case PromptCommitted(tokens, at_ns):
                self._finish_prompt(tokens, outputs=1)
                self.visible_at_ns = at_ns
            case PromptScored(tokens):
                self._finish_prompt(tokens, outputs=0)
                self.end_reason = EndReason.LENGTH
            case TokensCommitted(tokens):
                self._produce(tokens)
            case End(reason):
                self.end_reason = reason
            case Release():
                self.pages = ()
            case Cancel() | Fail():
                pass
        self.state = after
        return RequestStep(before, after)

    @property
    def committed(self) -> int:
        """Context tokens of its validated frames: prompt tokens consumed and output tokens drawn."""
        return self.consumed + self.produced

    @property
    def runnable(self) -> bool:
        """Whether it can be served and takes part in service accounting."""
        return self.state in RUNNABLE

    def boundary(self) -> int:
        """The prompt position that the next chunk may not cross (docs/scheduling.md, "Slots and pages")."""
        return self.spec.system_end if self.consumed < self.spec.system_end else self.spec.prompt_tokens

    def next_endpoint(self) -> int:
        """The first message or prompt endpoint beyond what is consumed."""
        messages = self.spec.messages
        later = bisect_right(messages, self.consumed)
        return messages[later] if later < len(messages) else self.spec.prompt_tokens

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        spec = self.spec
        assert 0 <= self.consumed <= spec.prompt_tokens
        assert 0 <= self.produced <= max(spec.max_tokens, 0)
        assert self.produced == 0 or self.consumed == spec.prompt_tokens
        if self.state is RequestState.QUEUED:
            assert self.handle is None and not self.pages and self.committed == 0
        if self.state is RequestState.PREFILLING:
            assert self.handle is not None and self.consumed < spec.prompt_tokens and self.produced == 0
        if self.state is RequestState.DECODING:
            assert self.handle is not None and self.produced >= 1 and self.end_reason is None
        if self.state is RequestState.ENDED:
            assert self.end_reason is not None
        if self.state is RequestState.RETIRED:
            assert not self.pages

    def _consume(self, tokens: int) -> None:
        left = self.spec.prompt_tokens - self.consumed
        if not 0 < tokens < left:
            raise ValueError(f"a chunk of {tokens} tokens leaves none of the {left} that are left")
        self.consumed += tokens

    def _finish_prompt(self, tokens: int, outputs: int) -> None:
        left = self.spec.prompt_tokens - self.consumed
        if tokens != left:
            raise ValueError(f"{tokens} tokens are not the {left} that are left of the prompt")
        if outputs != min(1, self.spec.max_tokens):
            raise ValueError(f"a prompt that allows {self.spec.max_tokens} output tokens cannot end with {outputs}")
        self.consumed, self.produced = self.spec.prompt_tokens, outputs

    def _produce(self, tokens: int) -> None:
        if tokens < 0 or self.produced + tokens > self.spec.max_tokens:
            raise ValueError(f"{tokens} output tokens pass the limit of {self.spec.max_tokens}")
        self.produced += tokens
