"""Prompt rows: spans, several in one graph, waiting for a first output."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.graph import GraphKind
from flare.machines.selection.board import Board
from flare.machines.selection.prompt import chunk
from flare.machines.selection.select import select
from flare.machines.selection.view import Candidate, LaneWork, Phase, Plan, RequestRow, View
from tests.machines.build import (
    BALANCED,
    decode_shape,
    decoder,
    graph,
    packed_shape,
    prefill_shape,
    prompt,
    scored_shape,
    terminal,
    view,
)

WAITING = msgspec.structs.replace(BALANCED, token_fairness=0.0, first_output_age_price=0.5)


def plan_of(taken: View) -> Plan:
    plan = select(taken).plan
    assert plan is not None
    return plan


def candidates(taken: View) -> dict[tuple[str, tuple[int, ...]], Candidate]:
    return {(c.shape.name, c.slots): c for c in select(taken, explain=True).candidates}


# Spans


@pytest.mark.parametrize(
    ("capacity", "tokens"), [(5, 5), (10, 10), (11, 10), (19, 10), (20, 20), (29, 20), (30, 30), (39, 39), (99, 40)]
)
def test_a_chunk_ends_before_a_span_that_it_would_split(capacity: int, tokens: int) -> None:
    assert chunk(prompt(0, 40, spans=((10, 20), (20, 30))), capacity) == tokens


@st.composite
def spanned(draw: st.DrawFn) -> RequestRow:
    ends = draw(st.lists(st.integers(0, 60), unique=True, max_size=8).map(sorted))
    position = draw(st.integers(0, 59))
    spans = tuple([(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if a >= position])
    return prompt(0, 60, position=position, boundary=draw(st.integers(position + 1, 60)), spans=spans)


@given(spanned(), st.integers(1, 70))
def test_a_chunk_is_the_longest_that_splits_nothing(row: RequestRow, capacity: int) -> None:
    ends = range(row.position, min(row.position + capacity, row.boundary) + 1)
    whole = [end for end in ends if not any(start < end < stop for start, stop in row.spans)]
    assert chunk(row, capacity) == whole[-1] - row.position


def test_a_capacity_that_holds_less_than_a_span_cannot_serve_the_row() -> None:
    graphs = [graph(prefill_shape(64), 5.0), graph(prefill_shape(128), 50.0)]
    taken = view(graphs, [prompt(0, 200, spans=((0, 100),))])
    assert set(candidates(taken)) == {("prefill/t128", (0,))}
    assert plan_of(taken).lanes[0].tokens == 128
    assert select(view(graphs[:1], [prompt(0, 200, spans=((0, 100),))])).plan is None


# Several rows in one graph


def test_packed_rows_take_all_they_can_reach_in_order_of_value_per_token() -> None:
    rows = [
        prompt(0, 100, token_price=1.0),
        prompt(1, 30, token_price=3.0),
        prompt(2, 200, boundary=20, token_price=2.0),
        prompt(3, 50, token_price=0.5),
    ]
    plan = plan_of(view([graph(packed_shape(128, 3), 40.0)], rows))
    assert plan.lanes == (
        LaneWork(0, 1, 0, 78, emits=False, delivers=False, expected_tokens=78.0),
        LaneWork(1, 2, 0, 30, emits=True, delivers=False, expected_tokens=31.0),
        LaneWork(2, 3, 0, 20, emits=False, delivers=False, expected_tokens=20.0),
    )
    assert plan.score == pytest.approx((78 * 17 + 30 * 49 + 20 * 33 + 64 + 48) / 40.0)


def test_every_prefix_and_every_single_row_competes() -> None:
    rows = [prompt(s, 40, token_price=9.0 - s) for s in range(3)]
    taken = view([graph(packed_shape(128, 4), 40.0), graph(packed_shape(64, 2), 10.0)], rows)
    assert set(candidates(taken)) == {
        ("prefill/t128r4", (0,)),
        ("prefill/t128r4", (1,)),
        ("prefill/t128r4", (2,)),
        ("prefill/t128r4", (0, 1)),
        ("prefill/t128r4", (0, 1, 2)),
        ("prefill/t64r2", (0,)),
        ("prefill/t64r2", (1,)),
        ("prefill/t64r2", (2,)),
        ("prefill/t64r2", (0, 1)),
    }
    # Row 1 gets 24 tokens in the smaller graph and 40 in the larger: not the same work, so neither is redundant.
    losses = {where: c.lost for where, c in candidates(taken).items()}
    assert losses["prefill/t128r4", (0,)] == "redundant: capacity 64 consumes the same tokens"
    assert losses["prefill/t128r4", (0, 1)] == "lower value"


def test_a_row_that_gets_nothing_of_what_is_left_ends_the_packing() -> None:
    rows = [prompt(0, 50, token_price=9.0), prompt(1, 60, token_price=5.0, spans=((0, 60),))]
    rows.append(prompt(2, 10, token_price=1.0))
    taken = view([graph(packed_shape(64, 3), 10.0)], rows)
    assert [slots for _, slots in candidates(taken)] == [(0,), (1,), (2,)]


def test_unmeasured_packing_is_left_out_if_less_capacity_reaches_each_endpoint() -> None:
    rows = [prompt(0, 40, token_price=9.0), prompt(1, 200, next_endpoint=20, token_price=1.0)]
    graphs = [graph(packed_shape(64, 2), 20.0), graph(packed_shape(128, 2))]
    found = candidates(view(graphs, rows))
    assert found["prefill/t128r2", (0, 1)].lost == "unmeasured: capacity 64 reaches the same endpoint"
    further = msgspec.structs.replace(rows[1], next_endpoint=25)
    assert plan_of(view(graphs, [rows[0], further])).shape == packed_shape(128, 2)


def test_rows_behind_stages_are_not_packed() -> None:
    rows = [prompt(0, 40), prompt(1, 40, stages=(GraphKind.VISION,)), prompt(2, 40, phase=Phase.SCORED_PREFILL)]
    assert {slots for _, slots in candidates(view([graph(packed_shape(128, 4), 10.0)], rows))} == {(0,)}


# Waiting for a first output


def test_a_chunk_earns_its_part_of_the_wait_that_it_ends() -> None:
    row = prompt(0, 150, position=50, age_ms=30.0, output_left=0)
    taken = msgspec.structs.replace(view([graph(prefill_shape(64), 16.0)], [row], policy=WAITING), queued_requests=3)
    found = candidates(taken)["prefill/t64", (0,)]
    # Four wait; 100 tokens remain, at 64/16 per ms; 64 of them are consumed.
    sigma_ms = 4 * 100 / (64 / 16.0)
    assert found.age_term == pytest.approx(64 / 100 * 0.5 * sigma_ms * (30.0 + 16.0))
    assert found.waiting_cost == pytest.approx(16.0 / 2 * 0.5 * 4)
    assert found.score == pytest.approx((64 + found.age_term) / 16.0 - found.waiting_cost)


def test_all_that_wait_raise_the_cost_of_every_candidate() -> None:
    rows = [
        decoder(0),
        decoder(1, stages=(GraphKind.RESTORE,)),
        decoder(2, output_left=0),
        terminal(3),
        prompt(4, 64),
        prompt(5, 64, stages=(GraphKind.VISION,)),
        prompt(6, 64, phase=Phase.SCORED_PREFILL),
    ]
    taken = msgspec.structs.replace(view([graph(decode_shape(1), 8.0)], rows, policy=WAITING), queued_requests=2)
    price = 2 * WAITING.decode_age_price + WAITING.terminal_age_price + 5 * WAITING.first_output_age_price
    assert Board.of(taken).waiting_price == pytest.approx(price)
    assert Board.of(taken).age_bearing == 3
    assert candidates(taken)["decode/b1", (0,)].waiting_cost == pytest.approx(4.0 * price)


def test_older_prompts_go_first_and_an_unmeasured_rate_leaves_the_wait_out() -> None:
    rows = [prompt(0, 200, age_ms=10.0), prompt(1, 200, age_ms=20.0, last_fence=9)]
    known = [graph(prefill_shape(64), 16.0)]
    assert plan_of(view(known, rows, policy=WAITING)).lanes[0].slot == 1
    assert plan_of(view([graph(prefill_shape(64))], rows, policy=WAITING)).lanes[0].slot == 0
    scored = [msgspec.structs.replace(row, phase=Phase.SCORED_PREFILL) for row in rows]
    board = Board.of(view([*known, graph(scored_shape(64))], [*rows, *scored], policy=WAITING))
    assert board.prompts.urgency == pytest.approx(0.5 * 4 / (64 / 16.0))
    assert board.scored.urgency == 0.0


def test_a_catalog_of_another_size_is_refused() -> None:
    other = Board.of(view([], [])).compiled
    with pytest.raises(ValueError, match="a catalog of 0 graphs for a view of 1"):
        Board.of(view([graph(decode_shape(1), 8.0)], []), other)
