"""Ended requests that retire through a snapshot, and requests that are preempted and resumed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flare.machines.commitment import CommitRefused
from flare.machines.events import (
    CancelRequest,
    CompletionRecord,
    Deliver,
    Effect,
    HostStop,
    PreemptRequest,
    RequestLost,
    Retired,
    SubmitFrame,
)
from flare.machines.execution import Request
from flare.machines.graph import GraphKind
from flare.machines.ids import RequestHandle, StateRow
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason
from flare.machines.selection.view import Phase
from flare.machines.slot import StageWork

from .rig import (
    CATALOG,
    MS,
    RESUME,
    RETIRE,
    SHARE,
    SNAPSHOT,
    STAGED,
    Rig,
    decode,
    plan_of,
    prefill,
    stage,
    stage_lane,
)
from .test_accounting import charged, close, delivery_price, token_price
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


# Retirement


def test_text_is_delivered_at_once_and_the_response_completes_with_the_snapshot() -> None:
    rig = Rig(catalog=STAGED)
    (request,) = rig.decoding(1, max_tokens=2)
    rig.commit(decode(request))
    effects = rig.complete(after_ms=10)
    assert [(e.request, e.ended) for e in effects if isinstance(e, Deliver)] == [(request.id, EndReason.LENGTH)]
    assert not retired(effects)
    assert (rig.scheduler.free_slots, request.end_reason) == (3, EndReason.LENGTH)
    plan = stage(RETIRE, request)
    assert submitted(rig.scheduler.commit(plan, rig.scheduler.view(rig.now_ns), rig.now_ns)) == StageWork(retires=True)
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


# Preemption


def parked(rig: Rig, request: Request) -> list[Effect]:
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    return rig.run(stage(RETIRE, request))


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Fresh slot, generation and pages; what it has had, its prices and its age stay."""
    rig = Rig(catalog=STAGED, slots=1, state_rows=1)
    (request,) = rig.decoding(1, max_tokens=4)
    rig.run(decode(request))
    handle, visible_ns = request.handle, request.visible_at_ns
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    seen = row(rig.scheduler.view(rig.now_ns + 3 * MS), request)
    assert (request.state, seen.phase, seen.age_ms) == (RequestState.PREEMPTING, Phase.TERMINAL, 3.0)
    plan = stage(RETIRE, request)
    effects = rig.scheduler.commit(plan, rig.scheduler.view(rig.now_ns), rig.now_ns)
    assert submitted(effects) == StageWork(StateRow(0), retires=True)
    prices = (token_price(request), delivery_price(request))
    effects = rig.complete(after_ms=4)
    assert not retired(effects) and not [effect for effect in effects if isinstance(effect, Deliver)]
    assert (request.state, request.stages, request.produced) == (RequestState.PREPARING, (GraphKind.RESUME,), 2)
    assert request.handle == RequestHandle(0, 2) != handle
    seen = row(rig.scheduler.view(rig.now_ns), request)
    assert (seen.phase, seen.stages, seen.output_left) == (Phase.DECODE, (GraphKind.RESUME,), 2)
    assert seen.age_ms == (rig.now_ns - visible_ns) / MS
    assert (token_price(request), delivery_price(request)) == prices
    effects = rig.scheduler.commit(stage(RESUME, request), rig.scheduler.view(rig.now_ns), rig.now_ns)
    assert submitted(effects) == StageWork(StateRow(0))
    (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
    assert submit.lanes[0].pages == request.pages and len(request.pages) == 3
    rig.complete(after_ms=4)
    assert (request.state, rig.scheduler.state_rows.free) == (RequestState.DECODING, 1)
    rig.run(decode(request))
    assert request.produced == 3


def test_a_preempted_request_waits_before_its_clients_others() -> None:
    rig = Rig(catalog=STAGED, slots=2, state_rows=2)
    first, second = rig.decoding(2)
    third = rig.arrive()
    rig.scheduler.apply(PreemptRequest(first.id), rig.now_ns)
    rig.scheduler.apply(PreemptRequest(second.id), rig.now_ns)
    rig.run(stage(RETIRE, first, second))
    states = [request.state for request in (first, second, third)]
    assert states == [RequestState.PREPARING, RequestState.PREPARING, RequestState.QUEUED]
    assert rig.scheduler.waiting.tokens == third.spec.prompt_tokens


def test_a_preempted_request_makes_room_for_another_client() -> None:
    rig = Rig(catalog=STAGED, slots=1, state_rows=1)
    (request,) = rig.decoding(1)
    other = rig.arrive(client="b")
    rig.run(decode(request))
    parked(rig, request)
    assert (request.state, request.handle, other.state) == (RequestState.PREEMPTED, None, RequestState.PREFILLING)
    assert rig.scheduler.waiting.requests == 1
    assert rig.scheduler.state_rows.free == 0


def test_tokens_in_flight_still_count_for_a_request_that_is_preempted() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    (request,) = rig.decoding(1)
    rig.commit(decode(request))
    rig.commit(decode(request))
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    assert len([effect for effect in rig.complete(after_ms=10) if isinstance(effect, Deliver)]) == 1
    rig.complete(after_ms=10)
    assert (request.produced, request.state) == (3, RequestState.PREEMPTING)
    assert rig.scheduler.waiting.service("a") == 8 + 2 * 3


def test_one_that_was_preempted_before_its_price_was_set_gets_it_with_its_charge() -> None:
    """It still counts as one of those that share the device."""
    rig = Rig(catalog=STAGED, known=(), slots=1, state_rows=1)
    request = rig.arrive(12)
    rig.run(prefill(request, 4))
    rig.commit(prefill(request, 4))
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    assert request.prices.log_token is None
    rig.complete(after_ms=20)
    rate = 9 / 20  # the eight tokens that were left and the first output, by the one graph that had been measured
    assert token_price(request) == close(charged(SHARE * 1 / rate, 4, 20))


def test_an_end_in_flight_ends_the_preemption() -> None:
    """Nothing is left to go on with: it is retired, its age that of the preemption, and its row is free again."""
    rig = Rig(catalog=STAGED, state_rows=1)
    (request,) = rig.decoding(1, max_tokens=2)
    rig.commit(decode(request))
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    rig.complete(after_ms=10)
    assert request.state is RequestState.RETIRING
    assert row(rig.scheduler.view(rig.now_ns), request).age_ms == 10.0
    effects = rig.scheduler.commit(stage(RETIRE, request), rig.scheduler.view(rig.now_ns), rig.now_ns)
    assert submitted(effects) == StageWork(retires=True)
    assert retired(rig.complete(after_ms=4)) == [request.id]
    assert rig.scheduler.state_rows.free == 1


def test_a_prompt_is_preempted_and_resumed_with_its_windows() -> None:
    rig = Rig(catalog=STAGED, slots=1, state_rows=1)
    request = rig.arrive(12, 2, checkpoints=(4, 8))
    rig.run(prefill(request, 4))
    rig.run(stage(SNAPSHOT, request))
    row_before = request.state_row
    parked(rig, request)
    assert (request.state_row, request.stages) == (row_before, (GraphKind.RESUME,))
    rig.run(stage(RESUME, request))
    assert (request.state, request.state_row) == (RequestState.PREFILLING, row_before)
    rig.run(prefill(request, 4))
    assert request.stages == (GraphKind.SNAPSHOT,)


@pytest.mark.parametrize("why", ["no row", "no graph", "waiting", "stages", "over", "unknown"])
def test_a_preemption_that_cannot_be_does_nothing(why: str) -> None:
    catalog = CATALOG if why == "no graph" else STAGED
    rig = Rig(catalog=catalog, slots=2, state_rows=0 if why == "no row" else 1)
    (request,) = rig.decoding(1, max_tokens=2)
    if why == "waiting":
        rig.arrive()
        request = rig.arrive()
    if why == "stages":
        request = rig.arrive(8, 2, initialize=True)
    if why == "over":
        rig.run(decode(request))
    before = request.state
    name = 99 if why == "unknown" else request.id
    assert rig.scheduler.apply(PreemptRequest(name), rig.now_ns) == []  # type: ignore[arg-type]
    assert request.state is before


def test_a_failed_preemption_loses_the_request() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    (request,) = rig.decoding(1)
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    rig.commit(stage(RETIRE, request))
    effects = rig.complete(error="broken")
    assert [effect.request for effect in effects if isinstance(effect, RequestLost)] == [request.id]
    assert rig.scheduler.idle and rig.scheduler.state_rows.free == 1


@pytest.mark.parametrize("event", [CancelRequest, HostStop])
def test_over_while_it_waits_preempted(event: type[CancelRequest] | type[HostStop]) -> None:
    rig = Rig(catalog=STAGED, slots=1, state_rows=1)
    (request,) = rig.decoding(1)
    rig.arrive(client="b")
    rig.run(decode(request))
    parked(rig, request)
    effects = rig.scheduler.apply(event(request.id), rig.now_ns)
    assert retired(effects) == ([request.id] if event is HostStop else [])
    assert (request.state, rig.scheduler.state_rows.free) == (RequestState.RETIRED, 1)
    assert rig.scheduler.waiting.requests == 0
    rig.scheduler.check()


def test_a_preemption_does_not_wait_for_what_it_may_not_have() -> None:
    """A plan saved before it is refused afterwards."""
    rig = Rig(catalog=STAGED, state_rows=1)
    (request,) = rig.decoding(1)
    saved = decode(request)
    rig.scheduler.apply(PreemptRequest(request.id), rig.now_ns)
    with pytest.raises(CommitRefused, match="slot 0 is in phase terminal"):
        rig.commit(saved)
    work = stage_lane(request)
    elsewhere = plan_of(RETIRE, replace(work, start=0))
    with pytest.raises(CommitRefused, match="a stage gives no tokens"):
        rig.commit(elsewhere)


def test_who_waits_for_a_state_row_lets_the_preempted_go_first() -> None:
    """The row that it waits for is theirs: otherwise both would wait for ever."""
    rig = Rig(catalog=STAGED, slots=1, state_rows=1)
    (request,) = rig.decoding(1)
    rig.run(decode(request))
    waiting = rig.arrive(12, 2, client="b", checkpoints=(3,))
    parked(rig, request)
    assert (request.state, waiting.state) == (RequestState.PREPARING, RequestState.QUEUED)
    rig.run(stage(RESUME, request))
    rig.scheduler.apply(CancelRequest(request.id), rig.now_ns)
    assert waiting.state is RequestState.PREFILLING


@pytest.mark.parametrize("in_flight", [False, True])
def test_stopped_before_it_has_resumed_there_is_nothing_to_save(in_flight: bool) -> None:
    """Its state has not come back to the device yet: the response completes at once. With the resume it does not."""
    rig = Rig(catalog=STAGED, slots=1, state_rows=1)
    (request,) = rig.decoding(1)
    parked(rig, request)
    if in_flight:
        rig.commit(stage(RESUME, request))
    effects = rig.scheduler.apply(HostStop(request.id), rig.now_ns)
    if in_flight:
        assert retired(effects) == []
        rig.complete(after_ms=4)
        effects = rig.run(stage(RETIRE, request))
    assert retired(effects) == [request.id]
    assert rig.scheduler.idle and rig.scheduler.state_rows.free == 1
