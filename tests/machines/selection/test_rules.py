"""The rules of selection one by one: work, dominance, exploration, discovery, holds, scale, purity."""

from __future__ import annotations

import math

import msgspec
import pytest

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.prices import MODERATE_LOG_PRICE
from flare.machines.selection.board import Board
from flare.machines.selection.decode import round_pool
from flare.machines.selection.order import standing
from flare.machines.selection.select import select
from flare.machines.selection.view import Decision, GraphRow, Hold, LaneWork, Phase, Plan, Reason, RequestRow, View
from tests.machines.build import (
    BALANCED,
    NOW_NS,
    decode_shape,
    decoder,
    graph,
    prefill_shape,
    prompt,
    queued,
    scored_shape,
    view,
)


def plan_of(taken: View) -> Plan:
    plan = select(taken).plan
    assert plan is not None
    return plan


def lost(taken: View) -> dict[str, str | None]:
    """Why each graph's candidate lost, where there is one request."""
    return {candidate.shape.name: candidate.lost for candidate in select(taken, explain=True).candidates}


# Work


def test_a_decode_plan_names_its_lanes_in_slot_order() -> None:
    rows = [decoder(3, age_ms=5.0), decoder(7, age_ms=90.0), decoder(9, age_ms=40.0)]
    plan = plan_of(view([graph(decode_shape(2), 10.0)], rows))
    assert plan.lanes == (
        LaneWork(7, 8, 10, 1, emits=True, delivers=True, expected_tokens=1.0),
        LaneWork(9, 10, 10, 1, emits=True, delivers=True, expected_tokens=1.0),
    )
    assert (plan.duration_ns, plan.observation_age_ns) == (10_000_000, 1_000_000_000)
    assert (plan.reason, plan.needs_empty_window, plan.log_scale) == (Reason.ORDINARY, False, 0.0)


@pytest.mark.parametrize(
    ("row", "lane"),
    [
        (prompt(2, 40), LaneWork(2, 3, 0, 40, emits=True, delivers=False, expected_tokens=41.0)),
        (prompt(2, 40, position=30), LaneWork(2, 3, 30, 10, emits=True, delivers=False, expected_tokens=11.0)),
        (prompt(2, 400), LaneWork(2, 3, 0, 64, emits=False, delivers=False, expected_tokens=64.0)),
        (prompt(2, 40, boundary=25), LaneWork(2, 3, 0, 25, emits=False, delivers=False, expected_tokens=25.0)),
        (prompt(2, 40, output_left=0), LaneWork(2, 3, 0, 40, emits=False, delivers=False, expected_tokens=40.0)),
    ],
)
def test_a_prompt_is_consumed_up_to_capacity_and_boundary(row: RequestRow, lane: LaneWork) -> None:
    plan = plan_of(view([graph(prefill_shape(64), 10.0)], [row]))
    assert plan.lanes == (lane,)
    assert plan.needs_empty_window


def test_a_finishing_prompt_earns_its_output_token_and_no_delivery() -> None:
    plan = plan_of(view([graph(prefill_shape(64), 16.0)], [prompt(0, 64, token_price=2.0)]))
    assert plan.score == (64 * (1 + 16 * 2.0) + (64 + 16 * 2.0)) / 16


def test_prompts_that_are_scored_have_graphs_of_their_own() -> None:
    graphs = [graph(prefill_shape(64), 1.0), graph(scored_shape(64), 90.0)]
    scored = prompt(0, 64, phase=Phase.SCORED_PREFILL)
    assert plan_of(view(graphs, [scored])).shape == scored_shape(64)
    assert plan_of(view(graphs, [prompt(0, 64)])).shape == prefill_shape(64)
    assert select(view(graphs[:1], [scored])).hold is Hold.NOTHING_READY


def test_a_decoder_that_queued_work_ends_is_no_stream() -> None:
    graphs = [graph(decode_shape(1), 8.0), graph(prefill_shape(64), 16.0)]
    ended, waiting = decoder(0, output_left=0, age_ms=1e6), prompt(1, 64)
    decision = select(view(graphs, [ended, waiting]), explain=True)
    assert [candidate.slots for candidate in decision.candidates] == [(1,)]
    assert decision.candidates[0].waiting_cost == 0.0


