"""The frame slot machine, cell by cell and against its history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence
from flare.machines.selection.view import Plan, Reason
from flare.machines.slot import (
    TRANSITIONS,
    Commit,
    Execute,
    FrameSlot,
    Free,
    Reject,
    SlotEvent,
    SlotState,
    Submit,
    Validate,
)
from flare.machines.table import IllegalTransition

from .oracle_slot import possible, state

PLAN = Plan(GraphShape(GraphKind.DECODE, 1), (), 500, None, 1.0, 0.0, Reason.ORDINARY, False)
COMMIT = Commit(Fence(4), PLAN, (), closes_window=False)
SUBMIT = Submit(100, 600, isolated=True)
EXECUTE = Execute(700, 480)
EVENTS: tuple[SlotEvent, ...] = (COMMIT, SUBMIT, EXECUTE, Validate(), Reject(), Free())
HISTORIES: dict[SlotState, tuple[SlotEvent, ...]] = {
    SlotState.FREE: (),
    SlotState.COMMITTED: (COMMIT,),
    SlotState.SUBMITTED: (COMMIT, SUBMIT),
    SlotState.EXECUTED: (COMMIT, SUBMIT, EXECUTE),
    SlotState.VALIDATED: (COMMIT, SUBMIT, EXECUTE, Validate()),
    SlotState.FAILED: (COMMIT, SUBMIT, EXECUTE, Reject()),
}


def shown(slot: FrameSlot) -> tuple[object, ...]:
    return slot.index, slot.state, slot.commit, slot.submit, slot.execute


def after(history: tuple[SlotEvent, ...]) -> FrameSlot:
    slot = FrameSlot(1)
    for event in history:
        slot.apply(event)
        slot.check()
    return slot


def test_every_state_and_event_is_in_the_tests() -> None:
    assert set(HISTORIES) == set(SlotState)
    assert {type(event) for event in EVENTS} == set(SlotEvent.__args__) == {event for _, event in TRANSITIONS}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("before", SlotState, ids=lambda before: before.value)
def test_every_cell(before: SlotState, event: SlotEvent) -> None:
    history = HISTORIES[before]
    slot = after(history)
    assert slot.state is before
    assert ((before, type(event)) in TRANSITIONS) == possible(history, event)
    if possible(history, event):
        step = slot.apply(event)
        assert (step.before, step.after) == (before, slot.state)
        assert slot.state is TRANSITIONS[before, type(event)] is state((*history, event))
    else:
        held = shown(slot)
        with pytest.raises(IllegalTransition, match=f"frame slot: no transition from {before.value}"):
            slot.apply(event)
        assert shown(slot) == held
    slot.check()


@given(st.lists(st.sampled_from(EVENTS)))
def test_against_history(attempts: list[SlotEvent]) -> None:
    slot, history = FrameSlot(0), list[SlotEvent]()
    for event in attempts:
        if possible(history, event):
            slot.apply(event)
            history.append(event)
        else:
            held = shown(slot)
            with pytest.raises(IllegalTransition):
                slot.apply(event)
            assert shown(slot) == held
        slot.check()
        assert slot.state is state(history)


def test_a_slot_keeps_its_promises_until_it_is_free() -> None:
    slot = after(HISTORIES[SlotState.VALIDATED])
    assert (slot.commit, slot.submit, slot.execute) == (COMMIT, SUBMIT, EXECUTE)
    slot.apply(Free())
    assert (slot.commit, slot.submit, slot.execute) == (None, None, None)


@pytest.mark.parametrize(
    ("isolated", "device_ns", "interval_ns"),
    [(True, 480, 600), (True, 900, 900), (False, 480, 480), (True, 0, 0), (False, 0, 0), (False, -3, 0), (True, -3, 0)],
)
def test_interval(isolated: bool, device_ns: int, interval_ns: int) -> None:
    """The greater of device and wall time where the frame was alone, device time otherwise, nothing without it."""
    slot = after((COMMIT, Submit(100, 600, isolated), Execute(700, device_ns)))
    assert slot.interval_ns == interval_ns


def test_only_a_frame_in_flight_is_anchored_again() -> None:
    slot = after(HISTORIES[SlotState.SUBMITTED])
    slot.reanchor(650)
    assert slot.submit == Submit(100, 650, isolated=True)
    slot.apply(EXECUTE)
    with pytest.raises(AssertionError):
        slot.reanchor(700)
