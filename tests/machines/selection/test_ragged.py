"""Rounds that share target rows, rounds of copies, and acceptance probes, one rule at a time."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.allocation import allocate
from flare.machines.graph import GraphShape, Source, rectangular
from flare.machines.selection.board import Board
from flare.machines.selection.compiled import Compiled, Offer
from flare.machines.selection.ragged import Sharing
from flare.machines.selection.select import select
from flare.machines.selection.view import Candidate, GraphRow, Hold, Plan, Reason, RequestRow, View
from tests.machines.build import BALANCED, decode_shape, decoder, graph, mixed_shape, queued, speculative_shape, view
from tests.machines.oracle.rounds import packed_round

HALVES = (0.5, 0.25, 0.125)
FREE = msgspec.structs.replace(BALANCED, token_fairness=0.0, delivery_fairness=0.0, decode_age_price=0.0)


def a_view(graphs: list[GraphRow], rows: list[RequestRow], **fields: object) -> View:
    return msgspec.structs.replace(view(graphs, rows, policy=FREE), **fields)


def plan_of(taken: View) -> Plan:
    plan = select(taken).plan
    assert plan is not None
    return plan


def lanes_of(plan: Plan) -> list[tuple[int, int]]:
    return [(lane.slot, lane.tokens) for lane in plan.lanes]


def candidates(taken: View) -> dict[str, Candidate]:
    return {candidate.shape.name: candidate for candidate in select(taken, explain=True).candidates}


def copier(slot: int, copies: tuple[float, ...], survival: tuple[float, ...] = HALVES) -> RequestRow:
    row = decoder(slot, survival=survival)
    return msgspec.structs.replace(row, copy_survival=copies, copy_scored_survival=copies)


def hopeful(row: RequestRow, most: float, weight: float) -> RequestRow:
    depth = len(row.survival)
    return msgspec.structs.replace(row, optimistic=(most,) * depth, weights=(weight,) * depth)


# Offers


def test_programs_of_one_source_and_depth_are_one_offer() -> None:
    deep = GraphShape(speculative_shape(2, 3).kind, 2, width=3, draft_depth=7, packed_targets=6, drafts=True)
    copies = rectangular(speculative_shape(1, 2).kind, 2, 3, source=Source.COPY)
    shapes = [decode_shape(2), speculative_shape(2, 1), speculative_shape(2, 3), deep, copies, packed_round(4, 8, 4)]
    assert [Offer.of(shape).depth for shape in shapes] == [0, 0, 2, 2, 2, 3]
    assert Compiled.of(shapes).offers == (Offer(False, 0), Offer(False, 2), Offer(False, 3), Offer(True, 2))


def test_copied_proposals_are_worth_what_they_are_and_need_an_empty_window() -> None:
    copies = packed_round(2, 4, 8, Source.COPY)
    graphs = [graph(copies, 9.0), graph(speculative_shape(2, 4), 9.0)]
    taken = a_view(graphs, [copier(0, (0.9,)), copier(1, ())])
    plan = plan_of(taken)
    assert (plan.shape, lanes_of(plan), plan.needs_empty_window) == (speculative_shape(2, 4), [(0, 4), (1, 4)], False)
    plan = plan_of(a_view(graphs, [copier(0, (0.9, 0.9), ()), copier(1, (), ())]))
    assert (plan.shape, lanes_of(plan), plan.needs_empty_window) == (copies, [(0, 3), (1, 1)], True)
    assert [lane.expected_tokens for lane in plan.lanes] == [2.8, 1.0]
    assert plan.score == (64 * 2.8 + 64) / 9.0
    waiting = select(a_view(graphs, [copier(0, (0.9, 0.9), ())], window=(queued(speculative_shape(2, 4), 1),)))
    assert waiting.hold is Hold.WAITING_FOR_DRAIN


def test_a_frame_of_copies_does_not_close_the_window_behind_it() -> None:
    graphs = [graph(packed_round(2, 4, 8, Source.COPY), 9.0), graph(decode_shape(1), 3.0)]
    taken = a_view(graphs, [copier(1, (), ())], window=(queued(graphs[0].shape, 0),))
    assert plan_of(taken).shape == decode_shape(1)


# Shared rows


def test_a_host_fixes_the_likeliest_prefixes_and_a_program_gets_ceilings() -> None:
    rows = [decoder(0, survival=(0.9, 0.8, 0.1)), decoder(1, survival=(0.5, 0.2, 0.1)), decoder(2, survival=(0.4, 0.3))]
    rows = [msgspec.structs.replace(row, forecast=row.survival[::-1][:1] * 3) for row in rows]
    taken = a_view([graph(packed_round(3, 4, 7), 10.0)], rows)
    plan = plan_of(taken)
    assert (lanes_of(plan), plan.allocates) == ([(0, 3), (1, 2), (2, 2)], False)
    assert [lane.expected_tokens for lane in plan.lanes] == [2.7, 1.5, 1.4]
    own = msgspec.structs.replace(taken, device_allocates=True)
    plan = plan_of(own)
    assert (lanes_of(plan), plan.allocates) == ([(0, 4), (1, 4), (2, 3)], True)
    # It expects the third to be the likeliest; the others differ in slots alone.
    assert [lane.expected_tokens for lane in plan.lanes] == [1.9, 1.5, 1.7]
    found = candidates(own)["speculative/b3d3w4p7"]
    assert (found.targets, found.allocates, found.tokens) == ((2, 2, 3), True, 11)
    fixed = plan_of(msgspec.structs.replace(own, keeps_prefixes=True))
    assert (lanes_of(fixed), fixed.allocates) == ([(0, 4), (2, 3)], False)


rates = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=4)


@given(st.lists(st.tuples(rates, rates, st.integers(1, 6)), min_size=1, max_size=6), st.integers(1, 24), st.booleans())
def test_rows_go_to_whom_the_shared_rule_gives_them(
    drawn: list[tuple[list[float], list[float], int]], targets: int, device: bool
) -> None:
    shape = packed_round(len(drawn), 5, targets)
    rows = [
        msgspec.structs.replace(
            decoder(slot, survival=tuple(sorted(own, reverse=True)), output_left=left),
            forecast=tuple(sorted(joint, reverse=True)),
        )
        for slot, (own, joint, left) in enumerate(drawn)
    ]
    taken = a_view([graph(shape, 8.0)], rows, device_allocates=device)
    if not shape.ragged:
        return
    board = Board.of(taken)
    (place,) = board.compiled.shared
    share = Sharing(board).share(place)
    ceilings = [min(5, shape.packed_targets, len(row.survival) + 1, row.output_left) for row in share.members]
    joint = [row.forecast or row.survival if device else row.survival for row in share.members]
    padded = [[*one, *((0.0,) * 4)][:4] for one in joint]
    assert list(share.rows) == allocate(padded, ceilings, shape.packed_targets)


def test_whole_prefixes_of_equal_worth_go_by_number_and_then_in_serving_order() -> None:
    rows = [decoder(slot, survival=HALVES, output_left=4, last_fence=5 - slot) for slot in range(4)]
    taken = a_view([graph(packed_round(4, 4, 9), 8.0)], rows, keeps_prefixes=True)
    assert lanes_of(plan_of(taken)) == [(2, 4), (3, 4)]
    short = [msgspec.structs.replace(row, output_left=1 + row.slot) for row in rows]
    assert lanes_of(plan_of(msgspec.structs.replace(taken, requests=tuple(short)))) == [(1, 2), (2, 3), (3, 4)]
    # One row of two tokens is worth no more than two of one.
    sure = [decoder(0, survival=(1.0,)), decoder(1), decoder(2)]
    taken = a_view([graph(packed_round(2, 2, 2), 8.0)], sure, keeps_prefixes=True)
    assert lanes_of(plan_of(taken)) == [(1, 1), (2, 1)]


def test_three_orders_are_tried() -> None:
    """Full lanes first, fresh tokens first, or most for each row: each of them wins somewhere."""

    def cohort(rows: list[RequestRow], targets: int) -> list[int]:
        taken = view([graph(packed_round(2, 4, targets), 8.0)], rows)
        return [lane.slot for lane in plan_of(taken).lanes]

    long, plain = (0.9, 0.9, 0.9), decoder(0, survival=(0.1,), token_price=12.0)
    assert cohort([plain, decoder(1, survival=long), decoder(2, survival=long)], 7) == [1, 2]
    assert cohort([decoder(0, token_price=30.0), decoder(1, token_price=30.0), decoder(2, survival=long)], 2) == [0, 1]


# Redundancy


@pytest.mark.parametrize("kept", [False, True])
def test_a_program_of_more_rows_or_targets_is_dropped_where_a_smaller_one_does_the_same(kept: bool) -> None:
    rows = [decoder(slot, survival=HALVES, output_left=2) for slot in range(2)]
    shapes = [packed_round(b, 4, p) for b, p in ((2, 4), (2, 6), (4, 4), (4, 16), (2, 8))]
    taken = a_view([graph(shape, 20.0 - n) for n, shape in enumerate(shapes)], rows, keeps_prefixes=kept)
    assert plan_of(taken).shape == shapes[0]
    lost = {name: one.lost for name, one in candidates(taken).items()}
    for shape in shapes[1:]:
        assert lost[shape.name] == f"redundant: {shapes[0].name} does the same work"
    # With more to verify the larger ones do more.
    rows = [decoder(slot, survival=HALVES) for slot in range(2)]
    lost = {name: one.lost for name, one in candidates(msgspec.structs.replace(taken, requests=tuple(rows))).items()}
    assert lost["speculative/b2d3w4"] is None
    assert lost["speculative/b4d3w4"] == "redundant: speculative/b2d3w4 does the same work"
    assert lost["speculative/b2d3w4p6"] == "lower value" or kept


def test_sources_do_not_make_each_other_redundant() -> None:
    rows = [copier(0, HALVES)]
    shapes = [packed_round(2, 4, 8), packed_round(1, 4, 4, Source.COPY)]
    assert plan_of(a_view([graph(shapes[0], 5.0), graph(shapes[1], 9.0)], rows)).shape == shapes[0]


def test_ragged_programs_follow_nothing_and_mixed_ones_are_refused() -> None:
    assert len(Compiled.of([packed_round(2, 4, 5), packed_round(2, 4, 8)]).sequels.index) == 1
    mixed = msgspec.structs.replace(mixed_shape(4, 64, width=3), packed_targets=8)
    with pytest.raises(ValueError, match="a mixed program must have rows of one width"):
        Compiled.of([mixed])


def test_an_unknown_ragged_program_is_discovered_by_its_service() -> None:
    rows = [decoder(0, survival=HALVES), decoder(1, survival=(0.9, 0.9, 0.9), token_price=1e3)]
    plan = plan_of(view([graph(packed_round(2, 4, 5)), graph(decode_shape(2), 1.0)], rows))
    assert (plan.reason, lanes_of(plan)) == (Reason.DISCOVERY, [(0, 1), (1, 4)])
    board = Board.of(view([graph(packed_round(2, 4, 5), 4.0)], rows))
    assert np.allclose(board.streams.rates, [1.875 / 4.0, 3.7 / 4.0])


# Probes


def probing(graphs: list[GraphRow], rows: list[RequestRow]) -> View:
    return a_view(graphs, rows, probe_funded=True)


def test_a_funded_probe_offers_more_where_it_may_be_worth_it() -> None:
    narrow, wide = graph(decode_shape(1), 10.0), graph(speculative_shape(1, 4), 20.0)
    row = hopeful(decoder(0, survival=HALVES), 1.0, 2.0)
    assert plan_of(a_view([narrow, wide], [row])).shape == narrow.shape
    plan = plan_of(probing([narrow, wide], [row]))
    assert (plan.shape, plan.reason, plan.score) == (wide.shape, Reason.ACCEPTANCE_PROBE, 64 * 4 / 20.0)
    assert plan.lanes[0].expected_tokens == 1.875
    assert not plan.needs_empty_window
    lost = {name: one.lost for name, one in candidates(probing([narrow, wide], [row])).items()}
    assert lost["decode/b1"] == "displaced by a round that offers more proposals, to learn how many are accepted"
    for still in (
        [hopeful(row, 0.3, 2.0)],  # cannot be worth it
        [msgspec.structs.replace(row, output_left=4)],  # nothing is left to profit
    ):
        assert plan_of(probing([narrow, wide], still)).reason is Reason.ORDINARY
    kept = msgspec.structs.replace(probing([narrow, wide], [row]), keeps_prefixes=True)
    assert plan_of(kept).reason is Reason.ORDINARY
    unknown = probing([narrow, graph(speculative_shape(1, 3))], [row])
    assert plan_of(unknown).reason is Reason.DISCOVERY
    assert plan_of(probing([graph(speculative_shape(1, 4), 5.0)], [row])).reason is Reason.ORDINARY


def test_probes_of_equal_gain_go_by_information_time_and_size() -> None:
    ordinary = graph(decode_shape(1), 4.0)
    graphs = [ordinary, graph(speculative_shape(1, 2), 4.0), graph(packed_round(1, 2, 2, Source.COPY), 4.0)]
    row = hopeful(copier(0, (0.5,), (0.5,)), 1.0, 4.0)
    row = msgspec.structs.replace(row, survival=(0.0,), scored_survival=(0.0,), copy_survival=(0.0,))
    row = msgspec.structs.replace(row, copy_scored_survival=(0.0,), copy_optimistic=(1.0,), copy_weights=(3.0,))
    plan = plan_of(probing(graphs, [row]))
    assert (plan.shape.source, plan.reason) == (Source.COPY, Reason.ACCEPTANCE_PROBE)
    plan = plan_of(probing(graphs, [msgspec.structs.replace(row, copy_weights=(5.0,))]))
    assert plan.shape.source is Source.DRAFT
    twins = [ordinary, graph(speculative_shape(1, 2), 4.0), graph(speculative_shape(1, 3), 4.0)]
    deep = msgspec.structs.replace(row, survival=(0.0, 0.0), scored_survival=(0.0, 0.0), output_left=100)
    deep = msgspec.structs.replace(deep, optimistic=(1.0, 0.0), weights=(4.0, 4.0))
    assert plan_of(probing(twins, [deep])).shape == twins[1].shape


def test_the_host_gap_counts_for_what_drains_the_window() -> None:
    slow, fast = graph(decode_shape(1), 10.0), graph(packed_round(1, 2, 2, Source.COPY), 9.0)
    row = copier(0, (0.05,), ())
    assert plan_of(a_view([slow, fast], [row])).shape == fast.shape
    taken = a_view([slow, fast], [row], host_gap_ms=3.0)
    assert (plan_of(taken).shape, plan_of(taken).score) == (slow.shape, 6.4)
    found = candidates(taken)[fast.shape.name]
    assert (found.duration_ns, found.score) == (9_000_000, 64 * 1.05 / 12.0)
    careful = msgspec.structs.replace(row, needs_feedback=True)
    assert plan_of(a_view([slow], [careful], host_gap_ms=3.0)).score == 64 / 13.0