def test_an_unset_price_is_scaled_like_those_that_are_set() -> None:
    for row, graphs in (
        (prompt(0, 64, token_price=None), [graph(prefill_shape(64), 16.0)]),
        (decoder(0, token_price=None, delivery_price=None), [graph(decode_shape(1), 8.0)]),
    ):
        whole, half = (plan_of(view(graphs, [row], value_scale=scale)).score for scale in (1.0, 0.5))
        assert half == whole / 2


def test_the_age_of_an_observation_is_as_of_now_and_not_of_the_planning_start() -> None:
    taken = view([graph(decode_shape(1), 8.0)], [decoder(0)], window=(queued(decode_shape(1), 0),))
    later = msgspec.structs.replace(taken, planning_ns=NOW_NS + 5_000_000)
    assert plan_of(later).observation_age_ns == 1_000_000_000


def test_all_streams_pay_for_the_wait_that_a_prefill_imposes() -> None:
    graphs = [graph(prefill_shape(64), 16.0)]
    alone = plan_of(view(graphs, [prompt(9, 64)])).score
    among = plan_of(view(graphs, [decoder(0), decoder(1), prompt(9, 64)])).score
    assert among == pytest.approx(alone - 16.0 / 2 * (2 * 0.1))


def test_with_streams_waiting_a_smaller_prefill_can_win() -> None:
    graphs = [graph(prefill_shape(64), 30.0), graph(prefill_shape(512), 230.0)]
    row = prompt(9, 2_000, token_price=0.01)
    assert plan_of(view(graphs, [row])).shape == prefill_shape(512)
    assert plan_of(view([*graphs], [*(decoder(s, output_left=1) for s in range(4)), row])).shape == prefill_shape(64)


# Discovery, staleness, exploration


def test_a_lone_cold_request_tries_its_largest_useful_capacity() -> None:
    graphs = [graph(prefill_shape(t)) for t in (64, 128, 256, 512)]
    plan = plan_of(view(graphs, [prompt(0, 200)]))
    assert (plan.shape, plan.reason, plan.duration_ns) == (prefill_shape(256), Reason.DISCOVERY, 0)
    assert plan.observation_age_ns is None
    assert plan.score == 200 * (1 + 160.0) + 64 + 160.0


def test_unknown_beats_known_whatever_the_values() -> None:
    graphs = [graph(decode_shape(1), 0.001), graph(prefill_shape(64))]
    rows = [decoder(0, token_price=1e9), prompt(1, 5, token_price=0.0)]
    assert plan_of(view(graphs, rows)).shape == prefill_shape(64)


def test_among_unknown_graphs_the_greatest_service_wins() -> None:
    graphs = [graph(decode_shape(1)), graph(decode_shape(2)), graph(decode_shape(4))]
    assert plan_of(view(graphs, [decoder(s) for s in range(3)])).shape == decode_shape(4)
    assert plan_of(view(graphs, [decoder(0)])).shape == decode_shape(1)


def test_an_unmeasured_capacity_is_left_out_if_a_smaller_one_reaches_the_endpoint() -> None:
    row = prompt(0, 400, next_endpoint=60)
    graphs = [graph(prefill_shape(64), 20.0), graph(prefill_shape(512))]
    assert lost(view(graphs, [row])) == {
        "prefill/t64": None,
        "prefill/t512": "unmeasured: capacity 64 reaches the same endpoint",
    }
    measured = [graph(prefill_shape(64), 20.0), graph(prefill_shape(512), 40.0)]
    assert plan_of(view(measured, [row])).shape == prefill_shape(512)


def test_an_unmeasured_capacity_that_goes_further_to_the_endpoint_is_tried() -> None:
    graphs = [graph(prefill_shape(64), 20.0), graph(prefill_shape(512))]
    assert plan_of(view(graphs, [prompt(0, 400, next_endpoint=65)])).shape == prefill_shape(512)


def test_a_capacity_that_exploration_leaves_out_makes_nothing_redundant() -> None:
    # 128 covers the prompt but is unmeasured and left out, since 64 reaches the endpoint; 256 is measured and stays.
    graphs = [graph(prefill_shape(64), 40.0), graph(prefill_shape(128)), graph(prefill_shape(256), 41.0)]
    assert plan_of(view(graphs, [prompt(0, 100, next_endpoint=50)])).shape == prefill_shape(256)


