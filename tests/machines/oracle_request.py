"""A request's state, told from its whole history.

Owns the rules of docs/architecture.md, "State machines", as statements about what has happened so far; it knows
neither the transition table nor the machine's fields. Surprising rule: nothing is stored, everything is counted again
each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flare.machines.graph import GraphKind
from flare.machines.lifecycle import (
    Admitted,
    Blocked,
    Cancel,
    ChunkCommitted,
    Dispatched,
    End,
    Fail,
    OutputReady,
    Parked,
    Preempt,
    PromptCommitted,
    PromptReady,
    Rebound,
    Release,
    RequestEvent,
    RequestState,
    Retire,
    StageCommitted,
    Stood,
    Terminate,
    TokensCommitted,
)
from flare.machines.request import EndReason, RequestSpec


class Facts(NamedTuple):
    """What a history comes to."""

    state: RequestState
    consumed: int
    produced: int
    last_fence: int
    end_reason: EndReason | None
    stages: tuple[GraphKind, ...]


def _count(history: Sequence[RequestEvent], *kinds: type) -> int:
    return sum(isinstance(event, kinds) for event in history)


def _last(history: Sequence[RequestEvent], *kinds: type) -> int:
    """The place of the last event of these kinds; -1 if there is none."""
    return max((index for index, event in enumerate(history) if isinstance(event, kinds)), default=-1)


def script(spec: RequestSpec) -> Iterator[tuple[int, tuple[GraphKind, ...]]]:
    """Every prompt position at which stages are due, and which: at the first, those of the entry come first."""
    entry = ((GraphKind.INITIALIZE,) if spec.initialize else ()) + (
        (GraphKind.RESTORE,) if spec.restored_tokens else ()
    )
    windows = {window.start: window for window in spec.windows if window.start >= spec.restored_tokens}
    for position in range(spec.restored_tokens, spec.prompt_tokens + 1):
        due = entry if position == spec.restored_tokens else ()
        window = windows.get(position)
        later_window = window is not None and position != min(windows)
        if later_window:
            due += (GraphKind.SNAPSHOT, GraphKind.RESTORE)
        elif position in spec.checkpoints and position > spec.restored_tokens:
            due += (GraphKind.SNAPSHOT,)
        if window is not None:
            due += (GraphKind.VISION,) * window.operations
        if due:
            yield position, due


def stages(spec: RequestSpec, history: Sequence[RequestEvent], position: int) -> tuple[GraphKind, ...]:
    """What must be done before the prompt or the output can go on."""
    if not _count(history, Admitted):
        return ()
    resumes = _count(history, Parked) and _last(history, Admitted) > _last(history, Parked)
    resumed = any(e == StageCommitted(GraphKind.RESUME) for e in history[_last(history, Parked) + 1 :])
    done = sum(isinstance(e, StageCommitted) and e.kind is not GraphKind.RESUME for e in history)
    reached = [kind for at, due in script(spec) if at <= position for kind in due]
    resume = (GraphKind.RESUME,) if resumes and not resumed else ()
    return (*resume, *reached[done:])


def draining(spec: RequestSpec, history: Sequence[RequestEvent]) -> bool:
    """Whether a window's snapshot comes next of what its windows need, and its state is not known to stand still."""
    done = sum(isinstance(e, StageCommitted) and e.kind is not GraphKind.RESUME for e in history)
    places = [(kind, at) for at, due in script(spec) for kind in due]
    starts = {window.start for window in spec.windows}
    kind, at = places[done] if done < len(places) else (None, 0)
    if kind is not GraphKind.SNAPSHOT or at not in starts:
        return False
    first = min(start for start in starts if start >= spec.restored_tokens)
    reached = at <= _position(spec, history) and at != first
    return reached and _last(history, Stood) < max(_last(history, ChunkCommitted), 0)


def _position(spec: RequestSpec, history: Sequence[RequestEvent]) -> int:
    chunks = sum(e.tokens for e in history if isinstance(e, ChunkCommitted | PromptCommitted))
    return spec.restored_tokens + chunks


def facts(spec: RequestSpec, history: Sequence[RequestEvent]) -> Facts:
    """State and counters after `history`, all of which was allowed."""
    position = _position(spec, history)
    restores = [e for e in history if e == StageCommitted(GraphKind.RESTORE)]
    consumed = position if restores or not spec.restored_tokens else 0
    drawn = sum(e.tokens for e in history if isinstance(e, TokensCommitted))
    produced = drawn + min(spec.max_tokens, 1) * _count(history, PromptCommitted)
    fences = [int(e.fence) for e in history if isinstance(e, Dispatched)]
    reasons = [e.reason for e in history if isinstance(e, End | Terminate)]
    return Facts(
        _state(history),
        consumed,
        produced,
        fences[-1] if fences else 0,
        next(iter(reasons), None),
        stages(spec, history, position),
    )


