"""The view: projection of queued frames, ages, output left, endpoints and the common scale."""

from __future__ import annotations

import math

import msgspec
import pytest

from flare.machines.events import CancelRequest, HostStop, Published
from flare.machines.execution import Request
from flare.machines.ids import Fence
from flare.machines.selection.select import select
from flare.machines.selection.view import Phase, PolicyRow, RequestRow, View

from .rig import ADAPTATION_MS, DECODE, MS, PREFILL, SMALL_DECODE, STAGED, TTL_NS, Rig, decode, prefill
from .test_accounting import charged, close, delivery_price, token_price


def row(view: View, request: Request) -> RequestRow:
    assert request.handle is not None
    (found,) = [row for row in view.requests if (row.slot, row.generation) == request.handle]
    return found


def test_rows_of_a_prompt() -> None:
    """Position, boundary and endpoints as they stand; the age of arrival, and no delivery before decoding."""
    rig = Rig()
    first = rig.arrive(20, 8, system_end=6, messages=(6, 15))
    rows = [row(rig.scheduler.view(rig.now_ns), first)]
    for tokens in (6, 10):
        rig.run(prefill(first, tokens))
        rows.append(row(rig.scheduler.view(rig.now_ns), first))
    assert [(r.position, r.boundary, r.next_endpoint, r.prompt_tokens) for r in rows] == [
        (0, 6, 6, 20),
        (6, 20, 15, 20),
        (16, 20, 20, 20),
    ]
    assert {(r.phase, r.delivery_price, r.output_left) for r in rows} == {(Phase.PREFILL, None, 8)}
    assert [r.age_ms for r in rows] == [0.0, 20.0, 40.0]
    assert [r.last_fence for r in rows] == [0, 1, 2]


def test_phases() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    second, third = rig.arrive(), rig.arrive(scored=True)
    view = rig.scheduler.view(rig.now_ns)
    assert [row(view, request).phase for request in (first, second, third)] == [
        Phase.DECODE,
        Phase.PREFILL,
        Phase.SCORED_PREFILL,
    ]


def test_only_runnable_requests_have_rows() -> None:
    rig = Rig(slots=3)
    first, second, third = rig.decoding(3)
    rig.arrive(11)
    rig.commit(decode(first, second, third))
    rig.scheduler.apply(CancelRequest(first.id), rig.now_ns)
    rig.scheduler.apply(HostStop(second.id), rig.now_ns)
    view = rig.scheduler.view(rig.now_ns)
    assert [(r.slot, r.generation) for r in view.requests] == [third.handle]
    assert (view.free_slots, view.queued_requests, view.queued_tokens) == (0, 1, 11)
    assert view.free_pages == 64 - 3 * 4


def test_prices_are_projected_to_the_end_of_the_queue() -> None:
    """Each frame with its expected service and duration, in order; what was observed stays as it is."""
    rig = Rig()
    first, second = rig.decoding(2)
    waiting = rig.arrive(8)
    rig.commit(decode(first, second))
    rig.commit(decode(first, shape=SMALL_DECODE))
    late = rig.arrive(8)
    before = [token_price(request) for request in (first, second, waiting, late)]
    view = rig.scheduler.view(rig.now_ns)
    assert row(view, first).token_price == close(charged(charged(token_price(first), 1, 10), 1, 5))
    assert row(view, first).delivery_price == close(charged(charged(delivery_price(first), 1, 10), 1, 5))
    assert row(view, second).token_price == close(charged(charged(token_price(second), 1, 10), 0, 5))
    assert row(view, second).delivery_price == close(charged(charged(delivery_price(second), 1, 10), 0, 5))
    assert row(view, waiting).token_price == close(token_price(waiting) * math.exp(15 / ADAPTATION_MS))
    assert row(view, late).token_price == close(token_price(late))
    assert [token_price(request) for request in (first, second, waiting, late)] == before


def test_the_next_owner_of_a_slot_has_no_part_in_queued_work() -> None:
    rig = Rig(slots=2)
    first, second = rig.decoding(2)
    rig.commit(decode(first))
    rig.scheduler.apply(CancelRequest(second.id), rig.now_ns)
    owner = rig.arrive(8)
    assert row(rig.scheduler.view(rig.now_ns), owner).token_price == close(token_price(owner))


