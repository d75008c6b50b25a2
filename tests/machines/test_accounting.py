"""Service history: who is charged for which interval, and what publications correct."""

from __future__ import annotations

import math

import pytest

from flare.machines.events import CancelRequest, CompletionRecord, Deliver, HostStop, Published
from flare.machines.execution import Request
from flare.machines.ids import Fence, RequestId
from flare.machines.request import EndReason

from .rig import ADAPTATION_MS, CATALOG, DECODE, MS, PREFILL, SHARE, SMALL_DECODE, Rig, decode, decode_lane, prefill


def charged(price: float, units: float, interval_ms: float) -> float:
    """The price after an interval: 1/price averages the measured rate exponentially."""
    kept = math.exp(-interval_ms / ADAPTATION_MS)
    return 1.0 / (units / interval_ms + (1.0 / price - units / interval_ms) * kept)


def token_price(request: Request) -> float:
    assert request.prices.log_token is not None
    return math.exp(request.prices.log_token)


def delivery_price(request: Request) -> float:
    assert request.prices.log_delivery is not None
    return math.exp(request.prices.log_delivery)


def prices(*requests: Request) -> list[tuple[float | None, float | None]]:
    return [(request.prices.log_token, request.prices.log_delivery) for request in requests]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


# Newcomers


def test_a_newcomer_starts_at_admission_if_something_is_measured() -> None:
    """Its price is SHARE * N / r: two are resident, and the prefill graph does 8 + 1 tokens in 20 ms."""
    rig = Rig()
    rig.arrive(8)
    assert token_price(rig.arrive(8)) == close(SHARE * 2 * 20 / 9)


def test_admissions_of_one_instant_count_each_other() -> None:
    rig = Rig(slots=2)
    first, second = rig.arrive(8), rig.arrive(8)
    third, fourth = rig.arrive(8), rig.arrive(8)
    assert third.prices.log_token is None
    rig.commit(prefill(first, 8))
    rig.scheduler.apply(CancelRequest(first.id), rig.now_ns)
    rig.scheduler.apply(CancelRequest(second.id), rig.now_ns)
    assert token_price(third) == close(SHARE * 1 * 20 / 9)
    rig.complete()
    assert token_price(fourth) == close(SHARE * 2 * 20 / 9)


def test_arrivals_of_one_instant_start_alike() -> None:
    rig = Rig(slots=3)
    first, second, third = rig.arrive(8), rig.arrive(8), rig.arrive(8)
    assert token_price(first) == token_price(second) == token_price(third) == close(SHARE * 3 * 20 / 9)


def test_an_arrival_after_the_decision_of_its_instant_moves_nobody() -> None:
    rig = Rig(slots=3)
    first = rig.arrive(8)
    before = token_price(first)
    rig.commit(prefill(first, 8))
    second = rig.arrive(8)
    assert token_price(first) == before
    assert token_price(second) == close(SHARE * 2 * 20 / 9)


def test_a_newcomer_without_measurement_starts_at_the_first_charged_interval_that_has_one() -> None:
    """The first frame of an unknown graph has no normalizer at commit; the second has, and three are resident then."""
    rig = Rig(known=())
    first = rig.arrive(16)
    rig.commit(prefill(first, 4))
    rig.complete(after_ms=20)
    assert first.prices.log_token is None
    rig.commit(prefill(first, 4))
    rig.arrive(16)
    rig.arrive(16)
    rig.complete(after_ms=20)
    rate = 13 / 20  # 12 tokens were left, and an output token
    assert token_price(first) == close(charged(SHARE * 3 / rate, 4, 20))


def test_an_admission_starts_the_newcomer_alone() -> None:
    """Others whose price is unset wait for their first charged interval."""
    rig = Rig(known=())
    first = rig.arrive(16)
    rig.commit(prefill(first, 4))
    rig.complete(after_ms=20)
    second = rig.arrive(16)
    assert second.prices.log_token is not None
    assert first.prices.log_token is None


def test_a_price_is_started_once() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    before = token_price(first)
    rig.arrive()
    assert token_price(first) == before


