"""`select` against an enumeration of every legal cohort, a thousand small views for each sort of candidate."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from flare.machines.graph import GraphShape
from flare.machines.selection.select import select
from tests.machines.oracle.agree import check, check_terms, close_to
from tests.machines.oracle.cases import SORTS, case
from tests.machines.oracle.choices import Oracle

Shapes = tuple[GraphShape, GraphShape | None]

BLOCKS, BLOCK = 4, 250
EXPLAINED = 120

WINS = {
    "decode": "decode",
    "speculative": "speculative",
    "prefill": "prefill",
    "packed": "prefill",
    "scored": "scored_prefill",
    "mixed": "mixed",
    "mixed_packed": "mixed",
    "terminal": "terminal_snapshot",
    "chains": "vision",
}
"""The kind of graph that a sort is about: it wins in some cases of every block."""


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("sort", SORTS)
def test_the_best_of_all_legal_cohorts_is_chosen(sort: str, block: int) -> None:
    won: Counter[str] = Counter()
    checked = 0
    for number in count(block, BLOCKS):
        if checked == BLOCK:
            break
        taken = case(sort, number)
        oracle = Oracle(taken, float)
        if oracle.close_packing():
            continue
        try:
            wanted = check(taken, select(taken), oracle)
        except AssertionError as error:
            raise AssertionError(f"case({sort!r}, {number}): {error}") from error
        checked += 1
        if wanted.choices:
            draft = wanted.choices[0].draft
            won[f"{draft.graph.shape.kind}" + (f" {draft.following.shape.kind}" if draft.following else "")] += 1
    stage = sort.removeprefix("pairs_")
    about = [WINS[sort]] if sort in WINS else [f"{stage} {kind}" for kind in ("decode", "prefill", "mixed")]
    assert all(won[name] >= BLOCK / 50 for name in about), won


@pytest.mark.parametrize("sort", SORTS)
def test_the_best_of_every_graph_and_pair_is_among_the_candidates(sort: str) -> None:
    """Of each shape, or pair of shapes, the best cohort that competes is explained with its score."""
    for number in range(EXPLAINED):
        taken = case(sort, number)
        oracle = Oracle(taken, float)
        if oracle.close_packing():
            continue
        explained: dict[Shapes, list[float]] = {}
        for candidate in select(taken, explain=True).candidates:
            following = candidate.following.shape if candidate.following else None
            explained.setdefault((candidate.shape, following), []).append(candidate.score)
            check_terms(candidate)
        seen: set[Shapes] = set()
        for draft in oracle.ranked:
            shapes = draft.graph.shape, draft.following.shape if draft.following else None
            if shapes in seen or oracle.barred(draft):
                continue
            seen.add(shapes)
            assert shapes in explained, (number, shapes)
            nearest = min(explained[shapes], key=lambda score: abs(score - draft.score))
            assert nearest == close_to(draft), (number, shapes)
