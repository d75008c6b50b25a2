"""The life of a request: states, events, and which leads where.

Owns the transition table of docs/architecture.md, "State machines". Does not own counters or resources (`execution`).
Surprising rule: a request that is to be preempted still takes what frames in flight bring; only then is it saved.
"""

from __future__ import annotations

import msgspec

from .beliefs import Beliefs
from .graph import GraphKind
from .ids import Fence, PageId, RequestHandle, StateRow
from .request import EndReason
from .table import State, Transitions
from .windows import WindowStep


class RequestState(State):
    """States of a request (docs/architecture.md, "State machines")."""

    QUEUED = "queued"
    PREPARING = "preparing"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTING = "preempting"
    PREEMPTED = "preempted"
    RETIRING = "retiring"
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"
    RETIRED = "retired"


class Admitted(msgspec.Struct, frozen=True):
    """It was given a slot, pages for its prompt and all that it may produce, and a state row where it needs one."""

    handle: RequestHandle
    pages: tuple[PageId, ...]
    state_row: StateRow | None = None
    beliefs: Beliefs | None = None


class Dispatched(msgspec.Struct, frozen=True):
    """A frame that serves it was submitted."""

    fence: Fence


class Blocked(msgspec.Struct, frozen=True):
    """Stages lie before what it needs."""


class StageCommitted(msgspec.Struct, frozen=True):
    """A frame completed the first of its stages."""

    kind: GraphKind


class Stood(msgspec.Struct, frozen=True):
    """No frame in flight serves it any longer: its state stands still for a snapshot."""


class Rebound(msgspec.Struct, frozen=True):
    """Its saved state goes on under a fresh generation of the same slot."""

    handle: RequestHandle


class PromptReady(msgspec.Struct, frozen=True):
    """Its stages are done, and prompt tokens are left."""


class OutputReady(msgspec.Struct, frozen=True):
    """Its stages are done, and its prompt is consumed."""


class ChunkCommitted(msgspec.Struct, frozen=True):
    """A frame consumed prompt tokens, and more are left."""

    tokens: int


class PromptCommitted(msgspec.Struct, frozen=True):
    """A frame consumed the last prompt tokens and drew the first output token, if it may have one."""

    tokens: int
    at_ns: int


class TokensCommitted(msgspec.Struct, frozen=True):
    """A frame drew output tokens."""

    tokens: int


class Preempt(msgspec.Struct, frozen=True):
    """It is to give up its slot; its state goes to a state row."""

    state_row: StateRow
    at_ns: int


class Parked(msgspec.Struct, frozen=True):
    """Its state is saved; its slot and pages are free."""


class Terminate(msgspec.Struct, frozen=True):
    """Its output is complete, and is to be retired through a snapshot."""

    reason: EndReason
    at_ns: int


class Retire(msgspec.Struct, frozen=True):
    """Its terminal snapshot is done, or came to nothing: its answer is complete either way."""


class End(msgspec.Struct, frozen=True):
    """Its output is complete."""

    reason: EndReason


class Cancel(msgspec.Struct, frozen=True):
    """Nobody wants it any longer."""


class Fail(msgspec.Struct, frozen=True):
    """A frame that served it failed."""


class Release(msgspec.Struct, frozen=True):
    """No frame in flight serves it any longer; all that it held is free."""


RequestEvent = (
    Admitted
    | Dispatched
    | Blocked
    | StageCommitted
    | Stood
    | Rebound
    | PromptReady
    | OutputReady
    | ChunkCommitted
    | PromptCommitted
    | TokensCommitted
    | Preempt
    | Parked
    | Terminate
    | Retire
    | End
    | Cancel
    | Fail
    | Release
)

_S = RequestState
TRANSITIONS: Transitions[RequestState] = {
    (_S.QUEUED, Admitted): _S.PREFILLING,
    (_S.QUEUED, Cancel): _S.RETIRED,
    (_S.PREFILLING, Blocked): _S.PREPARING,
    (_S.PREFILLING, Dispatched): _S.PREFILLING,
    (_S.PREFILLING, ChunkCommitted): _S.PREFILLING,
    (_S.PREFILLING, PromptCommitted): _S.DECODING,
    (_S.PREFILLING, Preempt): _S.PREEMPTING,
    (_S.PREFILLING, Cancel): _S.CANCELLED,
    (_S.PREFILLING, Fail): _S.FAILED,
    (_S.PREPARING, Dispatched): _S.PREPARING,
    (_S.PREPARING, Stood): _S.PREPARING,
    (_S.PREPARING, StageCommitted): _S.PREPARING,
    (_S.PREPARING, Rebound): _S.PREPARING,
    (_S.PREPARING, PromptReady): _S.PREFILLING,
    (_S.PREPARING, OutputReady): _S.DECODING,
    (_S.PREPARING, Terminate): _S.RETIRING,
    (_S.PREPARING, End): _S.ENDED,
    (_S.PREPARING, Cancel): _S.CANCELLED,
    (_S.PREPARING, Fail): _S.FAILED,
    (_S.DECODING, Blocked): _S.PREPARING,
    (_S.DECODING, Dispatched): _S.DECODING,
    (_S.DECODING, TokensCommitted): _S.DECODING,
    (_S.DECODING, Preempt): _S.PREEMPTING,
    (_S.DECODING, Terminate): _S.RETIRING,
    (_S.DECODING, End): _S.ENDED,
    (_S.DECODING, Cancel): _S.CANCELLED,
    (_S.DECODING, Fail): _S.FAILED,
    (_S.PREEMPTING, Dispatched): _S.PREEMPTING,
    (_S.PREEMPTING, ChunkCommitted): _S.PREEMPTING,
    (_S.PREEMPTING, PromptCommitted): _S.PREEMPTING,
    (_S.PREEMPTING, TokensCommitted): _S.PREEMPTING,
    (_S.PREEMPTING, Parked): _S.PREEMPTED,
    (_S.PREEMPTING, Terminate): _S.RETIRING,
    (_S.PREEMPTING, Cancel): _S.CANCELLED,
    (_S.PREEMPTING, Fail): _S.FAILED,
    (_S.PREEMPTED, Admitted): _S.PREPARING,
    (_S.PREEMPTED, End): _S.ENDED,
    (_S.PREEMPTED, Cancel): _S.RETIRED,
    (_S.RETIRING, Dispatched): _S.RETIRING,
    (_S.RETIRING, Retire): _S.ENDED,
    (_S.RETIRING, Cancel): _S.CANCELLED,
    (_S.ENDED, Release): _S.RETIRED,
    (_S.CANCELLED, Release): _S.RETIRED,
    (_S.FAILED, Release): _S.RETIRED,
}

WAITING = frozenset({RequestState.QUEUED, RequestState.PREEMPTED})
"""States in which a request waits for a slot."""

RUNNABLE = frozenset({RequestState.PREPARING, RequestState.PREFILLING, RequestState.DECODING})
"""States in which a request is to be served, and takes part in service accounting."""

TERMINAL = frozenset({RequestState.PREEMPTING, RequestState.RETIRING})
"""States in which only the snapshot that retires it is left."""

FENCED = frozenset({RequestState.ENDED, RequestState.CANCELLED, RequestState.FAILED})
"""States in which only the release of its resources is left."""


class RequestStep(msgspec.Struct, frozen=True):
    """One move of a request, and those of its image windows that it brought about, for the trace."""

    before: RequestState
    after: RequestState
    windows: tuple[WindowStep, ...] = ()
