"""The bound on the joint catalog of mixed graphs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flare.graphs.mixed_shapes import mixed_shapes
from flare.machines.graph import GraphKind, GraphShape

TEN = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
BATCHES = st.sets(st.integers(1, 64), min_size=1, max_size=8).map(sorted)
CAPACITIES = st.sets(st.integers(1, 64).map(lambda n: 64 * n), min_size=1, max_size=12).map(sorted)


def test_ordinary_execution_has_every_batch_with_every_capacity() -> None:
    shapes = mixed_shapes((2, 4), TEN)
    assert shapes == tuple(GraphShape(GraphKind.MIXED, batch, tokens, 1) for batch in (2, 4) for tokens in TEN)
    assert len(shapes) == 20


def test_speculation_adds_one_graph_for_each_wider_width_within_the_envelope() -> None:
    shapes = mixed_shapes((2, 4), TEN, width=6, envelope=6)
    assert len(shapes) == 22
    assert all(shape.drafts for shape in shapes)
    wide = [shape for shape in shapes if shape.width > 1]
    assert [(shape.batch, shape.width, shape.draft_depth, shape.packed_targets) for shape in wide] == [
        (2, 2, 1, 4),
        (2, 3, 2, 6),
    ]
    assert {shape.prefill_tokens for shape in wide} == {512}  # 512 / 64 = 4096 / 512
    assert {shape.prefill_tokens for shape in shapes if shape.width == 1} == set(TEN)


def test_the_wider_ones_take_the_smaller_of_two_capacities_as_near_to_the_middle() -> None:
    (wide,) = (shape for shape in mixed_shapes((2,), (64, 128, 256, 512), width=2, envelope=4) if shape.width > 1)
    assert wide.prefill_tokens == 128


def test_width_one_alone_still_keeps_the_drafts_context() -> None:
    assert all(shape.drafts for shape in mixed_shapes((2, 4), TEN, width=1, envelope=6))
    assert len(mixed_shapes((2, 4), TEN, width=1, envelope=6)) == 20


def test_one_row_is_left_to_decoding() -> None:
    shapes = mixed_shapes((1, 2, 3, 8), (64,), 4)
    assert [(shape.batch, shape.prompt_rows) for shape in shapes] == [(2, 1), (3, 2), (8, 4)]


@given(BATCHES, CAPACITIES, st.integers(1, 8), st.integers(0, 600))
def test_the_catalog_is_bounded(batches: list[int], capacities: list[int], width: int, envelope: int) -> None:
    shapes = mixed_shapes(batches, capacities, width=width, envelope=envelope)
    assert len(set(shapes)) == len(shapes)
    used = [batch for batch in batches if batch >= 2]
    expected = sum(len(capacities) + max(0, min(width, envelope // batch) - 1) for batch in used)
    assert len(shapes) == expected
    spread = {tokens: max(tokens / capacities[0], capacities[-1] / tokens) for tokens in capacities}
    for shape in shapes:
        if shape.width > 1:
            assert shape.batch * shape.width <= envelope
            assert spread[shape.prefill_tokens] == min(spread.values())
            assert all(
                spread[tokens] > spread[shape.prefill_tokens] for tokens in capacities if tokens < shape.prefill_tokens
            )
    ordinary = mixed_shapes(batches, capacities)
    assert len(ordinary) == len(used) * len(capacities)
    assert all(before < after for before, after in pairwise(ordinary))