def _state(history: Sequence[RequestEvent]) -> RequestState:
    admitted = _last(history, Admitted)
    waits = admitted == -1 or _last(history, Parked) > admitted
    if (waits and _count(history, Cancel)) or _count(history, Release):
        return RequestState.RETIRED
    if _count(history, Cancel):
        return RequestState.CANCELLED
    if _count(history, Fail):
        return RequestState.FAILED
    if _count(history, End) or _count(history, Retire):
        return RequestState.ENDED
    if _count(history, Terminate):
        return RequestState.RETIRING
    if waits:
        return RequestState.QUEUED if admitted == -1 else RequestState.PREEMPTED
    if _last(history, Preempt) > admitted:
        return RequestState.PREEMPTING
    resumes = _count(history, Parked) > 0
    if max(_last(history, Blocked), admitted if resumes else -1) > _last(history, PromptReady, OutputReady):
        return RequestState.PREPARING
    return RequestState.DECODING if _count(history, PromptCommitted) else RequestState.PREFILLING


_PREFILLING, _DECODING = RequestState.PREFILLING, RequestState.DECODING
_PREPARING, _PREEMPTING = RequestState.PREPARING, RequestState.PREEMPTING


def possible(spec: RequestSpec, history: Sequence[RequestEvent], event: RequestEvent) -> bool:
    """Whether `event` may follow `history` at all, whatever counters it carries."""
    now = facts(spec, history)
    over = _count(history, Cancel, Fail, End, Retire) > 0
    resident = not over and now.state not in (RequestState.QUEUED, RequestState.PREEMPTED)
    runs = resident and not _count(history, Terminate)
    prompt_done = _count(history, PromptCommitted) > 0
    prepares = now.state is _PREPARING
    match event:
        case Admitted():
            return not resident and not over
        case Cancel():
            return not over
        case Release():
            return over and now.state is not RequestState.RETIRED
        case Dispatched():
            return resident
        case Fail():
            return runs
        case Blocked():
            return runs and not prepares and now.state is not _PREEMPTING
        case StageCommitted(kind):
            saves = kind is GraphKind.SNAPSHOT and now.stages[:1] == (kind,)
            return prepares and not (saves and draining(spec, history))
        case Stood():
            return prepares and draining(spec, history)
        case Rebound() | PromptReady() | OutputReady():
            return prepares
        case ChunkCommitted() | PromptCommitted():
            return runs and not prepares and (not prompt_done or now.state is _PREEMPTING)
        case TokensCommitted():
            return runs and not prepares and (prompt_done or now.state is _PREEMPTING)
        case Preempt():
            return now.state in (_PREFILLING, _DECODING)
        case Parked():
            return now.state is _PREEMPTING
        case Terminate():
            return runs and now.state is not _PREFILLING
        case Retire():
            return resident and _count(history, Terminate) > 0
        case End():
            waits = not over and now.state is RequestState.PREEMPTED
            return waits or (runs and now.state in (_PREPARING, _DECODING))


def fits(spec: RequestSpec, history: Sequence[RequestEvent], event: RequestEvent) -> bool:
    """Whether what a possible `event` carries is within the request's limits."""
    now = facts(spec, history)
    left = spec.prompt_tokens - now.consumed
    match event:
        case Blocked():
            return bool(now.stages)
        case StageCommitted(kind):
            return now.stages[:1] == (kind,)
        case PromptReady():
            return not now.stages and left > 0
        case OutputReady():
            return not now.stages and left == 0
        case ChunkCommitted(tokens):
            return 1 <= tokens <= left - 1 and _free(spec, now, tokens)
        case PromptCommitted(tokens, _):
            prompt_done = _count(history, PromptCommitted) > 0
            return tokens == left and not prompt_done and _free(spec, now, tokens)
        case TokensCommitted(tokens):
            ready = not now.stages and _count(history, PromptCommitted) > 0
            return ready and 0 <= tokens <= spec.max_tokens - now.produced
        case _:
            return True


def _free(spec: RequestSpec, now: Facts, tokens: int) -> bool:
    """Whether nothing is due before a chunk of so many tokens has come to its end."""
    return not now.stages and all(not now.consumed < at < now.consumed + tokens for at, _ in script(spec))