@pytest.mark.parametrize("ms", [0.0, 50.0])
def test_redundant_padding_is_dropped_whatever_the_timings(ms: float) -> None:
    prefills = [graph(prefill_shape(64), 50.0), graph(prefill_shape(128), ms and 1.0), graph(prefill_shape(256), 0.01)]
    assert lost(view(prefills, [prompt(0, 50)])) == {
        "prefill/t64": None,
        "prefill/t128": "redundant: capacity 64 consumes the same tokens"
        if ms
        else "unmeasured: capacity 64 reaches the same endpoint",
        "prefill/t256": "redundant: capacity 64 consumes the same tokens",
    }
    decodes = [graph(decode_shape(4), 50.0), graph(decode_shape(8), 0.01), graph(decode_shape(2), 1e6)]
    taken = select(view(decodes, [decoder(s) for s in range(3)]), explain=True)
    assert {c.shape.batch: c.lost for c in taken.candidates} == {
        4: None,
        2: "lower value",
        8: "redundant: batch 4 serves the same requests",
    }


def test_a_padded_batch_competes_with_a_smaller_one_that_serves_fewer() -> None:
    rows = [decoder(s) for s in range(3)]
    slow = [graph(decode_shape(2), 10.0), graph(decode_shape(4), 16.0)]
    fast = [graph(decode_shape(2), 10.0), graph(decode_shape(4), 12.0)]
    assert plan_of(view(slow, rows)).shape == decode_shape(2)
    assert plan_of(view(fast, rows)).shape == decode_shape(4)


def test_a_stale_cost_still_ranks_and_needs_an_empty_window() -> None:
    plan = plan_of(view([graph(decode_shape(1), 8.0, stale=True)], [decoder(0)]))
    assert (plan.reason, plan.duration_ns, plan.needs_empty_window) == (Reason.ORDINARY, 8_000_000, True)


# Window and holds


FRESH = graph(decode_shape(2), 8.0)


def held(taken: View) -> tuple[Hold | None, Plan | None]:
    decision = select(taken)
    assert decision.plan is None
    return decision.hold, decision.awaited


def test_nothing_ready() -> None:
    assert select(view([FRESH], [])) == Decision(None, Hold.NOTHING_READY, None)
    assert select(view([], [decoder(0)])) == Decision(None, Hold.NOTHING_READY, None)
    assert select(view([FRESH], [decoder(0, output_left=0)])).hold is Hold.NOTHING_READY
    assert select(view([graph(prefill_shape(64))], [prompt(0, 64, position=64)])).hold is Hold.NOTHING_READY


def test_decode_is_queued_behind_decode() -> None:
    plan = plan_of(view([FRESH], [decoder(0)], window=(queued(FRESH.shape, 0),)))
    assert not plan.needs_empty_window


@pytest.mark.parametrize(
    ("graphs", "rows"),
    [
        ([graph(decode_shape(2))], [decoder(0)]),
        ([graph(decode_shape(2), 8.0, stale=True)], [decoder(0)]),
        ([FRESH], [decoder(0), decoder(1, needs_feedback=True)]),
        ([graph(prefill_shape(64), 8.0)], [prompt(0, 64)]),
        ([graph(scored_shape(64), 8.0)], [prompt(0, 64, phase=Phase.SCORED_PREFILL)]),
    ],
    ids=["unknown", "stale", "feedback", "prefill", "scored"],
)
def test_a_winner_that_needs_an_empty_window_is_awaited(graphs: list[GraphRow], rows: list[RequestRow]) -> None:
    wanted = plan_of(view(graphs, rows))
    assert wanted.needs_empty_window
    fresh = graph(decode_shape(64), 90.0)
    window = (queued(fresh.shape, 60),)
    assert held(view([*graphs, fresh], rows, window=window)) == (Hold.WAITING_FOR_DRAIN, wanted)


def test_nothing_of_lower_value_slips_in_before_the_awaited_winner() -> None:
    graphs = [graph(decode_shape(1), 50.0), graph(prefill_shape(512), 20.0)]
    rows = [decoder(0), prompt(1, 512)]
    hold, awaited = held(view(graphs, rows, window=(queued(decode_shape(1), 0),)))
    assert hold is Hold.WAITING_FOR_DRAIN
    assert awaited is not None
    assert awaited.shape == prefill_shape(512)


