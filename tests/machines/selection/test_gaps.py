"""The gap price: the mean of a power over streams and time, and what it decides."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.graph import GraphKind
from flare.machines.selection.board import Board
from flare.machines.selection.gaps import Gaps
from flare.machines.selection.select import select
from flare.machines.selection.view import PolicyRow, RequestRow, View
from tests.machines.build import (
    BALANCED,
    decode_shape,
    decoder,
    graph,
    mixed_shape,
    prefill_shape,
    prompt,
    stage_shape,
    terminal,
    view,
)
from tests.machines.oracle.agree import check_terms

POLICY = PolicyRow(1.0, 0.0, 4.0, 0.0, 8.0, gap_price=200.0)


def gaps(ages: list[float], *, ms: float = 10.0, policy: PolicyRow = POLICY, rows: tuple[RequestRow, ...] = ()) -> Gaps:
    """The price in a view of decoding streams of `ages` and a graph that serves all of them in `ms`."""
    streams = [decoder(slot, age_ms=age) for slot, age in enumerate(ages)]
    found = Board.of(view([graph(decode_shape(64), ms)], [*streams, *rows], policy=policy)).gaps
    assert found is not None
    return found


@given(
    st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20),
    st.floats(0.01, 1e4),
    st.sampled_from([0.5, 10.0, 300.0]),
    st.sampled_from([1.0, 5.0, 40.0]),
)
def test_it_is_the_mean_over_the_streams_and_the_time(
    ages: list[float], horizon_ms: float, ms: float, stretch: float
) -> None:
    policy = msgspec.structs.replace(POLICY, gap_stretch=stretch)
    # Every stream is in the one graph, so the reference interval is its time.
    tolerated, horizon, total = Fraction(stretch) * Fraction(ms), Fraction(horizon_ms), Fraction(0)
    for age in ages:
        start = min(Fraction(age) / tolerated, Fraction(3, 2))
        total += (start + horizon / tolerated) ** 9 - start**9
    exact = 200 * tolerated / (9 * horizon * len(ages)) * total
    assert gaps(ages, ms=ms, policy=policy).cost(horizon_ms) == pytest.approx(float(exact), rel=1e-9)


def test_a_short_frame_after_a_tolerated_gap_costs_the_price() -> None:
    assert gaps([50.0]).cost(1e-6) == pytest.approx(200.0)
    assert gaps([25.0]).cost(1e-6) == pytest.approx(200.0 / 256.0)
    assert gaps([50.0, 0.0]).cost(1e-6) == pytest.approx(100.0)


def test_text_that_is_held_back_for_long_counts_as_one_and_a_half_gaps() -> None:
    assert gaps([1e9]).cost(10.0) == gaps([75.0]).cost(10.0)


def test_streams_that_only_retire_are_counted_and_never_charged() -> None:
    # Two streams: the reference interval doubles, and half of them have no gap.
    found = gaps([100.0], rows=(terminal(9, age_ms=1e6),))
    assert found.tolerated_ms == 100.0
    assert found.cost(1e-6) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("policy", "rows", "ms"),
    [
        (msgspec.structs.replace(POLICY, gap_price=0.0), [decoder(0)], 10.0),
        (POLICY, [prompt(0, 50)], 10.0),
        (POLICY, [decoder(0, stages=(GraphKind.RESUME,))], 10.0),
        (POLICY, [decoder(0)], 0.0),
    ],
)
def test_without_price_ready_streams_or_measurements_nothing_is_charged(
    policy: PolicyRow, rows: list[RequestRow], ms: float
) -> None:
    assert Board.of(view([graph(decode_shape(64), ms)], rows, policy=policy)).gaps is None


def test_the_greatest_and_least_times_stay_finite() -> None:
    policy = msgspec.structs.replace(POLICY, gap_price=1e9, gap_stretch=1.0)
    graphs = [graph(decode_shape(64), 1e-6), graph(prefill_shape(64), 1e12)]
    taken = view(graphs, [decoder(0, age_ms=1e12), prompt(1, 60)], policy=policy)
    assert all(math.isfinite(candidate.score) for candidate in select(taken, explain=True).candidates)


def busy(policy: PolicyRow, age_ms: float) -> View:
    """Four streams of an age beside a valuable prompt, in a short or a long graph."""
    graphs = [graph(decode_shape(4), 10.0), graph(mixed_shape(8, 64), 20.0), graph(mixed_shape(8, 512), 100.0)]
    rows = [*(decoder(slot, age_ms=age_ms) for slot in range(4)), prompt(9, 900, token_price=90.0)]
    return view(graphs, rows, policy=msgspec.structs.replace(policy, token_fairness=1.0))


def test_a_frame_that_makes_a_long_gap_gives_way_to_a_short_one() -> None:
    chosen = []
    for price, age_ms in ((0.0, 5.0), (200.0, 5.0)):
        plan = select(busy(msgspec.structs.replace(POLICY, gap_price=price), age_ms)).plan
        assert plan is not None
        chosen.append(plan.shape.name)
    assert chosen == ["mixed/b8t512", "mixed/b8t64"]


def test_what_is_alone_runs_whatever_gaps_it_makes() -> None:
    graphs = [graph(decode_shape(1), 1.0), graph(prefill_shape(64), 900.0)]
    rows = [decoder(0, output_left=0), prompt(1, 60), decoder(2, stages=(GraphKind.RESUME,))]
    assert select(view(graphs, rows, policy=POLICY)).plan is not None
    plan = select(view([graph(decode_shape(1), 900.0)], [decoder(0, age_ms=900.0)], policy=POLICY)).plan
    assert plan is not None


def test_every_term_of_a_score_is_shown() -> None:
    stages = [graph(stage_shape(kind, 2), 3.0) for kind in (GraphKind.RESUME, GraphKind.TERMINAL_SNAPSHOT)]
    taken = busy(msgspec.structs.replace(BALANCED, gap_price=200.0), 30.0)
    rows = [*taken.requests, decoder(20, stages=(GraphKind.RESUME,)), terminal(21)]
    found = select(msgspec.structs.replace(taken, graphs=(*taken.graphs, *stages), requests=tuple(rows)), explain=True)
    assert {candidate.following is None for candidate in found.candidates} == {True, False}
    for candidate in found.candidates:
        assert candidate.gap_cost > 0.0
        check_terms(candidate)
    assert len({candidate.gap_cost for candidate in found.candidates}) >= 6


def test_another_tolerance_changes_nothing_where_gaps_have_no_price() -> None:
    taken = busy(BALANCED, 30.0)
    other = msgspec.structs.replace(taken, policy=msgspec.structs.replace(taken.policy, gap_stretch=1.0))
    assert select(taken, explain=True) == select(other, explain=True)
