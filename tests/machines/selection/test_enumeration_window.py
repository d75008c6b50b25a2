"""Queues, holds and timing refresh against the enumeration."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from flare.machines.graph import GraphKind
from flare.machines.selection.select import select
from flare.machines.selection.view import GraphRow, Hold, Plan, Reason, View
from tests.machines.build import (
    BALANCED,
    NOW_NS,
    decode_shape,
    decoder,
    graph,
    prefill_shape,
    prompt,
    queued,
    speculative_shape,
    stage_shape,
    terminal,
    view,
)
from tests.machines.oracle.agree import check
from tests.machines.oracle.cases import SORTS, case
from tests.machines.oracle.choices import Oracle

CASES = 80


def _with_window(taken: View, rng: random.Random) -> View:
    """A frame or two in flight: of the catalog as a rule, queueable or not, and of a graph that is gone."""
    shapes = [row.shape for row in taken.graphs] + [decode_shape(64), speculative_shape(32, 2)]
    fresh = [graph(shape, 9.0) for shape in shapes[-2:]]
    gone = rng.random() < 0.1
    frames = [queued(rng.choice(shapes[-2:] if rng.random() < 0.7 else shapes)) for _ in range(rng.randint(1, 2))]
    return msgspec.structs.replace(
        taken,
        graphs=taken.graphs if gone else (*taken.graphs, *fresh),
        window=tuple(frames),
        overrun=rng.random() < 0.15,
        now_ns=NOW_NS - 3_000_000,
    )


@pytest.mark.parametrize("sort", SORTS)
def test_a_window_with_frames_in_it(sort: str) -> None:
    for number in range(CASES):
        taken = _with_window(case(sort, number), random.Random(number))
        oracle = Oracle(taken, float)
        if not oracle.close_packing():
            check(taken, select(taken), oracle)


def test_every_answer_about_the_window_is_given() -> None:
    answers: Counter[tuple[Hold | None, Reason | None]] = Counter()
    for number in range(600):
        taken = _with_window(case("speculative", number), random.Random(number))
        wanted = check(taken, select(taken), Oracle(taken, float))
        answers[wanted.hold, wanted.reason] += 1
    for hold in (None, Hold.WAITING_FOR_DRAIN, Hold.OVERRUN):
        assert answers[hold, Reason.ORDINARY] > 10, answers
    assert answers[Hold.WAITING_FOR_DRAIN, Reason.TIMING_REFRESH] > 10, answers
    assert answers[Hold.WAITING_FOR_DRAIN, Reason.DISCOVERY] > 10, answers


@pytest.mark.parametrize("sort", SORTS)
def test_a_funded_refresh_takes_the_stale_graph_that_has_waited_longest(sort: str) -> None:
    reasons: Counter[Reason | None] = Counter()
    for number in range(CASES):
        rng, taken = random.Random(number), case(sort, number)
        stale = [row.duration_ns > 0 and rng.random() < 0.5 for row in taken.graphs]
        graphs = [msgspec.structs.replace(row, stale=old) for row, old in zip(taken.graphs, stale, strict=True)]
        taken = msgspec.structs.replace(taken, graphs=tuple(graphs), refresh_funded=True)
        oracle = Oracle(taken, float)
        if not oracle.close_packing():
            reasons[check(taken, select(taken), oracle).reason] += 1
    assert reasons[Reason.TIMING_REFRESH] > CASES / 10, reasons


def _plan(taken: View) -> Plan:
    plan = select(taken).plan
    assert plan is not None
    return plan


def _stale(row: GraphRow, observed_s: int, attempted_s: int = 0) -> GraphRow:
    return msgspec.structs.replace(
        row, stale=True, observed_at_ns=observed_s * 10**9, attempted_at_ns=attempted_s * 10**9
    )


def test_what_a_refresh_displaces_and_what_it_does_not() -> None:
    rows = [decoder(0), decoder(1)]
    fresh, old = graph(decode_shape(2), 8.0), _stale(graph(decode_shape(1), 8.0), 3)
    funded = view([fresh, old], rows, refresh_funded=True)
    assert (_plan(funded).shape, _plan(funded).reason) == (old.shape, Reason.TIMING_REFRESH)
    assert _plan(msgspec.structs.replace(funded, refresh_funded=False)).shape == fresh.shape
    # The winner's own graph, unknown ones and fresh ones are no alternatives; a discovery is not displaced.
    assert _plan(view([_stale(fresh, 1)], rows, refresh_funded=True)).reason is Reason.ORDINARY
    assert _plan(view([graph(decode_shape(2)), old], rows, refresh_funded=True)).reason is Reason.DISCOVERY
    assert _plan(view([fresh, graph(decode_shape(1), 8.0)], rows, refresh_funded=True)).reason is Reason.ORDINARY
    # A graph that is redundant here is not feasible.
    redundant = _stale(graph(decode_shape(8), 8.0), 1)
    assert _plan(view([fresh, redundant, old], rows, refresh_funded=True)).shape == old.shape


def test_attempts_count_like_observations() -> None:
    rows = [decoder(0), decoder(1), decoder(2), decoder(3)]
    fresh = graph(decode_shape(4), 8.0)
    one, two = _stale(graph(decode_shape(1), 8.0), 3, 9), _stale(graph(decode_shape(2), 8.0), 5, 4)
    assert _plan(view([fresh, one, two], rows, refresh_funded=True)).shape == two.shape
    level = _stale(graph(decode_shape(2), 8.0), 9, 4)
    assert _plan(view([fresh, one, level], rows, refresh_funded=True)).shape == level.shape  # the greater value


def test_while_a_refresh_waits_for_the_window_nothing_else_is_submitted() -> None:
    fresh, old = graph(decode_shape(2), 8.0), _stale(graph(decode_shape(1), 8.0), 3)
    window = (queued(fresh.shape, 5),)
    decision = select(view([fresh, old], [decoder(0), decoder(1)], window=window, refresh_funded=True))
    assert (decision.plan, decision.hold) == (None, Hold.WAITING_FOR_DRAIN)
    assert decision.awaited is not None
    assert decision.awaited.reason is Reason.TIMING_REFRESH


def test_a_stale_prerequisite_is_refreshed_by_its_best_pair() -> None:
    stage = _stale(graph(stage_shape(GraphKind.RESUME, 1), 500.0), 3)
    graphs = [graph(decode_shape(2), 8.0), stage]
    policy = msgspec.structs.replace(BALANCED, decode_age_price=0.0)
    rows = [decoder(0), decoder(1, stages=(GraphKind.RESUME,))]
    assert _plan(view(graphs, rows, policy=policy)).shape == graphs[0].shape
    plan = _plan(view(graphs, rows, policy=policy, refresh_funded=True))
    assert (plan.shape, plan.reason, plan.duration_ns) == (stage.shape, Reason.TIMING_REFRESH, 500_000_000)
    assert plan.following is not None
    assert [lane.slot for lane in plan.following.lanes] == [0, 1]


def test_speculative_rounds_are_queued_like_decode_and_stages_are_not() -> None:
    wide, narrow = graph(speculative_shape(2, 3), 9.0), graph(decode_shape(2), 8.0)
    rows = [decoder(0, survival=(0.9, 0.8)), decoder(1, survival=(0.9, 0.8))]
    for flying in (wide, narrow):
        decision = select(view([wide, narrow], rows, window=(queued(flying.shape, 0),)))
        assert (decision.hold, decision.plan and decision.plan.shape) == (None, wide.shape)
    retire = graph(stage_shape(GraphKind.TERMINAL_SNAPSHOT, 1), 0.1)
    decision = select(view([wide, retire], [*rows, terminal(3, age_ms=900.0)], window=(queued(wide.shape, 0),)))
    assert decision.hold is Hold.WAITING_FOR_DRAIN
    assert decision.awaited is not None
    assert decision.awaited.shape == retire.shape
    prompts = [*rows, prompt(4, 64, stages=(GraphKind.INITIALIZE,), token_price=1e9)]
    pair = [wide, graph(stage_shape(GraphKind.INITIALIZE, 1), 1.0), graph(prefill_shape(64), 9.0)]
    decision = select(view(pair, prompts, window=(queued(wide.shape, 0),)))
    assert decision.hold is Hold.WAITING_FOR_DRAIN
    assert decision.awaited is not None
    assert decision.awaited.following is not None
