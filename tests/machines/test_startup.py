"""Prompts that arrive together, from selection and prices alone: first outputs come soon, and then evenly.

Owns a loop without queue, device or requests: one frame after another, each for the duration that the catalog says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from flare.machines.ids import Fence, RequestHandle
from flare.machines.prices import ServicePrices, log_scale_for
from flare.machines.selection.board import Board
from flare.machines.selection.reference import normalizers
from flare.machines.selection.select import select
from flare.machines.selection.view import GraphRow, LaneWork, RequestRow, View
from tests.machines.build import BALANCED, decode_shape, decoder, graph, prefill_shape, prompt, view

PROMPT_TOKENS = 64
ADAPTATION_MS = 100.0
DECODE_MS = {1: 7.5, 2: 7.65, 4: 7.95, 8: 8.4, 16: 9.3}
PREFILL_MS = {64: 3.75, 128: 4.2, 256: 5.1, 512: 7.5, 1024: 12.75, 2048: 24.75, 4096: 51.0}
CATALOG = [
    *(graph(decode_shape(batch), ms) for batch, ms in DECODE_MS.items()),
    *(graph(prefill_shape(tokens), ms) for tokens, ms in PREFILL_MS.items()),
]


@dataclass
class Stream:
    """One request: its prices, and when its outputs became visible."""

    slot: int
    prices: ServicePrices = field(default_factory=ServicePrices)
    last_fence: int = 0
    visible_ms: list[float] = field(default_factory=list)

    def row(self, now_ms: float, log_scale: float) -> RequestRow:
        """The request as a view shows it."""
        token, delivery = (
            None if log is None else math.exp(log - log_scale)
            for log in (self.prices.log_token, self.prices.log_delivery)
        )
        if not self.visible_ms:
            return prompt(self.slot, PROMPT_TOKENS, token_price=token, last_fence=self.last_fence)
        return decoder(
            self.slot,
            token_price=token,
            delivery_price=delivery,
            age_ms=now_ms - self.visible_ms[-1],
            last_fence=self.last_fence,
        )


def take(streams: list[Stream], catalog: list[GraphRow], now_ms: float) -> View:
    """The view of all streams."""
    logs = [log for s in streams for log in (s.prices.log_token, s.prices.log_delivery) if log is not None]
    scale = log_scale_for(logs)
    rows = [stream.row(now_ms, scale) for stream in streams]
    return view(catalog, rows, log_scale=scale, value_scale=math.exp(-scale))


def step(streams: list[Stream], lanes: tuple[LaneWork, ...], fence: Fence, took_ms: float, now_ms: float) -> None:
    """Charge a frame to all streams and publish its outputs."""
    works = {lane.slot: lane for lane in lanes}
    for stream in streams:
        work = works.get(stream.slot)
        stream.prices.charge(fence, work.expected_tokens if work else 0.0, took_ms, ADAPTATION_MS)
        if work is None:
            continue
        stream.last_fence = fence
        if work.emits:
            stream.visible_ms.append(now_ms)
            stream.prices.publish(fence, ADAPTATION_MS)


def run(count: int, frames: int) -> list[Stream]:
    """`count` prompts arrive at time 0 and `frames` frames follow."""
    streams = [Stream(slot) for slot in range(count)]
    rates = normalizers(Board.of(take(streams, CATALOG, 0.0)))
    for stream in streams:
        stream.prices.start(BALANCED.newcomer_share, count, rates[RequestHandle(stream.slot, stream.slot + 1)][0])
    now_ms = 0.0
    for number in range(1, frames + 1):
        plan = select(take(streams, CATALOG, now_ms)).plan
        assert plan is not None
        took_ms = plan.duration_ns / 1e6
        now_ms += took_ms
        step(streams, plan.lanes, Fence(number), took_ms, now_ms)
    return streams


@pytest.mark.parametrize("count", [1, 5, 16])
def test_prompts_that_arrive_together_start_soon_and_go_on_evenly(count: int) -> None:
    streams = run(count, 200)
    first = [stream.visible_ms[0] for stream in streams]
    gaps = [b - a for s in streams for a, b in zip(s.visible_ms, s.visible_ms[1:], strict=False)]
    outputs = [len(stream.visible_ms) for stream in streams]
    assert max(first) < 100.0
    assert max(gaps) < 150.0
    assert min(outputs) > 100
    assert max(outputs) - min(outputs) <= 8


def test_whoever_lost_for_long_is_served_in_the_end() -> None:
    streams = run(5, 20)
    left_out = streams[0]
    before = len(left_out.visible_ms)
    # Nothing for a minute: its price leaves the range of moderate numbers, and the decision its scale of 1.
    left_out.prices.charge(Fence(21), 0.0, 60_000.0, ADAPTATION_MS)
    taken = take(streams, CATALOG, 60_000.0)
    plan = select(taken).plan
    assert plan is not None
    assert taken.log_scale > 300.0
    assert [lane.slot for lane in plan.lanes] == [0]
    step(streams, plan.lanes, Fence(22), plan.duration_ns / 1e6, 60_008.0)
    assert len(left_out.visible_ms) == before + 1
    assert left_out.prices.log_token is not None
    assert left_out.prices.log_token < math.log(500.0)
