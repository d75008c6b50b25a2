"""A prerequisite and the graph that it enables: the reference numbers, who takes which row, and the bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flare.machines.graph import GraphKind
from flare.machines.selection.blocked import Blocked
from flare.machines.selection.board import Board
from flare.machines.selection.bounds import Bounds
from flare.machines.selection.cohort import Ranking, rank
from flare.machines.selection.pairs import pair_pool
from flare.machines.selection.select import select
from flare.machines.selection.sequence import Lines, sequence_score, splits
from flare.machines.selection.view import LaneWork, Phase, Plan, Reason, RequestRow, View
from tests.machines.build import (
    decode_shape,
    decoder,
    graph,
    mixed_shape,
    prefill_shape,
    prompt,
    scored_shape,
    stage_shape,
    terminal,
    view,
)
from tests.machines.oracle.cases import case

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "vectors.json").read_text())
INITIALIZE, RESTORE, VISION = GraphKind.INITIALIZE, GraphKind.RESTORE, GraphKind.VISION
SNAPSHOT, RESUME = GraphKind.SNAPSHOT, GraphKind.RESUME


def plan_of(taken: View) -> Plan:
    plan = select(taken).plan
    assert plan is not None
    return plan


def slots(lanes: tuple[LaneWork, ...]) -> list[int]:
    return [lane.slot for lane in lanes]


def stage_lane(row: RequestRow) -> LaneWork:
    return LaneWork(row.slot, row.generation, row.position, 0, emits=False, delivers=False, expected_tokens=0.0)


# The arithmetic


def _ranked(rows: list[dict[str, float]], worth: str, until_ms: float) -> Ranking:
    return rank(
        np.array([[row[worth] for row in rows]]),
        np.array([row["c"] * row["sigma"] for row in rows]),
        np.array([row["age"] for row in rows]),
        until_ms,
    )


@pytest.mark.parametrize("given", VECTORS["two_stage"])
def test_two_graphs_split_their_lanes_as_the_reference(given: dict[str, Any]) -> None:
    groups = {name: list(given[name].values()) for name in ("newly_ready", "ready", "terminal")}
    names = {name: list(given[name]) for name in groups}
    horizon_ms = given["first_ms"] + given["following_ms"]
    newly, ready = (_ranked(groups[name], "service", horizon_ms) for name in ("newly_ready", "ready"))
    terminals = _ranked(groups["terminal"], "value", given["first_ms"])
    waiting_price = sum(row["c"] for rows in groups.values() for row in rows)
    found = splits(
        Lines.of(newly),
        Lines.of(ready),
        Lines.of(terminals),
        least=1,
        first_rooms=given["first_batch"],
        following_rooms=given["following_batch"],
        first_ms=given["first_ms"],
        horizon_ms=horizon_ms,
        terminal_age_price=groups["terminal"][0]["c"] if groups["terminal"] else 0.0,
    )
    best = max(found, key=lambda split: split.value)
    assert sequence_score(best.value, horizon_ms, waiting_price, 0.0) == pytest.approx(given["expect_score"], rel=1e-12)

    def chosen(name: str, ranking: Ranking, count: int) -> list[str]:
        return sorted(names[name][place] for place in ranking.order[0, :count])

    assert chosen("newly_ready", newly, best.newly) == given["expect_following_newly"]
    assert chosen("ready", ready, best.ready) == given["expect_following_ready"]
    assert chosen("terminal", terminals, best.retired) == given["expect_first_terminal"]
    room = given["first_batch"] - best.retired
    assert min(room, len(names["newly_ready"])) == given["expect_first_newly_count"]


def test_the_score_is_that_of_the_sequence_and_the_plan_that_of_its_first_graph() -> None:
    blocked, ready = decoder(1, stages=(RESUME,), age_ms=40.0), decoder(0)
    plan = plan_of(view([graph(stage_shape(RESUME, 1), 4.0), graph(decode_shape(2), 8.0)], [ready, blocked]))
    assert (plan.shape, plan.duration_ns, plan.reason) == (stage_shape(RESUME, 1), 4_000_000, Reason.ORDINARY)
    assert plan.lanes == (stage_lane(blocked),)
    assert plan.needs_empty_window
    assert plan.following is not None
    assert (plan.following.shape, plan.following.duration_ns) == (decode_shape(2), 8_000_000)
    assert slots(plan.following.lanes) == [0, 1]
    assert all(lane.emits and lane.delivers and lane.tokens == 1 for lane in plan.following.lanes)
    # One ready stream among two: 2 * 8/1; the blocked one needs its stage and a round of two rows: 2 * (4 + 8).
    service = 2 * (64 + 16 * 10 + 4 * 20)
    age = 0.1 * 16 * 12 + 0.1 * 24 * (40 + 12)
    assert plan.score == pytest.approx((service + age) / 12 - 12 / 2 * 0.2, rel=1e-12)


@pytest.mark.parametrize(("snapshot_ms", "first"), [(1.0, "snapshot/b1"), (60.0, "decode/b1")])
def test_a_shared_round_is_worth_a_snapshot_only_if_that_is_cheap(snapshot_ms: float, first: str) -> None:
    graphs = [graph(stage_shape(SNAPSHOT, 1), snapshot_ms), graph(decode_shape(1), 8.0), graph(decode_shape(2), 9.0)]
    rows = [decoder(0), decoder(1, stages=(SNAPSHOT,))]
    assert plan_of(view(graphs, rows)).shape.name == first


# Rows of the first graph


def test_rows_left_go_to_what_is_ready_next_then_to_others_and_last_to_longer_ways() -> None:
    graphs = [graph(decode_shape(1), 8.0), graph(prefill_shape(64), 900.0)]
    rows = [
        decoder(0, stages=(RESUME,), token_price=5.0),
        decoder(1, stages=(RESUME,), token_price=30.0),
        decoder(2, stages=(RESUME,), token_price=7.0),
        prompt(3, 64, stages=(RESUME,), token_price=0.0, last_fence=4),
        prompt(4, 64, stages=(RESUME,), token_price=0.0, last_fence=1),
        prompt(5, 64, stages=(RESUME, VISION), token_price=0.0),
        prompt(6, 64, stages=(RESUME, VISION), token_price=1.0),
    ]
    for batch, expected in ((1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 4]), (6, [0, 1, 2, 3, 4, 6])):
        stages = [graph(stage_shape(RESUME, batch), 2.0), graph(stage_shape(VISION, 1), 500.0)]
        plan = plan_of(view([*graphs, *stages], rows))
        assert plan.following is not None
        assert slots(plan.following.lanes) == [1]
        assert slots(plan.lanes) == expected


def test_finished_requests_retire_in_the_rows_that_are_left_and_count_in_the_score() -> None:
    graphs = [graph(stage_shape(SNAPSHOT, 2), 4.0), graph(decode_shape(1), 12.0)]
    stream = decoder(0, stages=(SNAPSHOT,), token_price=200.0)
    plan = plan_of(view(graphs, [stream, terminal(1, age_ms=3.0), terminal(2, age_ms=9.0)]))
    assert slots(plan.lanes) == [0, 2]
    # Three wait: sigma 3 * (4 + 12) for the stream, 3 * 4/2 for those that ended.
    lane = 64 + 16 * 200 + 4 * 20 + 0.1 * 48 * 16
    ended = 256 + 1 * 6 * (9 + 4) + (16**2 - 4**2) / 2
    assert plan.score == pytest.approx((lane + ended) / 16 - 16 / 2 * (0.1 + 1 + 1), rel=1e-12)


def test_a_first_graph_with_more_rows_than_there_is_work_for_is_none() -> None:
    graphs = [graph(stage_shape(RESTORE, b), ms) for b, ms in ((1, 9.0), (2, 5.0), (4, 1.0))]
    rows = [prompt(0, 64, stages=(RESTORE,)), prompt(1, 64, stages=(RESTORE,))]
    taken = view([*graphs, graph(prefill_shape(64), 20.0)], rows)
    assert plan_of(taken).shape == stage_shape(RESTORE, 2)
    assert stage_shape(RESTORE, 4) not in {one.shape for one in select(taken, explain=True).candidates}


def test_a_following_graph_with_more_rows_than_its_lanes_is_none() -> None:
    graphs = [graph(stage_shape(RESUME, 1), 2.0), graph(decode_shape(2), 9.0), graph(decode_shape(4), 1.0)]
    plan = plan_of(view(graphs, [decoder(0), decoder(1, stages=(RESUME,))]))
    assert plan.following is not None
    assert plan.following.shape == decode_shape(2)


# Prompts


@pytest.mark.parametrize(
    ("rows", "following", "first"),
    [
        ([decoder(0), decoder(1, stages=(RESTORE,))], [0, 1], [1]),
        ([decoder(0), decoder(1, stages=(RESTORE,), token_price=99.0), prompt(2, 64)], [0, 1, 2], [1]),
        ([decoder(0), decoder(1, stages=(RESTORE,)), prompt(2, 64, stages=(RESTORE,))], [0, 1, 2], [1, 2]),
        ([decoder(0), prompt(2, 64, stages=(RESTORE,))], [0, 2], [2]),
    ],
    ids=["absent", "ready", "enabled", "enabled alone"],
)
def test_the_prompt_of_a_mixed_graph_is_absent_ready_or_enabled(
    rows: list[RequestRow], following: list[int], first: list[int]
) -> None:
    graphs = [graph(stage_shape(RESTORE, 2), 1.0), graph(mixed_shape(4, 64), 10.0)]
    plan = plan_of(view(graphs, rows))
    assert plan.following is not None
    assert (slots(plan.lanes), slots(plan.following.lanes)) == (first, following)
    assert [lane.tokens for lane in plan.following.lanes if lane.slot == 2] == [64] * (2 in following)


def test_scored_prompts_are_followed_by_their_own_graphs() -> None:
    graphs = [graph(stage_shape(INITIALIZE, 1), 1.0), graph(prefill_shape(64), 1.0), graph(scored_shape(64), 50.0)]
    plan = plan_of(view(graphs, [prompt(0, 64, phase=Phase.SCORED_PREFILL, stages=(INITIALIZE,))]))
    assert plan.following is not None
    assert plan.following.shape == scored_shape(64)


# Unknown durations


@pytest.mark.parametrize(
    ("stage_ms", "prefill_ms", "reason"),
    [(0.0, 20.0, Reason.DISCOVERY), (0.0, 0.0, Reason.DISCOVERY), (2.0, 0.0, Reason.ORDINARY)],
)
def test_an_unknown_pair_is_worth_its_service_and_discovers_only_by_its_first_graph(
    stage_ms: float, prefill_ms: float, reason: Reason
) -> None:
    graphs = [graph(stage_shape(VISION, 1), stage_ms), graph(prefill_shape(64), prefill_ms)]
    plan = plan_of(view([*graphs, graph(decode_shape(1), 0.001)], [decoder(0), prompt(1, 64, stages=(VISION,))]))
    assert plan.shape == stage_shape(VISION, 1)
    assert plan.reason is reason
    assert plan.score == 64 * (1 + 160.0) + 64 + 160.0


# The bounds


@pytest.mark.parametrize("kind", [INITIALIZE, RESTORE, VISION, SNAPSHOT, RESUME])
def test_no_pair_is_worth_more_than_its_bound(kind: GraphKind) -> None:
    seen = 0
    for number in range(300):
        blocked = Blocked.of(Board.of(case(f"pairs_{kind}", number)))
        pool = None if blocked is None else pair_pool(blocked, every=True)
        if blocked is None or pool is None:
            continue
        pairs = [Bounds.of(blocked, aged=aged, fastest=False, only=None) for aged in (True, False)]
        for choice in pool.choices:
            bounds = pairs[0 if choice.horizon_ms else 1]
            assert bounds is not None
            place = [graph for _, graph in bounds.firsts].index(choice.first)
            bound = bounds.bound[place, choice.sequel - bounds.start]
            slack = 1e-12 * (abs(bound) + 2.0 * bounds.cost_max)
            assert choice.score <= bound + slack, number
            seen += 1
    assert seen > 1_000


@pytest.mark.parametrize("kind", [INITIALIZE, RESTORE, VISION, SNAPSHOT, RESUME])
def test_the_terms_of_a_pair_make_up_its_score(kind: GraphKind) -> None:
    for number in range(100):
        for one in select(case(f"pairs_{kind}", number), explain=True).candidates:
            if one.following is None:
                continue
            whole_ms = (one.duration_ns + one.following.duration_ns) / 1e6
            if not (one.duration_ns and one.following.duration_ns):
                assert one.score == pytest.approx(one.service, rel=1e-12)
                assert one.age_term == 0.0
                continue
            gain = (one.service + one.age_term) / whole_ms
            near = 1e-12 * (gain + one.waiting_cost + one.gap_cost)
            assert one.score == pytest.approx(gain - one.waiting_cost - one.gap_cost, rel=1e-9, abs=near)
