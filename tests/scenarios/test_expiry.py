"""Graphs whose measurements grow old, and how they come back: in integers, to the nanosecond."""

from __future__ import annotations

import pytest

from flare.machines.selection.view import Reason
from tests.machines.build import decode_shape, prefill_shape

from .bench import START_NS, Bench, Costs, Played

PAIR, FOUR, PROMPT = decode_shape(2), decode_shape(4), prefill_shape(64)
COSTS: Costs = {PAIR: 1.0, FOUR: 5.0, PROMPT: 5.0}
WRONG: Costs = {**COSTS, PAIR: 50.0}
"""What was measured at the start, when something slowed the pair down."""

LATER_MS = 31_000.0
"""When everything measured at the start is stale under `balanced`."""

FUNDED_NS = 2_495_000_000


def refreshes(bench: Bench) -> list[Played]:
    return [frame for frame in bench.frames if frame.plan.reason is Reason.TIMING_REFRESH]


def funded_ns(bench: Bench) -> int:
    """When the ledger was full for the first time, from when the streams arrived."""
    return next(at_ns for at_ns, state in bench.ledger if state == "funded") - round(LATER_MS * 1e6)


def three_streams(prompt_ms: float = 5.0, measured_ms: Costs = WRONG) -> Bench:
    """Three streams on a server that stood idle until all estimates were stale. Whatever runs then is fresh again; the
    pair seems too slow to ever run."""
    bench = Bench({**COSTS, PROMPT: prompt_ms}, slots=3, measured_ms=measured_ms)
    for _ in range(3):
        bench.arrive(64, 20_000, at_ms=LATER_MS)
    return bench


def test_a_graph_that_never_wins_is_measured_again_for_2495_ms_of_ordinary_work() -> None:
    """499 frames of 5 ms. The frame in flight ends first, for what is stale runs alone."""
    bench = three_streams()
    bench.run(lambda: bool(refreshes(bench)))
    (refresh,) = refreshes(bench)
    assert refresh.shape == PAIR
    assert refresh is bench.frames[500]
    assert {frame.shape for frame in bench.frames[:500]} == {PROMPT, FOUR}
    assert not any(frame.view.refresh_funded for frame in bench.frames[:500])
    assert funded_ns(bench) == FUNDED_NS
    assert refresh.at_ms == LATER_MS + 2_500.0
    assert (refresh.behind, refresh.plan.duration_ns) == (0, 50_000_000)


def test_a_nanosecond_less_is_not_enough() -> None:
    bench = three_streams(prompt_ms=5.0 - 1e-6)
    bench.run(lambda: bool(refreshes(bench)))
    assert funded_ns(bench) == FUNDED_NS + 5_000_000 - 3
    assert refreshes(bench)[0] is bench.frames[501]


def test_what_was_measured_again_wins_from_then_on() -> None:
    """The sample replaces the stale estimate outright. An episode of 1 ms leaves credit for more, and no episode opens
    before credit is full again."""
    bench = three_streams()
    bench.run(lambda: bool(refreshes(bench)))
    frames = bench.run_for(500)
    assert bench.scheduler.durations.row(PAIR, bench.now_ns).duration_ns == 1_000_000
    assert {frame.shape for frame in frames} == {PAIR}
    assert len(refreshes(bench)) == 1
    completed = sum(frame.end_ms is not None for frame in frames)
    credit = bench.scheduler.ledgers.by_reason[Reason.TIMING_REFRESH].credit
    assert credit == 998 * 5_000_000 - 998 * 1_000_000 + completed * 2 * 1_000_000


def test_a_refresh_of_what_is_as_slow_as_it_seemed_changes_nothing_but_its_age() -> None:
    """A debt of 15 ms, at 499 ms of ordinary work for each, before the ledger fills again: 9,980 ms in all."""
    bench = Bench({**COSTS, PAIR: 20.0}, slots=3)
    for _ in range(3):
        bench.arrive(64, 20_000, at_ms=LATER_MS)
    bench.run(lambda: bool(refreshes(bench)))
    bench.run_for(100)
    row = bench.scheduler.durations.row(PAIR, bench.now_ns)
    assert (row.duration_ns, row.stale) == (20_000_000, False)
    bench.run_for(10_000)
    assert len(refreshes(bench)) == 1
    assert {frame.shape for frame in bench.frames[501:]} == {FOUR}
    opened, owing, repaid, full = bench.ledger[-4:]
    assert [state for _, state in bench.ledger] == ["earning", "funded", "open", "debt", "earning", "funded"]
    assert owing[0] - opened[0] == 20_000_000
    assert repaid[0] - owing[0] == 15 * 499_000_000
    assert full[0] - repaid[0] == FUNDED_NS


def test_idleness_spends_credit() -> None:
    """Busy for 2 s, idle, and busy for 2 s: no refresh in either."""
    bench = Bench(COSTS, slots=3, measured_ms=WRONG)
    for start_ms in (LATER_MS, LATER_MS + 5_000):
        for _ in range(3):
            bench.arrive(64, 396, at_ms=start_ms)
    bench.run()
    assert sum(frame.shape == FOUR for frame in bench.frames) > 700
    assert not refreshes(bench)
    assert "funded" not in [state for _, state in bench.ledger]


def test_age_alone_never_makes_a_graph_unknown() -> None:
    """All estimates are a minute old: they rank as they are, the first frame of each runs alone and makes it fresh, and
    none is a discovery."""
    bench = Bench(COSTS, slots=4)
    client = bench.arrive(64, 20_000, at_ms=2 * LATER_MS)
    bench.run(lambda: len(client.outputs) > 3)
    prompt, first, *rest = bench.frames
    assert (prompt.shape, first.shape) == (PROMPT, PAIR)
    assert {frame.plan.reason for frame in bench.frames} == {Reason.ORDINARY}
    for frame in (prompt, first):
        assert frame.plan.observation_age_ns == bench_ns(frame)
        assert frame.behind == 0
    assert rest[0].at_ms == first.end_ms
    assert rest[1].behind == 1


def bench_ns(frame: Played) -> int:
    """Nanoseconds since the start of the scenario, when everything was measured."""
    assert frame.view.now_ns == START_NS + round(frame.at_ms * 1e6)
    return frame.view.now_ns - START_NS


@pytest.mark.parametrize("ttl_ms", [1_000.0, 30_000.0])
def test_what_is_in_use_stays_fresh(ttl_ms: float) -> None:
    bench = Bench(COSTS, slots=4, estimate_ttl_ms=ttl_ms)
    bench.decoding(3)
    bench.run_for(3_000)
    stale = {row.shape for row in bench.scheduler.durations.rows(bench.now_ns) if row.stale}
    assert FOUR not in stale
    assert (PROMPT in stale) == (ttl_ms == 1_000.0)
