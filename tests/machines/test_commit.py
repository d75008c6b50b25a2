"""Commit: every reason for which it refuses a plan, and what it freezes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest

from flare.machines.commitment import CommitRefused
from flare.machines.events import CancelRequest, HostStop, RequestMoved, SubmitFrame
from flare.machines.execution import Request
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.scheduler import Scheduler
from flare.machines.selection.reference import Normalizer
from flare.machines.selection.view import LaneWork, Plan
from flare.machines.slot import Participant

from .rig import (
    ADAPTATION_MS,
    CATALOG,
    DECODE,
    MS,
    PREFILL,
    SCORED,
    SMALL_DECODE,
    TTL_NS,
    Rig,
    decode,
    decode_lane,
    plan_of,
    prefill,
)


def shown(rig: Rig) -> tuple[object, ...]:
    """All that a commit could change, and what the next decision would read."""
    scheduler = rig.scheduler
    requests = [tuple(getattr(request, name) for name in Request.__slots__) for request in scheduler.requests.values()]
    frames = [(frame.state, frame.commit, frame.submit, frame.execute) for frame in scheduler.frames]
    return copy.deepcopy((requests, frames, scheduler.pages.free, msgspec.json.encode(scheduler.view(rig.now_ns))))


def refuse(rig: Rig, plan: Plan, because: str) -> None:
    """The plan is refused, nothing changes, and the next fence is the one that it did not get."""
    before = shown(rig)
    with pytest.raises(CommitRefused, match=because):
        rig.scheduler.commit(plan, rig.scheduler.board(rig.now_ns), rig.now_ns)
    assert shown(rig) == before
    rig.scheduler.check()


def changed(work: LaneWork, **fields: object) -> LaneWork:
    values = {name: getattr(work, name) for name in LaneWork.__struct_fields__}
    return LaneWork(**(values | fields))


def test_a_slot_that_was_given_again() -> None:
    """Ownership: the saved plan's generation has gone."""
    rig = Rig(slots=1)
    first = rig.decoding(1)[0]
    saved = decode(first)
    rig.scheduler.apply(CancelRequest(first.id), rig.now_ns)
    rig.arrive()
    refuse(rig, saved, "slot 0 is no longer owned by generation 1")


def test_an_empty_slot() -> None:
    rig = Rig()
    first = rig.decoding(1)[0]
    saved = decode(first)
    rig.scheduler.apply(CancelRequest(first.id), rig.now_ns)
    refuse(rig, saved, "slot 0 is no longer owned by generation 1")


@pytest.mark.parametrize("event", [CancelRequest, HostStop])
def test_a_request_that_is_over_and_still_holds_its_slot(event: Callable[[int], CancelRequest | HostStop]) -> None:
    """Epoch: it was cancelled or stopped while a frame that serves it is in flight."""
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first, second))
    rig.scheduler.apply(event(first.id), rig.now_ns)
    refuse(rig, decode(first), "slot 0 is no longer owned by generation 1")


def test_another_phase() -> None:
    rig = Rig()
    first = rig.arrive(8)
    refuse(rig, decode(first), "slot 0 is in phase prefill")
    refuse(rig, prefill(first, 8, SCORED), "slot 0 is in phase prefill")
    saved = prefill(first, 8)
    rig.run(saved)
    refuse(rig, saved, "slot 0 is in phase decode")
    scored = rig.arrive(8, scored=True)
    refuse(rig, prefill(scored, 8, PREFILL), "slot 1 is in phase scored_prefill")


def test_another_position() -> None:
    rig = Rig()
    first = rig.arrive(12)
    saved = prefill(first, 4)
    rig.run(saved)
    refuse(rig, saved, "slot 0 stands at prompt token 4")


@pytest.mark.parametrize(("tokens", "system_end"), [(6, 5), (9, 0), (0, 0), (-1, 0)])
def test_a_chunk_beyond_the_boundary_or_empty(tokens: int, system_end: int) -> None:
    rig = Rig()
    first = rig.arrive(8, system_end=system_end)
    refuse(rig, prefill(first, tokens), "slot 0 stands at prompt token 0")


