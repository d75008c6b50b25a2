"""Completions: what is found in order, and that a malformed one changes no history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flare.machines.events import (
    CancelRequest,
    CompleteFrame,
    CompletionRecord,
    Deliver,
    FrameCounted,
    HostStop,
    RequestLost,
)
from flare.machines.execution import Request
from flare.machines.ids import Fence, RequestHandle
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason

from .rig import DECODE, Rig, decode, prefill

STOP, LENGTH = EndReason.STOP, EndReason.LENGTH


def record(request: Request, units: int, ended: EndReason | None = None) -> CompletionRecord:
    """A record `units` beyond the request's committed counter."""
    assert request.handle is not None
    return CompletionRecord(request.handle, request.committed + units, ended)


def spoiled(rig: Rig, *records: CompletionRecord) -> str:
    """Complete the oldest frame with `records`; the error that it is found to be. It changes no price or estimate."""
    scheduler = rig.scheduler
    prices = {request.id: (request.prices.log_token, request.prices.log_delivery) for request in scheduler.residents}
    counters = {request.id: request.committed for request in scheduler.residents}
    services = {request.spec.client: scheduler.waiting.service(request.spec.client) for request in scheduler.residents}
    rows = [(row.duration_ns, row.observed_at_ns) for row in scheduler.durations.rows(rig.now_ns)]
    requests = dict(scheduler.requests)
    commit = scheduler.in_flight[0].commit
    assert commit is not None
    served = {work.slot for work in commit.plan.lanes}
    effects = scheduler.apply(CompleteFrame(commit.fence, 7_000_000, records), rig.now_ns)
    scheduler.check()
    for request in requests.values():
        assert (request.prices.log_token, request.prices.log_delivery) == prices[request.id]
        assert request.committed == counters[request.id]
        assert request.handle is not None
        assert (request.state in (RequestState.FAILED, RequestState.RETIRED)) == (request.handle.slot in served)
    assert {client: scheduler.waiting.service(client) for client in services} == services
    assert [(row.duration_ns, row.observed_at_ns) for row in scheduler.durations.rows(rig.now_ns)] == rows
    assert not [effect for effect in effects if isinstance(effect, Deliver)]
    lost = [effect for effect in effects if isinstance(effect, RequestLost)]
    assert {requests[effect.request].handle.slot for effect in lost} == served  # type: ignore[union-attr]
    (counted,) = [effect for effect in effects if isinstance(effect, FrameCounted)]
    assert (counted.prompt_tokens, counted.output_tokens) == (0, 0)
    assert counted.error is not None
    assert {effect.error for effect in lost} == {counted.error}
    return counted.error


LANES: dict[str, Callable[[Request, Request], tuple[CompletionRecord, ...]]] = {
    "none": lambda a, b: (),
    "one missing": lambda a, b: (record(a, 1),),
    "one too many": lambda a, b: (record(a, 1), record(b, 1), record(b, 1)),
    "another order": lambda a, b: (record(b, 1), record(a, 1)),
    "one twice": lambda a, b: (record(a, 1), record(a, 1)),
    "another generation": lambda a, b: (
        record(a, 1),
        CompletionRecord(RequestHandle(1, 2), b.committed + 1, None),
    ),
    "another slot": lambda a, b: (record(a, 1), CompletionRecord(RequestHandle(3, 1), b.committed + 1, None)),
}


@pytest.mark.parametrize("wrong", LANES)
def test_lanes_that_are_not_those_of_the_frame(wrong: str) -> None:
    rig = Rig()
    first, second, third = rig.decoding(3)
    rig.commit(decode(first, second))
    assert "its lanes are not those of the frame" in spoiled(rig, *LANES[wrong](first, second))
    assert third.state is RequestState.DECODING


@pytest.mark.parametrize("units", [-20, -1, 0, 2, 1000])
def test_a_counter_that_moved_by_another_amount(units: int) -> None:
    """One lane in disorder fails its whole frame, the lane in order too."""
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first, second))
    assert spoiled(rig, record(first, 1), record(second, units)).endswith(
        f"slot 1 committed {units} tokens instead of 1"
    )


@pytest.mark.parametrize("units", [0, 3, 5, 9])
def test_a_chunk_that_consumed_another_amount(units: int) -> None:
    rig = Rig()
    first = rig.arrive(12)
    rig.commit(prefill(first, 4))
    assert f"slot 0 committed {units} tokens instead of 4" in spoiled(rig, record(first, units))


def test_a_prompt_that_ended_without_its_output_token() -> None:
    rig = Rig()
    first = rig.arrive(8)
    rig.commit(prefill(first, 8))
    assert "slot 0 committed 8 tokens instead of 9" in spoiled(rig, record(first, 8))


@pytest.mark.parametrize("ended", EndReason)
def test_a_chunk_that_ended_the_row(ended: EndReason) -> None:
    rig = Rig()
    first = rig.arrive(12, max_tokens=1)
    rig.commit(prefill(first, 4))
    assert "slot 0 ended without an output token" in spoiled(rig, record(first, 4, ended))