# Participants


def test_all_participants_are_charged_served_or_not() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    waiting = rig.arrive(8)
    before = [token_price(request) for request in (first, second, waiting)]
    rig.commit(decode(first))
    rig.complete(after_ms=10)
    served, unserved, waited = (token_price(request) for request in (first, second, waiting))
    assert served == close(charged(before[0], 1, 10))
    assert unserved == close(before[1] * math.exp(0.1))
    assert waited == close(before[2] * math.exp(0.1))


def test_a_request_admitted_after_commit_is_no_participant() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    late = rig.arrive(8)
    before = prices(late)
    rig.complete(after_ms=10)
    assert prices(late) == before


def test_a_cancelled_request_is_not_charged() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first, second))
    rig.scheduler.apply(CancelRequest(first.id), rig.now_ns)
    before, other = prices(first), prices(second)
    rig.complete(after_ms=10)
    assert prices(first) == before
    assert prices(second) != other


def test_the_next_owner_of_a_slot_is_not_charged() -> None:
    """A participant that was not served is cancelled, and its slot is given again before the frame completes."""
    rig = Rig(slots=2)
    first, second = rig.decoding(2)
    rig.commit(decode(first))
    rig.scheduler.apply(CancelRequest(second.id), rig.now_ns)
    owner = rig.arrive(8)
    assert owner.handle == (1, 2)
    before = prices(owner, second)
    rig.complete(after_ms=10)
    assert prices(owner, second) == before


def test_a_row_that_ended_in_the_frame_before_is_neither_charged_nor_advanced() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first, second))
    rig.commit(decode(first, second))
    assert first.handle is not None
    stopped = CompletionRecord(first.handle, first.committed + 1, EndReason.STOP)
    rig.complete(stopped, rig.record(decode_lane(second)), after_ms=10)
    produced, before = first.produced, prices(first)
    effects = rig.complete(stopped, rig.record(decode_lane(second)), after_ms=10)
    assert [effect.request for effect in effects if isinstance(effect, Deliver)] == [second.id]
    assert (first.produced, prices(first)) == (produced, before)
    assert second.produced == 3


# Intervals


@pytest.mark.parametrize(("device_ms", "wall_ms", "interval_ms"), [(10, 14, 14), (10, 10, 10), (12, 10, 12)])
def test_an_isolated_frame_charges_the_greater_of_device_and_wall_time(
    device_ms: float, wall_ms: float, interval_ms: float
) -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    before = token_price(second)
    rig.commit(decode(first))
    rig.complete(after_ms=wall_ms, device_ms=device_ms)
    assert token_price(second) == close(before * math.exp(interval_ms / ADAPTATION_MS))


def test_a_queued_frame_charges_its_device_time() -> None:
    """It was dispatched behind another, so the wait for that one is not charged twice."""
    rig = Rig()
    first, second = rig.decoding(2)
    before = token_price(second)
    rig.commit(decode(first))
    rig.commit(decode(first))
    rig.complete(after_ms=10)
    rig.complete(after_ms=13, device_ms=10)
    assert token_price(second) == close(before * math.exp(20 / ADAPTATION_MS))


def test_an_untimed_frame_charges_nothing_and_advances_all_the_same() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    before = prices(first, second)
    row = rig.scheduler.durations.row(DECODE, rig.now_ns)
    rig.commit(decode(first))
    rig.complete(after_ms=10, device_ms=0)
    assert prices(first, second) == before
    assert first.produced == 2
    after = rig.scheduler.durations.row(DECODE, rig.now_ns)
    assert (after.duration_ns, after.observed_at_ns) == (row.duration_ns, row.observed_at_ns)


def test_a_failed_frame_charges_nothing_and_measures_nothing() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    row = rig.scheduler.durations.row(SMALL_DECODE, rig.now_ns)
    before = prices(second)
    rig.commit(decode(first, shape=SMALL_DECODE))
    rig.complete(after_ms=10, device_ms=10, error="gone")
    assert prices(second) == before
    after = rig.scheduler.durations.row(SMALL_DECODE, rig.now_ns)
    assert (after.duration_ns, after.observed_at_ns) == (row.duration_ns, row.observed_at_ns)