def test_a_chunk_beyond_the_graph() -> None:
    rig = Rig()
    first = rig.arrive(40)
    refuse(rig, prefill(first, 17), "slot 0 stands at prompt token 0, 16 from its reach")


@pytest.mark.parametrize(("prompt_tokens", "tokens", "max_tokens"), [(8, 4, 8), (8, 8, 8), (8, 8, 0)])
def test_an_output_token_in_the_wrong_place(prompt_tokens: int, tokens: int, max_tokens: int) -> None:
    rig = Rig()
    first = rig.arrive(prompt_tokens, max_tokens, scored=max_tokens == 0)
    plan = prefill(first, tokens)
    (work,) = plan.lanes
    refuse(rig, plan_of(plan.shape, changed(work, emits=not work.emits)), "first output token at the end of its prompt")


def test_no_output_left_behind_queued_work() -> None:
    """The last token that a request may have is on its way."""
    rig = Rig()
    (first,) = rig.decoding(1, max_tokens=2)
    rig.commit(decode(first))
    refuse(rig, decode(first), "slot 0 has no output left")


def test_more_than_one_token_for_a_decode_lane() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    refuse(rig, plan_of(DECODE, changed(decode_lane(first), tokens=2)), "slot 0 has no output left")


def test_a_kind_that_needs_an_empty_window() -> None:
    """Feedback: prefill is not queued behind decode."""
    rig = Rig()
    (first,) = rig.decoding(1)
    second = rig.arrive()
    rig.commit(decode(first))
    refuse(rig, prefill(second, 8), "needs completion feedback")


def test_a_request_that_needs_feedback() -> None:
    rig = Rig()
    first, second = rig.decoding(2, needs_feedback=True)
    (third,) = rig.decoding(1)
    rig.commit(decode(first))
    refuse(rig, decode(second), "needs completion feedback")
    refuse(rig, decode(third, second), "needs completion feedback")
    rig.commit(decode(third))


def test_a_cost_that_went_stale_since_the_choice() -> None:
    """Freshness: the plan is saved, the estimate outlives its time, a frame of another graph is in flight."""
    rig = Rig()
    first, second = rig.decoding(2)
    saved = decode(second)
    rig.now_ns += TTL_NS
    rig.run(decode(first, shape=SMALL_DECODE))
    rig.commit(decode(first, shape=SMALL_DECODE))
    refuse(rig, saved, "needs completion feedback")


def test_a_cost_that_is_not_known() -> None:
    rig = Rig(known=(SMALL_DECODE, PREFILL))
    first, second = rig.decoding(2)
    rig.commit(decode(first, shape=SMALL_DECODE))
    refuse(rig, plan_of(DECODE, decode_lane(second), duration_ms=0), "needs completion feedback")


@pytest.mark.parametrize("closing", ["kind", "unknown", "stale"])
def test_a_frame_in_flight_that_closes_the_window(closing: str) -> None:
    """Nothing is queued behind another kind than decode, nor behind an unknown or stale cost."""
    rig = Rig(known=(SMALL_DECODE, PREFILL) if closing == "unknown" else CATALOG)
    first, second = rig.decoding(2)
    if closing == "stale":
        rig.now_ns += TTL_NS
        rig.run(decode(first, shape=SMALL_DECODE))
        rig.now_ns += 1
    rig.commit(prefill(rig.arrive(), 8) if closing == "kind" else decode(first))
    assert not rig.scheduler.accepts
    refuse(rig, decode(second, shape=SMALL_DECODE), "no frame slot can accept a plan")


def test_no_free_frame_slot() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    rig.commit(decode(first))
    refuse(rig, decode(first), "no frame slot can accept a plan")