def test_a_row_that_needs_feedback_and_loses_does_not_hold_the_queue() -> None:
    graphs = [graph(decode_shape(1), 8.0)]
    rows = [decoder(0, age_ms=500.0), decoder(1, needs_feedback=True)]
    plan = plan_of(view(graphs, rows, window=(queued(decode_shape(1), 0),)))
    assert [lane.slot for lane in plan.lanes] == [0]


@pytest.mark.parametrize("shape", [prefill_shape(64), decode_shape(4), decode_shape(8), decode_shape(32)])
def test_nothing_is_queued_behind_a_frame_that_needs_feedback(shape: GraphShape) -> None:
    graphs = [FRESH, graph(prefill_shape(64), 9.0), graph(decode_shape(4)), graph(decode_shape(8), 9.0, stale=True)]
    hold, awaited = held(view(graphs, [decoder(0), decoder(1)], window=(queued(shape, 5),)))
    assert hold is Hold.WAITING_FOR_DRAIN
    assert awaited is not None
    assert awaited.shape == FRESH.shape


def test_an_overrun_suspends_queueing_and_makes_nothing_ineligible() -> None:
    window = (queued(FRESH.shape, 0),)
    assert held(view([FRESH], [decoder(0)], window=window, overrun=True)) == (Hold.OVERRUN, None)
    assert plan_of(view([FRESH], [decoder(0)], overrun=True)).shape == FRESH.shape


# Scale, purity, explanation


def test_a_shared_scale_changes_the_score_and_not_the_choice() -> None:
    graphs = [graph(decode_shape(1), 8.0), graph(decode_shape(4), 11.0), graph(prefill_shape(64), 30.0)]
    scale = 2.0**-40
    rows = [decoder(s, age_ms=30.0 * s) for s in range(4)]
    scaled = [decoder(s, age_ms=30.0 * s, token_price=10 * scale, delivery_price=20 * scale) for s in range(4)]
    one = plan_of(view(graphs, [*rows, prompt(9, 300)]))
    two = plan_of(view(graphs, [*scaled, prompt(9, 300, token_price=10 * scale)], log_scale=27.7, value_scale=scale))
    assert (two.shape, two.lanes, two.log_scale) == (one.shape, one.lanes, 27.7)
    assert two.score == one.score * scale


def test_values_that_vanish_beside_the_greatest_tie_at_zero() -> None:
    graphs = [graph(decode_shape(1), 8.0), graph(decode_shape(2), 16.0)]
    rows = [decoder(s, token_price=0.0, delivery_price=0.0, age_ms=100.0 * s, last_fence=10 - s) for s in range(3)]
    vanished = view(graphs, rows, log_scale=5_000.0, value_scale=0.0)
    plan = plan_of(vanished)
    # Equal at zero: shorter known time, then the least recently served.
    assert (plan.score, plan.shape, plan.lanes[0].slot) == (0.0, decode_shape(1), 2)
    urgent = decoder(5, token_price=1e60, delivery_price=0.0, last_fence=99)
    assert [lane.slot for lane in plan_of(view(graphs, [*rows, urgent], value_scale=0.0)).lanes] == [5]


def test_equal_values_prefer_more_requests_to_less_recent_ones() -> None:
    """Two output tokens worth 32 each against a chunk of 64 prompt tokens, both in 10 ms."""
    policy = msgspec.structs.replace(BALANCED, output_token_value=32.0, token_fairness=0.0, delivery_fairness=0.0)
    policy = msgspec.structs.replace(policy, decode_age_price=0.0)
    rows = [prompt(0, 500, last_fence=1), decoder(1, last_fence=8), decoder(2, last_fence=9)]
    taken = view([graph(prefill_shape(64), 10.0), graph(decode_shape(2), 10.0)], rows, policy=policy)
    assert lost(taken) == {"decode/b2": None, "prefill/t64": "equal value, serves fewer"}


