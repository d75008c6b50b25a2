"""What a snapshot may cost: it enables a shared decode batch, and wins only while the whole sequence is worth more for
its time than decoding without."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from flare.machines.graph import GraphKind
from flare.machines.selection.select import select
from flare.machines.selection.view import Plan, PolicyRow, View
from tests.machines.build import BALANCED, decode_shape, decoder, graph, stage_shape, view

from .bench import Bench
from .catalogs import DECODE, PLAIN

SNAPSHOT = stage_shape(GraphKind.SNAPSHOT, 4)
THROUGHPUT = replace(BALANCED, delivery_fairness=0.0, decode_age_price=0.0)
TOKEN_PRICE, DELIVERY_PRICE, AGE_MS = 10.0, 20.0, 15.0
DECODE_MS = {shape.batch: ms for shape, ms in DECODE.items()}


def streams(ready: int, blocked: int, snapshot_ms: float, policy: PolicyRow) -> View:
    """Streams alike, but that some need a snapshot before they go on."""
    rows = [
        decoder(
            slot,
            stages=() if slot < ready else (GraphKind.SNAPSHOT,),
            token_price=TOKEN_PRICE,
            delivery_price=DELIVERY_PRICE,
            age_ms=AGE_MS,
        )
        for slot in range(ready + blocked)
    ]
    graphs = [*(graph(shape, ms) for shape, ms in DECODE.items()), graph(SNAPSHOT, snapshot_ms)]
    return view(graphs, rows, policy=policy)


def chosen(ready: int, blocked: int, snapshot_ms: float, policy: PolicyRow) -> Plan:
    plan = select(streams(ready, blocked, snapshot_ms, policy)).plan
    assert plan is not None
    return plan


def scores(ready: int, blocked: int, snapshot_ms: float, policy: PolicyRow) -> tuple[float, float]:
    """The greatest score of a decode graph alone, and of a snapshot with one (docs/scheduling.md, "Stages and
    prerequisites"), all cohorts tried in turn."""
    price, count = policy.decode_age_price, ready + blocked
    service = policy.output_token_value + policy.token_fairness * TOKEN_PRICE
    service += policy.delivery_fairness * DELIVERY_PRICE
    ready_sigma = count * min(ms / min(batch, ready) for batch, ms in DECODE_MS.items())
    delivery_ms = min((ms / min(batch, count), ms) for batch, ms in DECODE_MS.items())[1]
    blocked_sigma = count * (snapshot_ms + delivery_ms)

    def score(newly: int, others: int, horizon_ms: float) -> float:
        aged = price * (newly * blocked_sigma + others * ready_sigma) * (AGE_MS + horizon_ms)
        return ((newly + others) * service + aged) / horizon_ms - horizon_ms / 2 * count * price

    alone = max(score(0, min(batch, ready), ms) for batch, ms in DECODE_MS.items())
    sequence = max(
        score(newly, min(batch - newly, ready), snapshot_ms + ms)
        for batch, ms in DECODE_MS.items()
        for newly in range(1, min(batch, blocked) + 1)
    )
    return alone, sequence


@pytest.mark.parametrize(
    ("ready", "blocked", "switch_ms"), [(3, 1, 2.65), (1, 1, 7.35), (2, 2, 7.35), (1, 3, 22.05), (4, 4, 7.5)]
)
def test_the_switch_is_where_tokens_per_ms_are_equal(ready: int, blocked: int, switch_ms: float) -> None:
    """Without prices on waiting: r/T(r) = (r + k)/(S + T(r + k)). A thousandth of a millisecond decides."""
    batch = min(batch for batch in DECODE_MS if batch >= ready)
    both = ready + blocked
    assert switch_ms == pytest.approx(both * DECODE_MS[batch] / ready - DECODE_MS[both])
    cheap = chosen(ready, blocked, switch_ms - 1e-3, THROUGHPUT)
    assert cheap.shape == SNAPSHOT
    assert [lane.slot for lane in cheap.lanes] == list(range(ready, both))
    assert cheap.following is not None
    assert cheap.following.shape == decode_shape(both)
    assert len(cheap.following.lanes) == both
    assert cheap.duration_ns == round((switch_ms - 1e-3) * 1e6), "its own, not that of the sequence"
    dear = chosen(ready, blocked, switch_ms + 1e-3, THROUGHPUT)
    assert (dear.shape, dear.following) == (decode_shape(batch), None)


@pytest.mark.parametrize("policy", [BALANCED, THROUGHPUT], ids=["balanced", "throughput"])
@pytest.mark.parametrize(("ready", "blocked"), [(3, 1), (7, 1), (15, 1), (2, 2), (12, 4)])
def test_every_cost_is_decided_as_the_arithmetic_says(ready: int, blocked: int, policy: PolicyRow) -> None:
    """The waiting of blocked streams is priced by their own way to a delivery, so that with a price on waiting a dear
    snapshot can be worth more again than one of middling cost."""
    won = []
    for step in range(120):
        snapshot_ms = round(0.05 * math.exp(step / 14), 6)
        alone, sequence = scores(ready, blocked, snapshot_ms, policy)
        plan = chosen(ready, blocked, snapshot_ms, policy)
        assert plan.score == pytest.approx(max(alone, sequence), rel=1e-9)
        assert (plan.shape == SNAPSHOT) == (sequence > alone)
        won.append(plan.shape == SNAPSHOT)
    assert won[0]
    if policy is THROUGHPUT:
        assert won == sorted(won, reverse=True), "what was too dear once is not worth more when it costs more"
        assert not won[-1]


@pytest.mark.parametrize(("snapshot_ms", "at_once"), [(0.5, True), (12.0, False)])
def test_a_dear_snapshot_is_put_off_and_taken_in_the_end(snapshot_ms: float, at_once: bool) -> None:
    """Under `throughput`. The price of the stream that waits for it grows, until the sequence is worth more."""
    bench = Bench({**PLAIN, SNAPSHOT: snapshot_ms}, policy="throughput", state_rows=4)
    bench.decoding(3)
    bench.run_for(100)
    newcomer = bench.arrive(64, 10, at_ms=bench.now_ms, checkpoints=(64,))
    bench.run(lambda: newcomer.ended_ms is not None)
    kinds = [frame.kind for frame in bench.frames if frame.at_ms >= newcomer.outputs[0].at_ms]
    put_off = kinds.index(GraphKind.SNAPSHOT)
    assert (put_off == 0) == at_once
    assert kinds.count(GraphKind.SNAPSHOT) == 1
    assert newcomer.complete
