"""How large frames become, and that buffers take them."""

from __future__ import annotations

from flare.graphs.programs.extents import Extents, decodes, extents_of, packed_rows, prompt_lanes
from flare.machines.graph import GraphKind, GraphShape, rectangular

DECODE = GraphShape(GraphKind.DECODE, 16)
PREFILL = GraphShape(GraphKind.PREFILL, 4, 256)
SCORED = GraphShape(GraphKind.SCORED_PREFILL, 1, 64)
MIXED = GraphShape(GraphKind.MIXED, 8, 256, 2)


def test_roles_by_kind() -> None:
    assert [prompt_lanes(shape) for shape in (DECODE, PREFILL, SCORED, MIXED)] == [0, 4, 1, 2]
    assert [decodes(shape) for shape in (DECODE, PREFILL, SCORED, MIXED)] == [True, False, False, True]
    assert not decodes(GraphShape(GraphKind.SNAPSHOT, 2))
    assert prompt_lanes(GraphShape(GraphKind.SNAPSHOT, 2)) == 0


def test_a_mixed_frame_packs_a_full_prompt_and_all_other_rows() -> None:
    assert [packed_rows(shape) for shape in (DECODE, PREFILL, SCORED, MIXED)] == [16, 256, 64, 263]
    assert packed_rows(rectangular(GraphKind.MIXED, 4, 3, 128, 1)) == 128 + 3 * 3
    assert packed_rows(rectangular(GraphKind.SPECULATIVE, 4, 3)) == 12


def test_a_catalog_has_the_extents_of_its_largest_graphs() -> None:
    assert extents_of([DECODE, SCORED]) == Extents(16, 1, 64)
    assert extents_of([DECODE, PREFILL, SCORED, MIXED]) == Extents(16, 4, 263)
    assert extents_of([GraphShape(GraphKind.DECODE, 1)]) == Extents(1, 1, 1)
