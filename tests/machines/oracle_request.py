"""A request's state, told from its whole history.

Owns the rules of docs/architecture.md, "State machines", as statements about what has happened so far; it knows
neither the transition table nor the machine's fields. Surprising rule: nothing is stored, everything is counted again
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flare.machines.request import (
    Admitted,
    Cancel,
    ChunkCommitted,
    Dispatched,
    End,
    EndReason,
    Fail,
    PromptCommitted,
    PromptScored,
    Release,
    RequestEvent,
    RequestSpec,
    RequestState,
    TokensCommitted,
)


class Facts(NamedTuple):
    """What a history comes to."""

    state: RequestState
    consumed: int
    produced: int
    last_fence: int
    end_reason: EndReason | None


def _happened(history: Sequence[RequestEvent], *kinds: type) -> bool:
    return any(isinstance(event, kinds) for event in history)


def facts(spec: RequestSpec, history: Sequence[RequestEvent]) -> Facts:
    """State and counters after `history`, all of which was allowed."""
    consumed = sum(e.tokens for e in history if isinstance(e, ChunkCommitted | PromptCommitted | PromptScored))
    drawn = sum(e.tokens for e in history if isinstance(e, TokensCommitted))
    produced = drawn + _happened(history, PromptCommitted)
    fences = [int(e.fence) for e in history if isinstance(e, Dispatched)]
    reasons = [e.reason for e in history if isinstance(e, End)]
    if _happened(history, PromptScored):
        reasons.append(EndReason.LENGTH)
    return Facts(
        _state(spec, history, consumed), consumed, produced, fences[-1] if fences else 0, next(iter(reasons), None)
    )


def _state(spec: RequestSpec, history: Sequence[RequestEvent], consumed: int) -> RequestState:
    if not _happened(history, Admitted):
        return RequestState.RETIRED if _happened(history, Cancel) else RequestState.QUEUED
    if _happened(history, Release):
        return RequestState.RETIRED
    if _happened(history, Cancel):
        return RequestState.CANCELLED
    if _happened(history, Fail):
        return RequestState.FAILED
    if _happened(history, End, PromptScored):
        return RequestState.ENDED
    return RequestState.DECODING if consumed == spec.prompt_tokens else RequestState.PREFILLING


def possible(spec: RequestSpec, history: Sequence[RequestEvent], event: RequestEvent) -> bool:
    """Whether `event` may follow `history` at all, whatever it carries."""
    over = _happened(history, Cancel, Fail, End, PromptScored, Release)
    admitted = _happened(history, Admitted)
    prompt_done = _happened(history, PromptCommitted, PromptScored)
    match event:
        case Admitted():
            return not admitted and not over
        case Cancel():
            return not over
        case Release():
            return admitted and over and not _happened(history, Release)
        case Dispatched() | Fail():
            return admitted and not over
        case ChunkCommitted() | PromptCommitted() | PromptScored():
            return admitted and not over and not prompt_done
        case TokensCommitted() | End():
            return admitted and not over and prompt_done


def fits(spec: RequestSpec, history: Sequence[RequestEvent], event: RequestEvent) -> bool:
    """Whether what a possible `event` carries is within the request's limits."""
    now = facts(spec, history)
    left = spec.prompt_tokens - now.consumed
    match event:
        case ChunkCommitted(tokens):
            return 1 <= tokens <= left - 1
        case PromptCommitted(tokens, _):
            return tokens == left and spec.max_tokens >= 1
        case PromptScored(tokens):
            return tokens == left and spec.max_tokens == 0
        case TokensCommitted(tokens):
            return 0 <= tokens <= spec.max_tokens - now.produced
        case _:
            return True