def test_ages_count_from_what_was_last_visible_or_will_be() -> None:
    rig = Rig()
    first, second, third = rig.decoding(3)
    ages = [(rig.now_ns - request.visible_at_ns) / MS for request in (first, second, third)]
    assert ages == [40, 20, 0]
    rig.commit(decode(first))
    rig.commit(decode(second, shape=SMALL_DECODE))
    view = rig.scheduler.view(rig.now_ns)
    assert view.planning_ns == rig.now_ns + 15 * MS
    assert [row(view, request).age_ms for request in (first, second, third)] == [5, 0, 15]


def test_a_stream_whose_text_is_withheld_ages_on() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    begin_ns = first.visible_at_ns
    rig.commit(decode(first))
    rig.complete(after_ms=10, publish=False)
    assert row(rig.scheduler.view(rig.now_ns), first).age_ms == 10
    rig.now_ns += 7 * MS
    assert row(rig.scheduler.view(rig.now_ns), first).age_ms == (rig.now_ns - begin_ns) / MS == 17
    rig.scheduler.apply(Published(first.id, Fence(2)), rig.now_ns)
    assert row(rig.scheduler.view(rig.now_ns), first).age_ms == 0


@pytest.mark.parametrize(
    ("policy", "unpaid"),
    [
        (PolicyRow(64.0, 0.0, 4.0, 0.1, 8.0), ("log_token",)),
        (PolicyRow(64.0, 16.0, 0.0, 0.1, 8.0), ("log_delivery",)),
        (PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0), ()),
    ],
)
def test_a_price_that_nothing_pays_for_scales_nothing(policy: PolicyRow, unpaid: tuple[str, ...]) -> None:
    """It grows without bound all the same; beside it every value would be 0, and all candidates would tie."""
    rig = Rig()
    first, _ = rig.decoding(2)
    rig.scheduler.policy = policy
    for name in unpaid:
        setattr(first.prices, name, 5_000.0)
    view = rig.scheduler.view(rig.now_ns)
    assert (view.log_scale, view.value_scale) == (0.0, 1.0)
    plan = select(view).plan
    assert plan is not None and plan.score > 0.0
    first.prices.log_token = first.prices.log_delivery = 5_000.0
    assert rig.scheduler.view(rig.now_ns).log_scale == 4_800.0


def test_a_terminal_request_scales_nothing() -> None:
    rig = Rig(catalog=STAGED)
    first, _ = rig.decoding(2)
    rig.scheduler.apply(HostStop(first.id), rig.now_ns)
    assert first.terminal
    first.prices.log_token = first.prices.log_delivery = 5_000.0
    assert rig.scheduler.view(rig.now_ns).log_scale == 0.0


def test_the_age_of_a_stream_without_text_counts_from_its_first_token() -> None:
    rig = Rig()
    first = rig.arrive(8)
    rig.commit(prefill(first, 8))
    rig.complete(after_ms=20, publish=False)
    rig.now_ns += 4 * MS
    assert row(rig.scheduler.view(rig.now_ns), first).age_ms == 4


def test_an_age_is_never_negative() -> None:
    """Not even where text was published after the instant that the view is taken for."""
    rig = Rig()
    (first,) = rig.decoding(1)
    rig.commit(decode(first))
    rig.now_ns += 25 * MS
    view = rig.scheduler.view(rig.now_ns)
    assert view.planning_ns == rig.now_ns
    assert row(view, first).age_ms == 15
    rig.scheduler.apply(Published(first.id, Fence(1)), rig.now_ns + 5 * MS)
    rig.complete(publish=False)
    assert row(rig.scheduler.view(rig.now_ns), first).age_ms == 0


def test_output_left_allows_for_queued_tokens() -> None:
    rig = Rig()
    (first,) = rig.decoding(1, max_tokens=3)
    left = [row(rig.scheduler.view(rig.now_ns), first).output_left]
    for _ in range(2):
        rig.commit(decode(first))
        left.append(row(rig.scheduler.view(rig.now_ns), first).output_left)
    assert left == [2, 1, 0]


