"""Durations and faults: fixed by seed and fence, whatever the order in which they are asked for."""

from __future__ import annotations

import itertools

import pytest

from flare.graphs.frames import Frame
from flare.graphs.sim.timing import Fault, Faults, by_kind, by_shape, with_drift, with_noise, with_throttling
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence

DECODE, WIDER = GraphShape(GraphKind.DECODE, 2), GraphShape(GraphKind.DECODE, 4)
EXACT = by_kind({GraphKind.DECODE: 10_000})


def frames(count: int, shape: GraphShape = DECODE) -> list[Frame]:
    """Empty frames under rising fences."""
    return [Frame(Fence(fence), shape, ()) for fence in range(1, count + 1)]


def test_a_table_knows_its_shapes_alone() -> None:
    table = by_shape({DECODE: 7})
    assert table(frames(1)[0]) == 7
    with pytest.raises(KeyError):
        table(frames(1, WIDER)[0])


def test_noise_depends_on_the_fence_alone() -> None:
    noisy, other = (with_noise(EXACT, seed, 0.1) for seed in (1, 2))
    first = [noisy(each) for each in frames(50)]
    assert first == [noisy(each) for each in reversed(frames(50))][::-1]
    assert first != [other(each) for each in frames(50)]
    assert all(9_000 <= ns <= 11_000 for ns in first)
    assert len(set(first)) > 20
    with pytest.raises(ValueError, match="spread is 1"):
        with_noise(EXACT, 1, 1.0)


def test_costs_drift_evenly_and_each_shape_on_its_own() -> None:
    drifting = with_drift(EXACT, 4, 0.5, 100)
    costs = [drifting(each) for each in frames(1000)]
    assert costs == [drifting(each) for each in reversed(frames(1000))][::-1]
    assert costs[0] == pytest.approx(10_000, rel=0.01)
    assert all(5_000 <= ns <= 15_000 for ns in costs)
    assert max(costs) - min(costs) > 2_000
    assert all(abs(after - before) <= 101 for before, after in itertools.pairwise(costs))
    assert costs != [drifting(each) for each in frames(1000, WIDER)]
    assert costs != [with_drift(EXACT, 5, 0.5, 100)(each) for each in frames(1000)]
    with pytest.raises(ValueError, match="frames is 0"):
        with_drift(EXACT, 1, 0.5, 0)
    with pytest.raises(ValueError, match="spread is -"):
        with_drift(EXACT, 1, -0.5, 1)


def test_throttling_slows_whole_periods_down() -> None:
    throttled = with_throttling(EXACT, 6, 3.0, 0.25, 20)
    costs = [throttled(each) for each in frames(19_999)]
    assert set(costs) == {10_000, 30_000}
    assert 4_000 < costs.count(30_000) < 6_000
    periods = [costs[0:19], *(costs[start : start + 20] for start in range(19, 19_999, 20))]
    assert all(len(set(period)) == 1 for period in periods)
    for factor, share, length in ((0.5, 0.1, 1), (2.0, 1.5, 1), (2.0, 0.1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            with_throttling(EXACT, 1, factor, share, length)


def test_what_changes_durations_can_be_combined() -> None:
    combined = with_throttling(with_drift(with_noise(EXACT, 1, 0.05), 2, 0.2, 10), 3, 2.0, 0.5, 5)
    assert all(10_000 * 0.95 * 0.8 <= combined(each) <= 10_000 * 1.05 * 1.2 * 2 + 2 for each in frames(500))


def test_random_faults_come_at_their_rates() -> None:
    plan = Faults.random(3, 10_000, {Fault.FAILED: 0.05, Fault.UNTIMED: 0.2}, late_ns=7)
    counts = [sum(fault is kind for fault in plan.at.values()) for kind in (Fault.FAILED, Fault.UNTIMED, Fault.LATE)]
    assert 400 < counts[0] < 600
    assert 1800 < counts[1] < 2200
    assert counts[2] == 0
    assert plan == Faults.random(3, 10_000, {Fault.FAILED: 0.05, Fault.UNTIMED: 0.2}, late_ns=7)
    with pytest.raises(ValueError, match="sum to at most 1"):
        Faults.random(3, 10, {Fault.FAILED: 0.6, Fault.LATE: 0.6})