def test_equal_values_prefer_smaller_padding_to_lower_slots() -> None:
    graphs = [graph(decode_shape(1), 8.0), graph(prefill_shape(64), 8.0)]
    rows = [prompt(0, 32, token_price=0.0), decoder(1, token_price=0.0, delivery_price=0.0)]
    vanished = view(graphs, rows, log_scale=5_000.0, value_scale=0.0)
    assert plan_of(vanished).shape == decode_shape(1)
    assert lost(vanished)["prefill/t64"] == "equal value, more padding"


def test_the_last_fences_of_a_cohort_are_compared_sorted() -> None:
    rows = [decoder(0, last_fence=9), decoder(1, last_fence=2), decoder(2, last_fence=5)]
    taken = view([graph(decode_shape(4), 8.0)], rows)
    pool = round_pool(Board.of(taken))
    assert pool is not None
    place = standing(pool.terms, 0, pool.option(0))
    assert (place.last_fences, place.slots, place.padding) == ((2, 5, 9), (0, 1, 2), 1)


def test_the_greatest_prices_that_a_scale_leaves_do_not_overflow() -> None:
    greatest = math.exp(MODERATE_LOG_PRICE)
    rows = [decoder(s, token_price=greatest, delivery_price=greatest, age_ms=1e9) for s in range(63)]
    graphs = [graph(decode_shape(64), 0.001), graph(prefill_shape(65_536), 0.001)]
    decision = select(view(graphs, [*rows, prompt(63, 65_536, token_price=greatest)]), explain=True)
    assert all(math.isfinite(candidate.score) for candidate in decision.candidates)


def test_the_same_view_gives_the_same_decision_and_stays_as_it_was() -> None:
    graphs = [graph(decode_shape(b), 8.0 + b) for b in (1, 2, 4)] + [graph(prefill_shape(64), 20.0)]
    taken = view(graphs, [*(decoder(s, age_ms=7.0 * s) for s in range(4)), prompt(8, 99)])
    before = msgspec.json.encode(taken)
    first = select(taken, explain=True)
    assert select(taken, explain=True) == first
    assert select(taken) == Decision(first.plan, first.hold, first.awaited)
    assert msgspec.json.encode(taken) == before


def test_every_candidate_is_explained_best_first() -> None:
    graphs = [graph(decode_shape(1), 8.0), graph(decode_shape(4), 11.0), graph(prefill_shape(64), 30.0)]
    taken = view(graphs, [decoder(0, age_ms=30.0), decoder(1), prompt(9, 300)])
    decision = select(taken, explain=True)
    plan, candidates = decision.plan, decision.candidates
    assert plan is not None
    assert len(candidates) == 3
    winner = candidates[0]
    assert (winner.shape, winner.lost, winner.score) == (plan.shape, None, plan.score)
    assert all(candidate.lost == "lower value" for candidate in candidates[1:])
    assert [c.score for c in candidates] == sorted([c.score for c in candidates], reverse=True)
    for candidate in candidates:
        rate = (candidate.service + candidate.age_term) / (candidate.duration_ns / 1e6)
        assert candidate.score == pytest.approx(rate - candidate.waiting_cost)
    assert {(c.shape.kind, c.tokens) for c in candidates} == {
        (GraphKind.DECODE, 1),
        (GraphKind.DECODE, 2),
        (GraphKind.PREFILL, 64),
    }


def test_the_words_for_each_tie() -> None:
    same = [graph(decode_shape(1), 8.0), graph(prefill_shape(64), 8.0)]
    rows = [decoder(0, token_price=0.0, delivery_price=None), prompt(1, 64, token_price=0.0, output_left=0)]
    policy = msgspec.structs.replace(view([], []).policy, decode_age_price=0.0)
    by_commit = view(same, [msgspec.structs.replace(rows[0], last_fence=4), rows[1]], policy=policy)
    assert lost(by_commit)["decode/b1"] == "equal value, its requests were served more recently"
    by_slot = view(same, rows, policy=policy)
    assert lost(by_slot)["prefill/t64"] == "equal value, higher slots"
    unknown = view([graph(decode_shape(1)), same[1]], rows, policy=policy)
    assert lost(unknown)["prefill/t64"] == "measured, while an unmeasured graph competes"


def test_observation_age_is_counted_from_now() -> None:
    row = GraphRow(decode_shape(1), 8_000_000, NOW_NS - 7, 0, stale=False)
    assert plan_of(view([row], [decoder(0)])).observation_age_ns == 7
