"""Speculative rounds and mixed graphs: yields, widths, prompts beside streams, redundancy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from flare.machines.graph import GraphKind
from flare.machines.selection.board import Board
from flare.machines.selection.cohort import rank
from flare.machines.selection.select import select
from flare.machines.selection.streams import expected_tokens
from flare.machines.selection.view import Candidate, LaneWork, Phase, Plan, Reason, View
from tests.machines.build import (
    BALANCED,
    decode_shape,
    decoder,
    graph,
    mixed_shape,
    prefill_shape,
    prompt,
    queued,
    speculative_shape,
    view,
)

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "vectors.json").read_text())
HALVES = (0.5, 0.25, 0.125)


def plan_of(taken: View) -> Plan:
    plan = select(taken).plan
    assert plan is not None
    return plan


def candidates(taken: View) -> dict[tuple[str, tuple[int, ...]], Candidate]:
    return {(c.shape.name, c.slots): c for c in select(taken, explain=True).candidates}


# Speculative rounds


@pytest.mark.parametrize("case", VECTORS["expected_tokens"])
def test_expected_tokens_match_the_reference(case: dict[str, Any]) -> None:
    survival = tuple(np.minimum.accumulate(case["survival"]) ** case["alpha"])
    row = decoder(0, scored_survival=survival, output_left=case["tokens_left"])
    got = expected_tokens([row.scored_survival, ()], [row.output_left, 9], np.array([0, case["width"] - 1]))
    assert got[1] == pytest.approx([case["expect"], 1.0], rel=1e-12)
    assert got[0].tolist() == [1.0, 1.0]


def test_a_round_is_worth_its_expected_tokens_and_one_delivery() -> None:
    row = decoder(0, survival=(0.9, 0.8), scored_survival=HALVES[:2], token_price=2.0, delivery_price=3.0)
    plan = plan_of(view([graph(speculative_shape(2, 3), 20.0)], [row]))
    assert plan.lanes == (LaneWork(0, 1, 10, 3, emits=True, delivers=True, expected_tokens=2.7),)
    # Alone in its family: sigma is 20 ms. Scores take the scored estimates, the expected service the plain ones.
    worth = 1.75 * (64 + 16 * 2.0) + 4 * 3.0 + 0.1 * 20.0 * 20.0
    assert plan.score == pytest.approx(worth / 20.0 - 20.0 / 2 * 0.1)


@pytest.mark.parametrize(("output_left", "survival", "tokens"), [(100, HALVES, 4), (2, HALVES, 2), (100, (0.5,), 2)])
def test_a_lane_uses_no_more_of_a_width_than_it_can(output_left: int, survival: tuple[float, ...], tokens: int) -> None:
    row = decoder(0, survival=survival, output_left=output_left)
    lane = plan_of(view([graph(speculative_shape(1, 4), 20.0)], [row])).lanes[0]
    assert (lane.tokens, lane.expected_tokens) == (tokens, 1.0 + sum(survival[: tokens - 1]))


def test_rounds_are_queued_like_decode_and_make_each_other_redundant_by_batch_alone() -> None:
    rows = [decoder(s, survival=HALVES) for s in range(3)]
    graphs = [graph(speculative_shape(b, w), 9.0 + b) for b in (2, 4, 8) for w in (2, 4)]
    plan = plan_of(view(graphs, rows, window=(queued(speculative_shape(4, 4), 0),)))
    assert (plan.shape, plan.needs_empty_window) == (speculative_shape(4, 4), False)
    lost = {name: c.lost for (name, _), c in candidates(view(graphs, rows)).items()}
    assert lost["speculative/b8d3w4"] == "redundant: batch 4 serves the same requests"
    assert lost["speculative/b4d1w2"] == "lower value"


def test_the_fastest_expected_rate_counts_wide_rounds() -> None:
    rows = (decoder(0, survival=HALVES), decoder(1))
    graphs = [graph(decode_shape(4), 10.0), graph(speculative_shape(2, 4), 15.0), graph(mixed_shape(2, 64, width=3))]
    rates = Board.of(view(graphs, rows)).streams.rates
    assert rates == pytest.approx([1.875 / 15.0, 1 / 10.0])
    unmeasured = Board.of(view([graph(decode_shape(4))], rows))
    assert unmeasured.streams.rates.tolist() == [0.0, 0.0]


def test_an_unknown_round_takes_the_lanes_of_greatest_service() -> None:
    rows = [decoder(0, token_price=1.0, age_ms=1e6), decoder(1, token_price=5.0), decoder(2, token_price=3.0)]
    graphs = [graph(decode_shape(1), 8.0), graph(decode_shape(2))]
    plan = plan_of(view(graphs, rows))
    assert (plan.reason, [lane.slot for lane in plan.lanes]) == (Reason.DISCOVERY, [1, 2])
    assert [lane.slot for lane in plan_of(view(graphs[:1], rows)).lanes] == [0]


def test_lanes_rank_alike_at_every_horizon_where_urgencies_are_equal() -> None:
    service, age_ms = np.array([[5.0, 9.0, 7.0]]), np.array([30.0, 0.0, 10.0])
    short, long = (rank(service, np.full(3, 0.2), age_ms, horizon) for horizon in (0.0, 1e6))
    assert short.order.tolist() == long.order.tolist() == [[0, 1, 2]]
    worth = short.service[0] + short.aged[0] + short.urgency[0] * 2.0
    assert worth == pytest.approx([0.0, 11.4, 11.4 + 9.4, 11.4 + 9.4 + 9.4])


# Mixed graphs

MIXED = mixed_shape(4, 64)


def test_a_mixed_graph_serves_a_prompt_and_the_best_streams_beside_it() -> None:
    rows = [prompt(0, 64), *(decoder(s, age_ms=10.0 * s) for s in range(1, 6))]
    plan = plan_of(view([graph(MIXED, 20.0)], rows))
    assert plan.lanes == (
        LaneWork(0, 1, 0, 64, emits=True, delivers=False, expected_tokens=65.0),
        *(LaneWork(s, s + 1, 10, 1, emits=True, delivers=True, expected_tokens=1.0) for s in (3, 4, 5)),
    )
    assert plan.needs_empty_window


def test_without_a_prompt_all_rows_decode() -> None:
    rows = [prompt(0, 64, phase=Phase.SCORED_PREFILL), *(decoder(s) for s in range(1, 6))]
    assert [lane.slot for lane in plan_of(view([graph(MIXED, 20.0)], rows)).lanes] == [1, 2, 3, 4]
    assert [lane.slot for lane in plan_of(view([graph(MIXED, 20.0)], [prompt(0, 64)])).lanes] == [0]


def test_mixed_graphs_are_in_the_family_of_the_streams_and_set_their_reference() -> None:
    rows = [decoder(s) for s in range(4)]
    board = Board.of(view([graph(decode_shape(4), 40.0), graph(MIXED, 20.0)], rows))
    assert board.urgency == pytest.approx(0.1 * 4 * (20.0 / 4))


def test_the_best_prompt_that_is_not_redundant_at_a_shape_competes_there() -> None:
    """The dearer prompt is no work for the larger capacity; the longer one is."""
    rows = [prompt(0, 64, token_price=20.0), prompt(1, 128, token_price=1.0)]
    graphs = [graph(MIXED, 20.0), graph(mixed_shape(4, 128), 1.0)]
    found = candidates(view(graphs, rows))
    assert found["mixed/b4t128", (0,)].lost == "redundant: mixed/b4t64 does the same work"
    assert plan_of(view(graphs, rows)).lanes[0].slot == 1


def test_redundant_mixed_graphs_are_judged_with_the_streams_beside_the_prompt() -> None:
    rows = [prompt(0, 64), *(decoder(s) for s in range(1, 4))]
    graphs = [graph(mixed_shape(b, 64), 20.0) for b in (2, 4, 8)]
    lost = {where: c.lost for where, c in candidates(view(graphs, rows)).items()}
    assert lost["mixed/b8t64", (0, 1, 2, 3)] == "redundant: mixed/b4t64 does the same work"
    assert lost["mixed/b8t64", (1, 2, 3)] == "redundant: mixed/b4t64 does the same work"
    assert lost["mixed/b2t64", (0, 1)] == "lower value"


def test_an_unmeasured_mixed_graph_is_left_out_where_less_capacity_reaches_the_endpoint() -> None:
    rows = [prompt(0, 400, next_endpoint=60), decoder(1)]
    graphs = [graph(MIXED, 20.0), graph(mixed_shape(4, 256))]
    found = candidates(view(graphs, rows))
    assert found["mixed/b4t256", (0, 1)].lost == "unmeasured: capacity 64 reaches the same endpoint"
    # Another batch is another capacity of its own.
    other = candidates(view([graph(mixed_shape(2, 64), 20.0), graphs[1]], rows))
    assert other["mixed/b4t256", (0, 1)].lost is None


def test_several_prompts_leave_fewer_rows_to_streams() -> None:
    rows = [prompt(0, 32), prompt(1, 32), *(decoder(s, age_ms=float(s)) for s in range(2, 7))]
    plan = plan_of(view([graph(mixed_shape(4, 64, rows=2), 20.0)], rows))
    assert [(lane.slot, lane.tokens) for lane in plan.lanes] == [(0, 32), (1, 32), (5, 1), (6, 1)]


def test_wide_mixed_rows_speculate() -> None:
    rows = [prompt(0, 64), decoder(1, survival=HALVES)]
    plan = plan_of(view([graph(mixed_shape(2, 64, width=3), 20.0)], rows))
    assert [(lane.tokens, lane.expected_tokens) for lane in plan.lanes] == [(64, 65.0), (3, 1.75)]


def test_padding_counts_the_packed_extent() -> None:
    policy = msgspec.structs.replace(BALANCED, token_fairness=0.0, delivery_fairness=0.0, decode_age_price=0.0)
    rows = [prompt(0, 40, output_left=0, token_price=0.0)]
    graphs = [graph(mixed_shape(2, 64), 10.0), graph(prefill_shape(65), 10.0)]
    found = candidates(view(graphs, rows, policy=policy))
    assert (found["mixed/b2t64", (0,)].score, found["prefill/t65", (0,)].score) == (4.0, 4.0)
    # 25 positions of either do nothing: the slots are equal too, and the smaller shape by name wins.
    assert found["prefill/t65", (0,)].lost == "equal value, larger shape"


def test_a_blocked_stream_is_in_no_round() -> None:
    rows = [decoder(0), decoder(1, stages=(GraphKind.RESTORE,))]
    assert [c.slots for c in select(view([graph(decode_shape(4), 8.0)], rows), explain=True).candidates] == [(0,)]
