"""The catalog as arrays: groups, extents, and which shapes are larger than which."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.graph import GraphKind
from flare.machines.selection.compiled import Compiled, Larger, Offer, Shapes
from flare.machines.selection.dominance import surplus
from tests.machines.build import decode_shape, mixed_shape, packed_shape, prefill_shape, scored_shape, speculative_shape

CATALOG = (
    decode_shape(2),
    prefill_shape(64),
    mixed_shape(4, 64),
    speculative_shape(2, 3),
    scored_shape(512),
    prefill_shape(128),
    packed_shape(128, 4),
    mixed_shape(8, 64, rows=2),
    mixed_shape(4, 256),
)


def names(shapes: Shapes) -> list[str]:
    return [shape.name for shape in shapes.shapes]


def pairs(shapes: Shapes, larger: Larger) -> set[tuple[str, str]]:
    found = zip(larger.shape.tolist(), larger.than.tolist(), strict=True)
    return {(shapes.shapes[one].name, shapes.shapes[other].name) for one, other in found}


def test_a_catalog_is_grouped_by_what_its_graphs_serve() -> None:
    compiled = Compiled.of(CATALOG)
    assert names(compiled.rounds) == ["decode/b2", "mixed/b4t64", "speculative/b2d2w3", "mixed/b8t64r2", "mixed/b4t256"]
    assert compiled.rounds.index.tolist() == [0, 2, 3, 7, 8]
    assert names(compiled.prompts)[:3] == ["prefill/t64", "mixed/b4t64", "prefill/t128"]
    assert compiled.prompts.rows.tolist() == [1, 1, 1, 4, 2, 1]
    assert names(compiled.scored) == ["scored_prefill/t512"]
    assert names(compiled.kinds[GraphKind.SPECULATIVE]) == ["speculative/b2d2w3"]
    assert len(compiled.kinds[GraphKind.VISION]) == 0
    assert compiled.offers == (Offer(False, 0), Offer(False, 2))
    assert compiled.capacities.tolist()[:-1] == [64, 128, 256, 512]
    capacities = compiled.capacities[compiled.prompts.capacity_at]
    assert capacities.tolist() == compiled.prompts.prefill_tokens.tolist()


def test_larger_compares_all_extents_within_a_kind() -> None:
    prompts = Compiled.of(CATALOG).prompts
    assert pairs(prompts, prompts.larger) == {
        ("prefill/t128", "prefill/t64"),
        ("prefill/t128r4", "prefill/t64"),
        ("prefill/t128r4", "prefill/t128"),
        ("mixed/b8t64r2", "mixed/b4t64"),
        ("mixed/b4t256", "mixed/b4t64"),
    }
    assert pairs(prompts, prompts.next_larger) == pairs(prompts, prompts.larger) - {("prefill/t128r4", "prefill/t64")}
    below = [names(prompts)[place] if place >= 0 else None for place in prompts.below.tolist()]
    assert below == [None, None, "prefill/t64", None, None, "mixed/b4t64"]


def test_widths_and_upkeep_of_the_draft_are_not_compared() -> None:
    shapes = (speculative_shape(2, 1), speculative_shape(4, 2), mixed_shape(2, 64), mixed_shape(4, 64, width=1))
    assert len(Compiled.of(shapes).rounds.larger.shape) == 0


@given(
    st.sets(st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3)), max_size=12),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
)
def test_the_next_larger_pairs_find_what_all_pairs_find(
    extents: set[tuple[int, int, int]], needed: tuple[int, int, int]
) -> None:
    group = Compiled.of([mixed_shape(b, 64 * t, rows=r) for b, t, r in sorted(extents) if r < b]).prompts
    batch, tokens, rows = needed
    enough = (group.batch >= batch) & (group.prefill_tokens >= 64 * tokens) & (group.rows >= rows)
    found, shortcut = (surplus(len(group), pairs, enough[pairs.than]) for pairs in (group.larger, group.next_larger))
    assert np.array_equal(found, shortcut)
    smaller = [
        any(
            enough[two]
            and other != one
            and other.batch <= one.batch
            and other.prefill_tokens <= one.prefill_tokens
            and other.prompt_rows <= one.prompt_rows
            for two, other in enumerate(group.shapes)
        )
        for one in group.shapes
    ]
    assert found.tolist() == smaller