def test_a_prompt_is_charged_its_tokens_and_its_first_output_token() -> None:
    rig = Rig()
    first = rig.arrive(12)
    before = token_price(first)
    rig.run(prefill(first, 4))
    assert token_price(first) == close(charged(before, 4, 20))
    rig.run(prefill(first, 8))
    assert token_price(first) == close(charged(charged(before, 4, 20), 9, 20))


# Publications


def test_the_first_publication_of_all_is_one_delivery_over_its_interval() -> None:
    rig = Rig()
    first = rig.arrive(8)
    rig.commit(prefill(first, 8))
    rig.complete(after_ms=23, publish=False)
    assert first.prices.log_delivery is None
    rig.scheduler.apply(Published(first.id, Fence(1)), rig.now_ns)
    assert delivery_price(first) == close(23)


def test_a_publication_turns_its_charge_into_one_delivery() -> None:
    """Completion charges none; the first publication of the fence makes it one, and no further one changes it."""
    rig = Rig()
    first, second = rig.decoding(2)
    before, other = delivery_price(first), delivery_price(second)
    fence = rig.commit(decode(first))
    rig.complete(after_ms=10, publish=False)
    assert delivery_price(first) == close(before * math.exp(0.1))
    for _ in range(2):
        rig.scheduler.apply(Published(first.id, fence), rig.now_ns)
        assert delivery_price(first) == close(charged(before, 1, 10))
    assert delivery_price(second) == close(other * math.exp(0.1))


def test_a_late_publication_corrects_nothing_and_resets_the_age() -> None:
    """Text that is released after the next completion does not rewind what that observed."""
    rig = Rig()
    (first,) = rig.decoding(1)
    fence = rig.commit(decode(first))
    rig.complete(after_ms=10, publish=False)
    rig.commit(decode(first))
    rig.complete(after_ms=10, publish=False)
    before = prices(first)
    rig.now_ns += 3 * MS
    rig.scheduler.apply(Published(first.id, fence), rig.now_ns)
    assert prices(first) == before
    assert first.visible_at_ns == rig.now_ns


def test_a_publication_under_an_untimed_frame_corrects_nothing() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    rig.complete(after_ms=10, publish=False)
    fence = rig.commit(decode(first))
    rig.complete(after_ms=10, device_ms=0, publish=False)
    before = prices(first)
    rig.scheduler.apply(Published(first.id, fence), rig.now_ns)
    assert prices(first) == before


@pytest.mark.parametrize(
    "event", [Published(RequestId(99), Fence(1)), CancelRequest(RequestId(99)), HostStop(RequestId(99))]
)
def test_events_of_requests_that_are_gone_change_nothing(event: Published | CancelRequest | HostStop) -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    before = prices(first, second)
    assert rig.scheduler.apply(event, rig.now_ns) == []
    rig.scheduler.check()
    assert prices(first, second) == before


# Durations


def test_valid_frames_measure_their_graph_by_device_time() -> None:
    rig = Rig(known=(PREFILL,))
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    rig.complete(after_ms=15, device_ms=12)
    row = rig.scheduler.durations.row(DECODE, rig.now_ns)
    assert (row.duration_ns, row.observed_at_ns, row.attempted_at_ns) == (12 * MS, rig.now_ns, rig.now_ns - 15 * MS)


def test_prices_stay_finite_whatever_the_wait() -> None:
    """A request that waits for hours has a price beyond every float, and its logarithm is an ordinary number."""
    rig = Rig(known=CATALOG)
    first, second = rig.decoding(2, max_tokens=100)
    for _ in range(20):
        rig.commit(decode(first))
        rig.complete(after_ms=1e6, device_ms=1e6)
    assert second.prices.log_token is not None
    assert 1.9e5 < second.prices.log_token < 2.1e5
    view = rig.scheduler.view(rig.now_ns)
    assert all(math.isfinite(row.token_price or 0.0) for row in view.requests)
