"""Graphs that consume a prompt and decode in one pass: workloads of both, tails that fit, broken completions, and
estimates that grow old one by one."""

from __future__ import annotations

import pytest

from flare.graphs.sim.timing import Fault, Faults
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence
from flare.machines.selection.view import LaneWork
from tests.machines.build import decode_shape, mixed_shape, prefill_shape, speculative_shape

from .bench import Bench, Client, Costs, Played

CAPACITIES = (64, 128, 256, 512)
SEPARATE: Costs = {
    **{decode_shape(batch): ms for batch, ms in ((1, 7.5), (2, 7.65), (4, 7.95))},
    **{prefill_shape(tokens): 7.0 + tokens / 80 for tokens in CAPACITIES},
}
MIXED: Costs = {mixed_shape(batch, tokens): 7.6 + tokens / 80 for batch in (2, 4) for tokens in CAPACITIES}
"""Reading the weights takes most of the time of either, so that doing both at once is cheaper."""

WIDE: Costs = {
    **{mixed_shape(4, tokens, width=4): 8.5 + tokens / 80 for tokens in CAPACITIES},
    speculative_shape(4, 4): 9.4,
}
ROWS: Costs = {mixed_shape(4, tokens, rows=3): 7.6 + tokens / 80 for tokens in CAPACITIES}


def parts(frame: Played) -> tuple[list[LaneWork], list[LaneWork]]:
    """Prompt lanes and decode lanes."""
    lanes = frame.plan.lanes
    return [lane for lane in lanes if not lane.delivers], [lane for lane in lanes if lane.delivers]


def both(frame: Played) -> bool:
    return all(parts(frame))


def load(bench: Bench, accepted: int) -> list[Client]:
    """Three streams; then prompts that come while they run, the last of them together."""
    streams = bench.decoding(3, max_tokens=60, accepted=accepted)
    bench.run_for(50)
    start_ms = bench.now_ms
    late = zip((0, 40, 45, 45), (1_000, 200, 64, 70), strict=True)
    prompts = [bench.arrive(tokens, 12, at_ms=start_ms + ms, accepted=accepted) for ms, tokens in late]
    bench.run()
    return streams + prompts


@pytest.mark.parametrize("costs", [MIXED, {**MIXED, **WIDE}, ROWS], ids=["plain", "speculative", "rows"])
@pytest.mark.parametrize("slots", [4, 8])
def test_prompts_and_streams_go_on_together(costs: Costs, slots: int) -> None:
    """All are served to their ends, and while prompts wait streams still have tokens, in the same frames."""
    bench = Bench({**SEPARATE, **costs}, slots=slots)
    clients = load(bench, accepted=3)
    assert all(client.complete for client in clients)
    mixed = [frame for frame in bench.frames if both(frame)]
    assert sum(frame.prompt_tokens for frame in mixed) > 300
    for frame in mixed:
        prompts, _ = parts(frame)
        assert len(prompts) <= frame.shape.prompt_rows
    if costs is ROWS and slots == 8:
        assert any(len(parts(frame)[0]) > 1 for frame in mixed)


def fits(shape: GraphShape, frame: Played) -> bool:
    """Whether a graph could do the work of a frame."""
    prompts, _ = parts(frame)
    return (
        (shape.kind, shape.width, shape.draft_depth) == (frame.kind, frame.shape.width, frame.shape.draft_depth)
        and shape.batch >= len(frame.plan.lanes)
        and shape.prefill_tokens >= frame.prompt_tokens
        and shape.prompt_rows >= len(prompts)
    )


@pytest.mark.parametrize("costs", [MIXED, {**MIXED, **WIDE}], ids=["plain", "speculative"])
@pytest.mark.parametrize("tail", [1, 63, 64, 65, 300])
def test_tails_take_the_smallest_graph_that_fits(costs: Costs, tail: int) -> None:
    """No frame has a graph of which one capacity could be smaller, whatever the measurements say: the larger ones are
    made faster here."""
    faster = {
        shape: 20.0 - shape.prefill_tokens / 80 if shape.kind is GraphKind.MIXED else ms for shape, ms in costs.items()
    }
    bench = Bench({**SEPARATE, **faster}, slots=4)
    bench.decoding(3)
    bench.run_for(50)
    client = bench.arrive(512 + tail, 4, at_ms=bench.now_ms)
    bench.run(lambda: client.ended_ms is not None)
    for frame in bench.frames:
        smaller = [
            shape
            for shape in bench.catalog
            if fits(shape, frame)
            and shape != frame.shape
            and shape.batch <= frame.shape.batch
            and shape.prefill_tokens <= frame.shape.prefill_tokens
        ]
        assert not smaller, f"{frame.shape.name} serves {frame.plan.lanes}"


def test_a_malformed_completion_ends_the_requests_of_its_frame_alone() -> None:
    """The first frame with a prompt and streams reports counters that cannot be."""

    def play(faults: dict[Fence, Fault]) -> tuple[Bench, list[Client], int]:
        bench = Bench({**SEPARATE, **MIXED}, slots=5, faults=Faults(faults))
        streams = [bench.arrive(64, 200) for _ in range(4)]
        bench.run(lambda: all(client.outputs for client in streams))
        played = len(bench.frames)
        prompt = bench.arrive(300, 12, at_ms=bench.now_ms + 50)
        bench.run(lambda: any(both(frame) for frame in bench.frames[played:]))
        return bench, [*streams, prompt], len(bench.frames)

    _, _, count = play({})
    bench, clients, _ = play({Fence(count): Fault.MALFORMED})
    broken = bench.frames[count - 1]
    assert both(broken)
    later = bench.arrive(100, 12, at_ms=bench.now_ms + 100)
    bench.run()
    lost = {client.slot for client in clients if client.error is not None}
    assert lost == set(broken.slots)
    assert len(lost) < len(clients)
    for client in [*clients, later]:
        assert client.complete == (client.slot not in lost or client is later)
    assert bench.scheduler.free_slots == 5


def test_shapes_grow_old_one_by_one() -> None:
    """Prompts that take the small mixed graph keep it fresh, and neither the large ones nor plain decoding with it. A
    stale cost stays what it was, and is used again."""
    small, large = mixed_shape(4, 64), mixed_shape(4, 512)
    costs = {decode_shape(4): 7.95, prefill_shape(64): 30.0, small: 8.4, large: 14.0}
    bench = Bench(costs, slots=4, estimate_ttl_ms=1_000.0)
    bench.decoding(3)
    for turn in range(15):
        bench.arrive(60, 2, at_ms=bench.now_ms + 100 * (turn + 1))
    bench.run_for(1_600)
    rows = {row.shape: row for row in bench.scheduler.durations.rows(bench.now_ns)}
    assert {shape for shape, row in rows.items() if row.stale} == {prefill_shape(64), large}
    assert rows[large].duration_ns == 14_000_000
    bench.costs_ns[large] = 13_000_000
    client = bench.arrive(500, 2, at_ms=bench.now_ms)
    bench.run(lambda: client.ended_ms is not None)
    row = bench.scheduler.durations.row(large, bench.now_ns)
    assert (row.duration_ns, row.stale) == (13_000_000, False)
    assert bench.scheduler.durations.row(prefill_shape(64), bench.now_ns).stale