def test_a_stream_that_queued_work_ends_is_served_no_more() -> None:
    rig = Rig()
    (first,) = rig.decoding(1, max_tokens=2)
    rig.commit(decode(first))
    assert select(rig.scheduler.view(rig.now_ns)).plan is None


def test_overrun_begins_when_the_oldest_frame_is_late() -> None:
    rig = Rig()
    (first,) = rig.decoding(1)
    assert not rig.scheduler.view(rig.now_ns).overrun
    rig.commit(decode(first))
    rig.commit(decode(first))
    seen = [rig.scheduler.view(rig.now_ns + late).overrun for late in (0, 10 * MS, 10 * MS + 1)]
    assert seen == [False, False, True]
    rig.complete(after_ms=12)
    seen = [rig.scheduler.view(rig.now_ns + late).overrun for late in (0, 10 * MS, 10 * MS + 1)]
    assert seen == [False, False, True]


def test_an_overrun_ends_with_the_completion() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    rig.commit(decode(first))
    rig.now_ns += 11 * MS
    held = select(rig.scheduler.view(rig.now_ns))
    assert (held.plan, held.hold) == (None, "overrun")
    rig.complete()
    assert select(rig.scheduler.view(rig.now_ns)).plan is not None
    assert second.produced == 1


def test_the_window_shows_frames_in_flight() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    begin_ns = rig.now_ns
    rig.commit(decode(first, second))
    rig.commit(decode(second))
    window = rig.scheduler.view(rig.now_ns).window
    assert [(frame.fence, frame.shape, frame.expected_finish_ns - begin_ns, frame.slots) for frame in window] == [
        (3, DECODE, 10 * MS, (0, 1)),
        (4, DECODE, 20 * MS, (1,)),
    ]


def test_staleness_is_as_of_now() -> None:
    rig = Rig()
    stale = [
        {graph.shape: graph.stale for graph in rig.scheduler.view(rig.now_ns + age).graphs}[PREFILL]
        for age in (0, TTL_NS, TTL_NS + 1)
    ]
    assert stale == [False, False, True]


@pytest.mark.parametrize("log", [150.0, 700.0, 5_000.0, 1e9])
def test_astronomic_prices_share_one_scale(log: float) -> None:
    """Every value is finite, ratios survive, and what vanishes beside the greatest is worth nothing."""
    rig = Rig()
    first, second, third = rig.decoding(3)
    first.prices.log_token, second.prices.log_token, third.prices.log_token = log, log - 2.0, 1.0
    view = rig.scheduler.view(rig.now_ns)
    assert view.log_scale == max(0.0, log - 200.0)
    assert view.value_scale == math.exp(-view.log_scale)
    big, less, small = (row(view, request).token_price for request in (first, second, third))
    assert big is not None and less is not None and small is not None
    assert math.isfinite(big)
    assert big / less == pytest.approx(math.exp(2.0))
    assert small == math.exp(1.0 - view.log_scale)
    assert msgspec.json.decode(msgspec.json.encode(view), type=View) == view
    decision = select(view)
    assert decision.plan is not None
    assert math.isfinite(decision.plan.score)
    assert decision.plan.log_scale == view.log_scale


def test_with_values_beyond_all_scales_the_dearest_is_served() -> None:
    """A batch would serve all three in twice the time: the price decides, though everything else has underflowed."""
    rig = Rig()
    _, second, _ = rig.decoding(3)
    second.prices.log_token = 1e6
    plan = select(rig.scheduler.view(rig.now_ns)).plan
    assert plan is not None
    assert (plan.shape, [lane.slot for lane in plan.lanes]) == (SMALL_DECODE, [1])


def test_taking_a_view_changes_nothing() -> None:
    rig = Rig()
    first, _ = rig.decoding(2)
    rig.commit(decode(first))
    views = [msgspec.json.encode(rig.scheduler.view(rig.now_ns)) for _ in range(3)]
    assert views[0] == views[1] == views[2]
    rig.scheduler.check()
