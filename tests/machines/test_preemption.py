"""Requests that are preempted: saved through a snapshot, parked, and resumed where they were."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flare.machines.commitment import CommitRefused
from flare.machines.events import (
    CancelRequest,
    Deliver,
    Effect,
    HostStop,
    PreemptRequest,
    RequestLost,
    SubmitFrame,
)
from flare.machines.execution import Request
from flare.machines.graph import GraphKind
from flare.machines.ids import RequestHandle, StateRow
from flare.machines.lifecycle import RequestState
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
from .test_retirement import retired, submitted
from .test_snapshot import row


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
    effects = rig.scheduler.commit(plan, rig.scheduler.board(rig.now_ns), rig.now_ns)
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
    effects = rig.scheduler.commit(stage(RESUME, request), rig.scheduler.board(rig.now_ns), rig.now_ns)
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
    effects = rig.scheduler.commit(stage(RETIRE, request), rig.scheduler.board(rig.now_ns), rig.now_ns)
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
