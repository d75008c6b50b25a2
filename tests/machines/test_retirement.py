"""Ended requests that retire through a snapshot before their response completes."""

from __future__ import annotations

import pytest

from flare.machines.commitment import CommitRefused
from flare.machines.events import (
    CancelRequest,
    CompletionRecord,
    Deliver,
    Effect,
    FrameCounted,
    HostStop,
    RequestLost,
    Retired,
    SubmitFrame,
)
from flare.machines.execution import Request
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason
from flare.machines.selection.view import Phase
from flare.machines.slot import StageWork

from .rig import (
    MS,
    RESUME,
    RETIRE,
    SNAPSHOT,
    STAGED,
    Rig,
    decode,
    prefill,
    stage,
)
from .test_accounting import delivery_price, token_price
from .test_snapshot import row


def retired(effects: list[Effect]) -> list[int]:
    return [effect.request for effect in effects if isinstance(effect, Retired)]


def ending(rig: Rig) -> Request:
    """A request whose output is complete, and that is not yet retired."""
    (request,) = rig.decoding(1, max_tokens=2)
    rig.run(decode(request))
    assert request.state is RequestState.RETIRING
    return request


def submitted(effects: list[Effect]) -> StageWork | None:
    (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
    return submit.lanes[0].stage


def test_a_row_that_is_given_up_may_have_gone_on_with_rounds_in_flight_at_its_stop() -> None:
    rig = Rig(catalog=STAGED)
    stopped, ended = rig.decoding(2, max_tokens=3)
    rig.run(decode(stopped, ended))
    rig.commit(decode(stopped, ended))
    rig.scheduler.apply(HostStop(stopped.id), rig.now_ns)
    assert stopped.handle is not None and ended.handle is not None
    records = [
        CompletionRecord(stopped.handle, 11, EndReason.LENGTH),
        CompletionRecord(ended.handle, 11, EndReason.LENGTH),
    ]
    rig.complete(*records)
    assert stopped.committed == 10
    rig.commit(stage(RETIRE, stopped, ended))
    effects = rig.complete(CompletionRecord(stopped.handle, 11, None), CompletionRecord(ended.handle, 11, None))
    assert [effect.error for effect in effects if isinstance(effect, FrameCounted)] == [None]
    assert retired(effects) == [stopped.id, ended.id]


def test_text_is_delivered_at_once_and_the_response_completes_with_the_snapshot() -> None:
    rig = Rig(catalog=STAGED)
    (request,) = rig.decoding(1, max_tokens=2)
    rig.commit(decode(request))
    effects = rig.complete(after_ms=10)
    assert [(e.request, e.ended) for e in effects if isinstance(e, Deliver)] == [(request.id, EndReason.LENGTH)]
    assert not retired(effects)
    assert (rig.scheduler.free_slots, request.end_reason) == (3, EndReason.LENGTH)
    plan = stage(RETIRE, request)
    assert submitted(rig.scheduler.commit(plan, rig.scheduler.board(rig.now_ns), rig.now_ns)) == StageWork(retires=True)
    effects = rig.complete(after_ms=4)
    assert retired(effects) == [request.id]
    assert request.state is RequestState.RETIRED and rig.scheduler.idle
    assert rig.scheduler.pages.free == rig.scheduler.pages.total


def test_without_a_terminal_snapshot_graph_an_end_is_the_end() -> None:
    """Even where other requests are snapshot: the catalog has no graph to retire with."""
    catalog = tuple(shape for shape in STAGED if shape is not RETIRE)
    rig = Rig(catalog=catalog)
    (request,) = rig.decoding(1, max_tokens=2)
    effects = rig.run(decode(request))
    assert (request.state, retired(effects), rig.scheduler.idle) == (RequestState.RETIRED, [], True)


def test_a_terminal_age_counts_from_the_completion_that_found_the_end() -> None:
    """Neither text that is published late nor a frame in flight resets it."""
    rig = Rig(catalog=STAGED)
    first, second = rig.decoding(2, max_tokens=2)
    rig.commit(decode(first))
    rig.complete(after_ms=10, publish=False)
    rig.run(prefill(rig.arrive(8), 8))
    seen = row(rig.scheduler.view(rig.now_ns), first)
    assert (seen.phase, seen.stages, seen.age_ms) == (Phase.TERMINAL, (), 20.0)
    rig.commit(decode(second))
    assert row(rig.scheduler.view(rig.now_ns), first).age_ms == 30.0


def test_a_retiring_request_is_no_participant() -> None:
    rig = Rig(catalog=STAGED)
    request = ending(rig)
    (other,) = rig.decoding(1)
    before = (token_price(request), delivery_price(request))
    rig.commit(decode(other))
    commit = rig.scheduler.in_flight[0].commit
    assert commit is not None and [p.handle for p in commit.participants] == [other.handle]
    rig.complete(after_ms=10)
    assert (token_price(request), delivery_price(request)) == before
    assert rig.scheduler.waiting.service("a") == 8 + 2 * 2 + 8 + 2 * 2


def test_a_stop_of_a_request_without_output_changes_nothing() -> None:
    """Whether it waits for a slot, for a stage or for the rest of its prompt: nothing could have stopped it."""
    rig = Rig(catalog=STAGED, slots=2)
    prefilling, preparing, queued = rig.arrive(12), rig.arrive(initialize=True), rig.arrive()
    rig.run(prefill(prefilling, 4))
    requests = (prefilling, preparing, queued)
    states = [request.state for request in requests]
    assert states == [RequestState.PREFILLING, RequestState.PREPARING, RequestState.QUEUED]
    assert [rig.scheduler.apply(HostStop(request.id), rig.now_ns) for request in requests] == [[], [], []]
    assert [request.state for request in requests] == states


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_stop_string_leads_to_retirement_too(in_flight: bool) -> None:
    rig = Rig(catalog=STAGED)
    (request,) = rig.decoding(1)
    if in_flight:
        rig.commit(decode(request))
        rig.now_ns += 3 * MS
    effects = rig.scheduler.apply(HostStop(request.id), rig.now_ns)
    assert (request.state, request.end_reason, retired(effects)) == (RequestState.RETIRING, EndReason.STOP, [])
    if in_flight:
        effects = rig.complete(after_ms=10)
        assert not [effect for effect in effects if isinstance(effect, Deliver)]
        assert request.produced == 1
    assert retired(rig.run(stage(SNAPSHOT, request))) == [request.id]


def test_a_failed_terminal_snapshot_costs_the_request_nothing() -> None:
    """Its answer is complete: the response completes, and the resources are free."""
    rig = Rig(catalog=STAGED)
    request = ending(rig)
    rig.commit(stage(RETIRE, request))
    effects = rig.complete(error="broken")
    assert retired(effects) == [request.id]
    assert not [effect for effect in effects if isinstance(effect, RequestLost)]
    assert rig.scheduler.idle


def test_a_malformed_terminal_snapshot_is_a_failed_one() -> None:
    rig = Rig(catalog=STAGED)
    request = ending(rig)
    rig.commit(stage(RETIRE, request))
    assert request.handle is not None
    effects = rig.complete(CompletionRecord(request.handle, request.committed + 1, None))
    assert retired(effects) == [request.id] and rig.scheduler.idle


def test_a_request_whose_row_is_spoilt_by_a_failed_frame_retires_without_a_snapshot() -> None:
    """Its answer is complete; what its row holds is not known any longer."""
    rig = Rig(catalog=STAGED)
    request, other = rig.decoding(2)
    rig.commit(decode(request, other))
    rig.scheduler.apply(HostStop(request.id), rig.now_ns)
    effects = rig.complete(error="broken")
    assert retired(effects) == [request.id]
    assert [effect.request for effect in effects if isinstance(effect, RequestLost)] == [other.id]
    assert rig.scheduler.idle


def test_a_cancelled_request_retires_without_a_snapshot() -> None:
    rig = Rig(catalog=STAGED)
    request, other = ending(rig), rig.arrive()
    assert retired(rig.scheduler.apply(CancelRequest(request.id), rig.now_ns)) == []
    assert request.state is RequestState.RETIRED
    rig.commit(prefill(other, 8))
    effects = rig.complete(error="broken")
    assert retired(effects) == [] and rig.scheduler.idle


def test_cancelled_under_its_snapshot_a_request_keeps_its_slot_until_the_end() -> None:
    rig = Rig(catalog=STAGED)
    request = ending(rig)
    rig.commit(stage(RETIRE, request))
    rig.scheduler.apply(CancelRequest(request.id), rig.now_ns)
    assert rig.scheduler.free_slots == 3
    assert retired(rig.complete(after_ms=4)) == [] and rig.scheduler.idle


def test_a_snapshot_serves_terminal_rows_and_checkpoints_together() -> None:
    """One that was stopped during its checkpoint's snapshot is not retired by it."""
    rig = Rig(catalog=STAGED, state_rows=1)
    request = ending(rig)
    saving = rig.arrive(8, 4, checkpoints=(8,))
    rig.run(prefill(saving, 8))
    rig.commit(stage(SNAPSHOT, request, saving))
    rig.scheduler.apply(HostStop(saving.id), rig.now_ns)
    assert retired(rig.complete(after_ms=4)) == [request.id]
    assert saving.state is RequestState.RETIRING
    assert retired(rig.run(stage(RETIRE, saving))) == [saving.id]
    assert rig.scheduler.state_rows.free == 1


def test_a_scored_prompt_retires_too() -> None:
    rig = Rig(catalog=STAGED)
    request = rig.arrive(8, 0, scored=True)
    rig.run(prefill(request, 8))
    assert request.state is RequestState.RETIRING
    assert retired(rig.run(stage(RETIRE, request))) == [request.id]


def test_a_terminal_row_needs_the_snapshot_family() -> None:
    rig = Rig(catalog=STAGED)
    request = ending(rig)
    for plan in (decode(request), stage(RESUME, request)):
        with pytest.raises(CommitRefused, match="slot 0 is in phase terminal"):
            rig.commit(plan)
