"""The request machine, cell by cell and against its history."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.execution import Request
from flare.machines.graph import STAGE_KINDS, GraphKind
from flare.machines.ids import Fence, PageId, RequestHandle, RequestId, StateRow
from flare.machines.lifecycle import (
    FENCED,
    RUNNABLE,
    TERMINAL,
    TRANSITIONS,
    WAITING,
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
from flare.machines.request import EndReason, ImageWindow, RequestSpec
from flare.machines.table import IllegalTransition

from .oracle_request import facts, fits, possible

SPEC = RequestSpec("a", prompt_tokens=8, max_tokens=3, system_end=5, messages=(3, 5))
SCORED = RequestSpec("a", prompt_tokens=8, max_tokens=0, scored=True)
IMAGES = RequestSpec(
    "a",
    prompt_tokens=8,
    max_tokens=3,
    initialize=True,
    restored_tokens=1,
    windows=(ImageWindow(2, 4, 2), ImageWindow(4, 6, 1)),
    checkpoints=(4, 6, 8),
)
LATER = RequestSpec("a", prompt_tokens=8, max_tokens=3, windows=(ImageWindow(0, 3, 1), ImageWindow(5, 8, 2)))
ADMITTED = Admitted(RequestHandle(2, 1), (PageId(4), PageId(5)), StateRow(0))
AGAIN = Admitted(RequestHandle(3, 1), (PageId(1), PageId(2)))
DECODING = (ADMITTED, Dispatched(Fence(3)), PromptCommitted(8, 90))
PREEMPT = Preempt(StateRow(0), 95)
ENDED = (*DECODING, End(EndReason.STOP))

HISTORIES: dict[RequestState, tuple[RequestEvent, ...]] = {
    RequestState.QUEUED: (),
    RequestState.PREPARING: (*DECODING, PREEMPT, Parked(), AGAIN),
    RequestState.PREFILLING: (ADMITTED,),
    RequestState.DECODING: DECODING,
    RequestState.PREEMPTING: (ADMITTED, PREEMPT),
    RequestState.PREEMPTED: (*DECODING, PREEMPT, Parked()),
    RequestState.RETIRING: (*DECODING, Terminate(EndReason.STOP, 99)),
    RequestState.ENDED: ENDED,
    RequestState.CANCELLED: (*DECODING, Cancel()),
    RequestState.FAILED: (*DECODING, Fail()),
    RequestState.RETIRED: (*ENDED, Release()),
}
EVENTS: tuple[RequestEvent, ...] = (
    ADMITTED,
    Dispatched(Fence(9)),
    Blocked(),
    StageCommitted(GraphKind.RESUME),
    Stood(),
    Rebound(RequestHandle(2, 2)),
    PromptReady(),
    OutputReady(),
    ChunkCommitted(4),
    PromptCommitted(8, 95),
    TokensCommitted(1),
    PREEMPT,
    Parked(),
    Terminate(EndReason.LENGTH, 99),
    Retire(),
    End(EndReason.LENGTH),
    Cancel(),
    Fail(),
    Release(),
)


def shown(request: Request) -> tuple[object, ...]:
    """Everything that a request holds."""
    return copy.deepcopy(tuple(getattr(request, name) for name in Request.__slots__))


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
    history = HISTORIES[state]
    request = after(history)
    assert request.state is state
    before = shown(request)
    if isinstance(event, Stood):  # only image windows have anything to stand still for
        assert ((state, Stood) in TRANSITIONS) == (state is RequestState.PREPARING)
    else:
        assert ((state, type(event)) in TRANSITIONS) == possible(SPEC, history, event)
    attempt(request, SPEC, list(history), event)
    assert (shown(request) == before) == (not possible(SPEC, history, event) or not fits(SPEC, history, event))


def attempt(request: Request, spec: RequestSpec, history: list[RequestEvent], event: RequestEvent) -> None:
    """Apply `event`: what the rules allow moves, all else raises and changes nothing. Compare with the history."""
    before = shown(request)
    if not possible(spec, history, event):
        with pytest.raises(IllegalTransition):
            request.apply(event)
        assert shown(request) == before
    elif not fits(spec, history, event):
        with pytest.raises(ValueError, match=r"token|stage|ready"):
            request.apply(event)
        assert shown(request) == before
    else:
        step = request.apply(event)
        assert step.before is before[Request.__slots__.index("state")]
        assert step.after is request.state
        history.append(event)
    known = facts(spec, history)
    now = (request.state, request.consumed, request.produced, request.last_fence, request.end_reason, request.stages)
    assert [*known] == [*now]
    assert request.committed == known.consumed + known.produced
    assert request.runnable == (known.state in RUNNABLE)


events = st.one_of(
    st.just(ADMITTED),
    st.builds(Dispatched, st.integers(1, 9).map(Fence)),
    st.builds(ChunkCommitted, st.integers(-1, 9)),
    st.builds(PromptCommitted, st.integers(-1, 9), st.integers(1, 99)),
    st.builds(TokensCommitted, st.integers(-1, 4)),
    st.builds(End, st.sampled_from(EndReason)),
    st.builds(StageCommitted, st.sampled_from(sorted(STAGE_KINDS))),
    st.sampled_from([event for event in EVENTS if not event.__struct_fields__]),
    st.sampled_from((Rebound(RequestHandle(2, 2)), PREEMPT, Terminate(EndReason.STOP, 98))),
)


@given(
    st.sampled_from((SPEC, SCORED)),
    st.lists(st.one_of(events, events.filter(lambda e: not isinstance(e, Cancel | Fail | End)))),
)
def test_against_history(spec: RequestSpec, attempts: list[RequestEvent]) -> None:
    """Any attempts in any order."""
    request = Request(RequestId(7), spec)
    history: list[RequestEvent] = []
    for event in attempts:
        attempt(request, spec, history, event)


@given(st.sampled_from((SPEC, SCORED, IMAGES, LATER)), st.data())
def test_a_life_against_history(spec: RequestSpec, data: st.DataObject) -> None:
    """Lives that mostly do what is due, with everything else in between."""
    request = Request(RequestId(7), spec)
    history: list[RequestEvent] = []
    for _ in range(data.draw(st.integers(0, 40))):
        due: list[RequestEvent] = [
            event for event in EVENTS if possible(spec, history, event) and fits(spec, history, event)
        ]
        now = facts(spec, history)
        due += [StageCommitted(kind) for kind in now.stages[:1] if now.state is RequestState.PREPARING]
        if now.state is RequestState.PREFILLING:
            assert request.boundary() > request.consumed
            tokens = request.boundary() - request.consumed
            left = spec.prompt_tokens - request.consumed
            due += [PromptCommitted(left, 50) if tokens == left else ChunkCommitted(tokens)] * 3
        gentle = [event for event in due if not isinstance(event, Cancel | Fail | End | Terminate | Preempt)]
        attempt(request, spec, history, data.draw(st.one_of(st.sampled_from(gentle or due or EVENTS), events)))
        if request.state is RequestState.PREFILLING and request.stages:
            attempt(request, spec, history, Blocked())


def test_the_groups_of_states_have_every_state_but_the_last_once() -> None:
    groups = (WAITING, RUNNABLE, TERMINAL, FENCED)
    assert set(RequestState) - {RequestState.RETIRED} == set().union(*groups)
    assert sum(len(group) for group in groups) == len(RequestState) - 1


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
        ({"restored_tokens": 8}, "restored_tokens must leave"),
        ({"restored_tokens": -1}, "restored_tokens must leave"),
        ({"restored_tokens": 2, "scored": True}, "restored_tokens must be 0"),
        ({"checkpoints": (4, 4)}, "checkpoints must rise"),
        ({"checkpoints": (0,)}, "checkpoints must rise"),
        ({"checkpoints": (9,)}, "checkpoints must rise"),
        ({"windows": (ImageWindow(1, 3, 0),)}, "at least one operation"),
        ({"windows": (ImageWindow(3, 3, 1),)}, "windows must be ranges"),
        ({"windows": (ImageWindow(1, 4, 1), ImageWindow(3, 5, 1))}, "windows must be ranges"),
        ({"windows": (ImageWindow(5, 9, 1),)}, "windows must be ranges"),
        ({"windows": (ImageWindow(1, 4, 1),), "restored_tokens": 2}, r"windows: \[1, 4\) is cut"),
        ({"spans": ((4, 2),)}, "spans must be ranges"),
        ({"spans": ((1, 3), (2, 4))}, "spans must be ranges"),
        ({"spans": ((2, 5),), "system_end": 3}, r"spans: \[2, 5\) is cut"),
        ({"spans": ((2, 5),), "checkpoints": (4,)}, r"spans: \[2, 5\) is cut"),
        ({"spans": ((2, 5),), "restored_tokens": 4}, r"spans: \[2, 5\) is cut"),
        ({"spans": ((2, 5),), "windows": (ImageWindow(3, 4, 1),)}, r"spans: \[2, 5\) is cut"),
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