def test_a_row_that_did_not_end_at_its_limit() -> None:
    rig = Rig()
    (first,) = rig.decoding(1, max_tokens=2)
    rig.commit(decode(first))
    assert "slot 0 reached its limit and did not end" in spoiled(rig, record(first, 1))


def test_a_first_token_that_is_the_last_and_did_not_end() -> None:
    rig = Rig()
    first = rig.arrive(8, max_tokens=1)
    rig.commit(prefill(first, 8))
    assert "slot 0 reached its limit and did not end" in spoiled(rig, record(first, 9))


def test_a_row_that_ended_by_length_before_its_limit() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    assert "slot 0 ended by length before its limit" in spoiled(rig, record(first, 1, LENGTH))


def test_a_malformed_frame_leaves_the_requests_of_the_frame_behind_it() -> None:
    """Only those that the frame serves fail; who is queued again behind it is not looked at any further."""
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first))
    rig.commit(decode(first, second))
    spoiled(rig, record(first, 5))
    assert first.state is RequestState.FAILED
    assert first.handle in [request.handle for request in rig.scheduler.residents]
    rig.complete(record(first, 77), record(second, 1))
    assert second.produced == 2
    assert first.id not in rig.scheduler.requests


def test_a_device_error_fails_the_requests_of_the_frame_alone() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first))
    effects = rig.complete(error="out of memory")
    assert [effect for effect in effects if isinstance(effect, RequestLost)] == [RequestLost(first.id, "out of memory")]
    assert (first.state, second.state) == (RequestState.RETIRED, RequestState.DECODING)


@pytest.mark.parametrize("event", [CancelRequest, HostStop])
def test_lanes_of_requests_that_are_over_may_say_anything(event: type[CancelRequest | HostStop]) -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first, second))
    rig.scheduler.apply(event(first.id), rig.now_ns)
    produced = first.produced
    effects = rig.complete(record(first, -9, LENGTH), record(second, 1))
    assert [effect.request for effect in effects if isinstance(effect, Deliver)] == [second.id]
    assert (first.state, first.produced, second.produced) == (RequestState.RETIRED, produced, 2)


def test_service_is_the_difference_to_what_is_committed_now() -> None:
    """The second of two queued frames goes on from the first, not from where both were planned."""
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    rig.commit(decode(first))
    begin = first.committed
    assert first.handle is not None
    for step in (1, 2):
        effects = rig.complete(CompletionRecord(first.handle, begin + step, None))
        (counted,) = [effect for effect in effects if isinstance(effect, FrameCounted)]
        assert (counted.output_tokens, counted.error) == (1, None)
    assert first.produced == 3


@pytest.mark.parametrize("fence", [0, 1, 3, 99])
def test_a_completion_of_another_frame_is_our_fault(fence: int) -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    with pytest.raises(ValueError, match=f"completion of fence {fence}, which is not the oldest frame in flight"):
        rig.scheduler.apply(CompleteFrame(Fence(fence), 1, (record(first, 1),)), rig.now_ns)
    rig.scheduler.check()
    rig.complete()
    with pytest.raises(ValueError, match="not the oldest frame"):
        rig.scheduler.apply(CompleteFrame(Fence(2), 1, (record(first, 1),)), rig.now_ns)


def test_frames_complete_in_the_order_of_their_submission() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first))
    fence = rig.commit(decode(second))
    with pytest.raises(ValueError, match="not the oldest frame"):
        rig.scheduler.apply(CompleteFrame(fence, 1, (record(second, 1),)), rig.now_ns)


@pytest.mark.parametrize("chunks", [(8,), (3, 5), (1, 1, 6)])
def test_a_prompt_that_is_scored_and_nothing_else(chunks: tuple[int, ...]) -> None:
    """It ends with its prompt, however many frames that takes; each of them delivers scores."""
    rig = Rig()
    first = rig.arrive(8, max_tokens=0, scored=True)
    told = []
    for tokens in chunks:
        rig.commit(prefill(first, tokens))
        told += [effect.ended for effect in rig.complete() if isinstance(effect, Deliver)]
    assert told == [*(None for _ in chunks[1:]), LENGTH]
    assert (first.state, first.consumed, first.produced) == (RequestState.RETIRED, 8, 0)
    assert rig.scheduler.idle


def test_a_scored_prompt_goes_on_to_its_output() -> None:
    rig = Rig()
    first = rig.arrive(8, max_tokens=2, scored=True)
    rig.run(prefill(first, 8))
    assert first.state is RequestState.DECODING
    rig.run(decode(first, shape=DECODE))
    assert (first.state, first.end_reason, first.produced) == (RequestState.RETIRED, LENGTH, 2)


@pytest.mark.parametrize(("ended", "max_tokens"), [(STOP, 8), (STOP, 1), (LENGTH, 1)])
def test_a_request_may_end_with_its_first_token(ended: EndReason, max_tokens: int) -> None:
    rig = Rig()
    first = rig.arrive(8, max_tokens)
    rig.commit(prefill(first, 8))
    effects = rig.complete(record(first, 9, ended))
    assert [effect.ended for effect in effects if isinstance(effect, Deliver)] == [ended]
    assert (first.state, first.end_reason) == (RequestState.RETIRED, ended)
