"""Graphs of stages by themselves: retirement, rows of longer ways, and the rows that they take along."""

from __future__ import annotations

import pytest

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.selection.select import select
from flare.machines.selection.view import Candidate, LaneWork, Reason, RequestRow, View
from tests.machines.build import decode_shape, decoder, graph, prefill_shape, prompt, stage_shape, terminal, view

RESTORE, VISION, SNAPSHOT = GraphKind.RESTORE, GraphKind.VISION, GraphKind.SNAPSHOT
TERMINAL_SNAPSHOT = GraphKind.TERMINAL_SNAPSHOT


def alone(taken: View, shape: GraphShape) -> Candidate:
    """The candidate of one stage graph without a following one."""
    (found,) = (c for c in select(taken, explain=True).candidates if c.shape == shape and c.following is None)
    return found


@pytest.mark.parametrize("kind", [SNAPSHOT, TERMINAL_SNAPSHOT])
def test_retiring_is_worth_its_value_and_the_end_of_the_wait(kind: GraphKind) -> None:
    decision = select(view([graph(stage_shape(kind, 2), 5.0)], [terminal(3, age_ms=7.0)]))
    assert decision.plan is not None
    assert decision.plan.lanes == (LaneWork(3, 4, 10, 0, emits=False, delivers=False, expected_tokens=0.0),)
    assert decision.plan.needs_empty_window
    assert decision.plan.score == (256 + 1 * 5.0 * (7 + 5)) / 5 - 5 / 2


def test_both_kinds_of_snapshot_are_one_family() -> None:
    graphs = [graph(stage_shape(SNAPSHOT, 1), 6.0), graph(stage_shape(TERMINAL_SNAPSHOT, 2), 8.0)]
    taken = view(graphs, [terminal(0, age_ms=1.0), terminal(1, age_ms=2.0), decoder(2)])
    # Three wait; a pair of terminal rows costs 8/2 each.
    best = alone(taken, stage_shape(TERMINAL_SNAPSHOT, 2))
    assert (best.terminal, best.service) == (2, 512.0)
    assert best.age_term == pytest.approx(3 * 4.0 * (1 + 8) + 3 * 4.0 * (2 + 8))
    assert best.waiting_cost == pytest.approx(8 / 2 * (1 + 1 + 0.1))


def test_a_longer_way_is_worth_the_part_of_its_value_that_the_stage_is_of_its_time() -> None:
    stages = [graph(stage_shape(RESTORE, 1), 4.0), graph(stage_shape(VISION, 1), 10.0)]
    taken = view(
        [*stages, graph(prefill_shape(64), 16.0), graph(prefill_shape(16), 15.0)],
        [prompt(0, 64, stages=(RESTORE, VISION, VISION)), decoder(9, output_left=0)],
    )
    value = 64 * (1 + 160.0) + 64 + 160.0
    found = alone(taken, stage_shape(RESTORE, 1))
    assert found.service == pytest.approx(value * 4 / (4 + 10 + 10 + 16))
    assert (found.age_term, found.slots) == (0.0, (0,))


def test_a_stream_on_a_longer_way_counts_the_wait_that_the_whole_way_ends() -> None:
    stages = [graph(stage_shape(SNAPSHOT, 1), 4.0), graph(stage_shape(RESTORE, 1), 6.0)]
    taken = view(
        [*stages, graph(decode_shape(1), 10.0), graph(decode_shape(4), 11.0)],
        [decoder(0, stages=(SNAPSHOT, RESTORE), age_ms=30.0), decoder(1)],
    )
    found = alone(taken, stage_shape(SNAPSHOT, 1))
    assert found.service == pytest.approx((64 + 160 + 80) * 4 / 20)
    # Its own interval: both stages and a round of two rows, times two streams. The round of V is the best for it alone.
    assert found.age_term == pytest.approx(0.1 * 2 * (4 + 6 + 11) * (30 + 20) * 4 / 20)


def test_what_is_not_measured_on_the_way_takes_no_time() -> None:
    stages = [graph(stage_shape(RESTORE, 1), 4.0), graph(stage_shape(VISION, 1))]
    taken = view([*stages, graph(prefill_shape(64), 16.0)], [prompt(0, 64, stages=(RESTORE, VISION))])
    assert alone(taken, stage_shape(RESTORE, 1)).service == 64 * (1 + 160.0) + 64 + 160.0


def test_an_unknown_stage_is_worth_the_whole_way_and_is_a_discovery() -> None:
    stages = [graph(stage_shape(RESTORE, 1)), graph(stage_shape(VISION, 1), 9.0)]
    plan = select(view([*stages, graph(prefill_shape(64), 16.0)], [prompt(0, 64, stages=(RESTORE, VISION))])).plan
    assert plan is not None
    assert (plan.score, plan.reason) == (64 * (1 + 160.0) + 64 + 160.0, Reason.DISCOVERY)


def test_the_best_rows_are_taken_and_the_room_left_goes_to_rows_of_one_stage_in_serving_order() -> None:
    rows: list[RequestRow] = [
        terminal(0, age_ms=1.0),
        terminal(1, age_ms=50.0),
        prompt(2, 64, stages=(SNAPSHOT,), token_price=0.0, last_fence=8),
        prompt(3, 64, stages=(SNAPSHOT,), token_price=0.0, last_fence=2),
    ]
    sizes = (1, 2, 3, 4, 5)
    taken = view([*(graph(stage_shape(SNAPSHOT, b), 9.0) for b in sizes), graph(prefill_shape(64), 9e4)], rows)
    served = [(1,), (0, 1), (0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3)]
    for batch, slots in zip(sizes, served, strict=True):
        assert alone(taken, stage_shape(SNAPSHOT, batch)).slots == slots
    assert alone(taken, stage_shape(SNAPSHOT, 5)).lost == "redundant: batch 4 serves the same requests"
    # With a kind of its own only those that have ended are served.
    only = view([graph(stage_shape(TERMINAL_SNAPSHOT, b), 9.0) for b in (2, 4)], rows)
    assert alone(only, stage_shape(TERMINAL_SNAPSHOT, 2)).slots == (0, 1)
    assert alone(only, stage_shape(TERMINAL_SNAPSHOT, 4)).lost == "redundant: batch 2 serves the same requests"


def test_rows_of_one_stage_alone_are_no_candidate_of_a_single_graph() -> None:
    taken = view([graph(stage_shape(RESTORE, 1), 1.0)], [prompt(0, 64, stages=(RESTORE,))])
    assert select(taken, explain=True).candidates == ()


def test_a_row_that_no_graph_could_serve_after_its_stages_goes_no_way() -> None:
    stages = [graph(stage_shape(RESTORE, 1), 1.0), graph(stage_shape(VISION, 1), 1.0)]
    row = prompt(0, 64, stages=(RESTORE, VISION))
    assert select(view([*stages, graph(decode_shape(1), 8.0)], [row])).plan is None
