"""The request machine, cell by cell and against its history."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.ids import Fence, PageId, RequestHandle, RequestId
from flare.machines.request import (
    FENCED,
    RUNNABLE,
    TRANSITIONS,
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
    Request,
    RequestEvent,
    RequestSpec,
    RequestState,
    TokensCommitted,
)
from flare.machines.table import IllegalTransition

from .oracle_request import facts, fits, possible

SPEC = RequestSpec("a", prompt_tokens=8, max_tokens=3, system_end=5, messages=(3, 5))
SCORED = RequestSpec("a", prompt_tokens=8, max_tokens=0, scored=True)
ADMITTED = Admitted(RequestHandle(2, 1), (PageId(4), PageId(5)))
DECODING = (ADMITTED, Dispatched(Fence(3)), PromptCommitted(8, 90))
ENDED = (*DECODING, End(EndReason.STOP))

HISTORIES: dict[RequestState, tuple[RequestEvent, ...]] = {
    RequestState.QUEUED: (),
    RequestState.PREFILLING: (ADMITTED,),
    RequestState.DECODING: DECODING,
    RequestState.ENDED: ENDED,
    RequestState.CANCELLED: (*DECODING, Cancel()),
    RequestState.FAILED: (*DECODING, Fail()),
    RequestState.RETIRED: (*ENDED, Release()),
}
EVENTS: tuple[RequestEvent, ...] = (
    ADMITTED,
    Dispatched(Fence(9)),
    ChunkCommitted(4),
    PromptCommitted(8, 95),
    PromptScored(8),
    TokensCommitted(1),
    End(EndReason.LENGTH),
    Cancel(),
    Fail(),
    Release(),
)


def shown(request: Request) -> tuple[object, ...]:
    """Everything that a request holds."""
    return tuple(getattr(request, name) for name in Request.__slots__)


def after(history: tuple[RequestEvent, ...], spec: RequestSpec = SPEC) -> Request:
    request = Request(RequestId(7), spec)
    for event in history:
        request.apply(event)
        request.check()
    return request


def test_every_state_and_event_is_in_the_tests() -> None:
    assert set(HISTORIES) == set(RequestState)
    assert {type(event) for event in EVENTS} == set(RequestEvent.__args__)
    assert {event for _, event in TRANSITIONS} == set(RequestEvent.__args__)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", RequestState, ids=lambda state: state.value)
def test_every_cell(state: RequestState, event: RequestEvent) -> None:
    """Each cell of the table is a move that the rules allow, and each gap is refused and changes nothing."""
    spec = (
        SCORED if isinstance(event, PromptScored) and state in (RequestState.PREFILLING, RequestState.QUEUED) else SPEC
    )
    history = HISTORIES[state]
    request = after(history, spec)
    assert request.state is state
    before = shown(request)
    assert ((state, type(event)) in TRANSITIONS) == possible(spec, history, event)
    if not possible(spec, history, event):
        with pytest.raises(IllegalTransition, match=f"no transition from {state.value} on {type(event).__name__}"):
            request.apply(event)
        assert shown(request) == before
    else:
        step = request.apply(event)
        assert step.before is state
        assert step.after is request.state is TRANSITIONS[state, type(event)] is facts(spec, (*history, event)).state
    request.check()


events = st.one_of(
    st.just(ADMITTED),
    st.builds(Dispatched, st.integers(1, 9).map(Fence)),
    st.builds(ChunkCommitted, st.integers(-1, 9)),
    st.builds(PromptCommitted, st.integers(-1, 9), st.integers(1, 99)),
    st.builds(PromptScored, st.integers(-1, 9)),
    st.builds(TokensCommitted, st.integers(-1, 4)),
    st.builds(End, st.sampled_from(EndReason)),
    st.just(Cancel()),
    st.just(Fail()),
    st.just(Release()),
)


@given(
    st.sampled_from((SPEC, SCORED)),
    st.lists(st.one_of(events, events.filter(lambda e: not isinstance(e, Cancel | Fail | End)))),
)
def test_against_history(spec: RequestSpec, attempts: list[RequestEvent]) -> None:
    """Any attempts in any order: what the rules allow moves, all else raises and changes nothing."""
    request = Request(RequestId(7), spec)
    history: list[RequestEvent] = []
    for event in attempts:
        before = shown(request)
        if not possible(spec, history, event):
            with pytest.raises(IllegalTransition):
                request.apply(event)
            assert shown(request) == before
        elif not fits(spec, history, event):
            with pytest.raises(ValueError, match=r"token"):
                request.apply(event)
            assert shown(request) == before
        else:
            step = request.apply(event)
            assert step.before is before[Request.__slots__.index("state")]
            history.append(event)
        request.check()
        known = facts(spec, history)
        now = (request.state, request.consumed, request.produced, request.last_fence, request.end_reason)
        assert [*known] == [*now]
        assert request.committed == known.consumed + known.produced
        assert request.runnable == (known.state in RUNNABLE)


def test_states_of_service_and_of_release_are_all_but_the_first_and_the_last() -> None:
    assert set(RequestState) - {RequestState.QUEUED, RequestState.RETIRED} == RUNNABLE | FENCED
    assert not RUNNABLE & FENCED


def test_a_subclass_of_an_event_is_another_event() -> None:
    class Withdraw(Cancel, frozen=True):
        pass

    with pytest.raises(IllegalTransition, match="request: no transition from queued on Withdraw"):
        after(()).apply(Withdraw())


def test_endpoints_bound_the_next_chunk() -> None:
    """A chunk stops at the end of the system prompt, then at that of the prompt; endpoints are passed in order."""
    request, seen = after((ADMITTED,)), []
    for tokens in (1, 2, 2, 1):
        seen.append((request.consumed, request.boundary(), request.next_endpoint()))
        request.apply(ChunkCommitted(tokens))
    seen.append((request.consumed, request.boundary(), request.next_endpoint()))
    assert seen == [(0, 5, 3), (1, 5, 3), (3, 5, 5), (5, 8, 8), (6, 8, 8)]


def test_without_a_system_prompt_the_prompt_itself_is_the_boundary() -> None:
    assert after((), RequestSpec("a", 4, 1)).boundary() == 4


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": -1, "scored": True}, "max_tokens must be at least 1"),
        ({"messages": (3, 2)}, "endpoints must rise"),
        ({"messages": (9,)}, "endpoints must rise"),
        ({"messages": (-1,)}, "endpoints must rise"),
        ({"system_end": 9}, "endpoints must rise"),
        ({"system_end": -1}, "endpoints must rise"),
    ],
)
def test_impossible_requests_are_refused(fields: dict[str, object], complaint: str) -> None:
    wanted: dict[str, object] = {"client": "a", "prompt_tokens": 8, "max_tokens": 3}
    with pytest.raises(ValueError, match=complaint):
        RequestSpec(**(wanted | fields))  # type: ignore[arg-type]


def test_messages_may_share_an_endpoint() -> None:
    """An empty message, and one that ends with the prompt."""
    for messages in itertools.combinations_with_replacement((0, 4, 8), 2):
        assert RequestSpec("a", 8, 1, messages=messages).messages == messages