def test_a_graph_that_is_not_prepared_or_too_small_or_for_nobody() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    unprepared = Plan(
        GraphShape(GraphKind.DECODE, 2), (decode_lane(first),), 1, 0, 1.0, 0.0, decode(first).reason, False
    )
    refuse(rig, unprepared, "decode/b2 is not prepared")
    refuse(rig, decode(first, second, shape=SMALL_DECODE), "decode/b1 cannot serve 2 lanes")
    refuse(rig, decode(), "decode/b4 cannot serve 0 lanes")


def test_a_slot_twice() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    refuse(rig, decode(first, first), "a slot is served twice")


def test_a_refusal_uses_no_fence() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    refuse(rig, decode(first, first), "twice")
    assert rig.commit(decode(first)) == 2


def test_a_stale_plan_may_go_alone() -> None:
    """Staleness is no reason to refuse where no frame is in flight."""
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.now_ns += TTL_NS + 1
    rig.commit(decode(first))
    assert not rig.scheduler.accepts


def test_pages_are_bound_with_the_first_frame_alone() -> None:
    rig = Rig()
    first = rig.arrive(12)
    bound = []
    for tokens in (8, 4):
        effects = rig.scheduler.commit(prefill(first, tokens), rig.scheduler.board(rig.now_ns), rig.now_ns)
        (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
        assert not [effect for effect in effects if isinstance(effect, RequestMoved)]
        bound.append(submit.lanes[0].pages)
        rig.complete()
    assert bound == [first.pages, None]
    assert len(first.pages) == 5


def test_participants_are_all_that_are_runnable_at_commit() -> None:
    """Served or not, with the normalizers and the service expected; who is over or comes later is none."""
    rig = Rig()
    first, second, gone = rig.decoding(3)
    waiting = rig.arrive(8)
    rig.commit(decode(first, gone, shape=DECODE))
    rig.scheduler.apply(CancelRequest(gone.id), rig.now_ns)
    rig.commit(decode(first))
    rig.arrive(8)
    frame = rig.scheduler.in_flight[1]
    assert frame.commit is not None
    assert first.handle and second.handle and waiting.handle
    # Two streams are left; 10 ms serve both at once, 5 ms one: sigma is 2 * min(5/1, 10/2) = 10 ms.
    assert frame.commit.participants == (
        Participant(first.handle, Normalizer(0.2, 10.0), 1.0, True),
        Participant(second.handle, Normalizer(0.2, 10.0), 0.0, False),
        Participant(waiting.handle, Normalizer(9 / 20, None), 0.0, False),
    )


def test_expected_finishes_add_up_and_are_anchored_at_the_end_of_the_frame_before() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    begin_ns = rig.now_ns
    rig.commit(decode(first, shape=SMALL_DECODE))
    rig.now_ns += 2 * MS
    rig.commit(decode(second))
    finishes = [frame.submit.expected_finish_ns - begin_ns for frame in rig.scheduler.in_flight if frame.submit]
    assert finishes == [5 * MS, 15 * MS]
    rig.complete(after_ms=7)
    finishes = [frame.submit.expected_finish_ns - begin_ns for frame in rig.scheduler.in_flight if frame.submit]
    assert finishes == [19 * MS]
    assert [frame.submit.isolated for frame in rig.scheduler.in_flight if frame.submit] == [False]


def test_a_frame_behind_one_that_is_late_starts_now() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first, shape=SMALL_DECODE))
    rig.now_ns += 30 * MS
    rig.commit(decode(first))
    frame = rig.scheduler.in_flight[1]
    assert frame.submit is not None
    assert frame.submit.expected_finish_ns == rig.now_ns + 10 * MS


@pytest.mark.parametrize("slots", [0, 65, -1])
def test_slots_are_bounded(slots: int) -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="slots must be from 1 to 64"):
        Scheduler(
            CATALOG,
            rig.scheduler.policy,
            slots=slots,
            pages=rig.scheduler.pages,
            waiting=rig.scheduler.waiting,
            durations=rig.scheduler.durations,
            adaptation_ms=ADAPTATION_MS,
        )
