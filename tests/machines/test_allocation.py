"""The rows of a ragged program: the given values, and against every other way to share them out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.allocation import allocate

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())["prefix_allocation"]
Joint = Sequence[Sequence[float]]


@pytest.mark.parametrize("case", range(len(VECTORS)))
def test_given_values(case: int) -> None:
    vector = VECTORS[case]
    assert allocate(vector["joint"], vector["ceilings"], vector["target_rows"]) == vector["expect_lengths"]


@st.composite
def lanes(draw: st.DrawFn) -> tuple[list[list[float]], list[int], int]:
    """Few distinct probabilities, so that many tie; rows for the pending tokens at least."""
    count = draw(st.integers(1, 4))
    levels = st.sampled_from((1.0, 0.5, 0.25, 0.0))
    joint = [sorted(draw(st.lists(levels, max_size=3)), reverse=True) for _ in range(count)]
    ceilings = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    return joint, ceilings, draw(st.integers(count, count + 10))


def every_way(joint: Joint, ceilings: Sequence[int], target_rows: int) -> list[tuple[int, ...]]:
    """All lengths that use as many rows as can be used."""
    reach = [min(ceiling, 1 + len(lane)) for lane, ceiling in zip(joint, ceilings, strict=True)]
    used = min(target_rows, sum(reach))
    return [ways for ways in itertools.product(*(range(1, most + 1) for most in reach)) if sum(ways) == used]


def worth(joint: Joint, lengths: Sequence[int]) -> float:
    return sum(sum(lane[: length - 1]) for lane, length in zip(joint, lengths, strict=True))


@given(lanes())
def test_no_other_way_brings_more_tokens(case: tuple[list[list[float]], list[int], int]) -> None:
    joint, _, _ = case
    lengths, ways = allocate(*case), every_way(*case)
    assert tuple(lengths) in ways
    assert worth(joint, lengths) == max(worth(joint, way) for way in ways)


@given(lanes())
def test_one_row_after_the_other_to_the_best_frontier(case: tuple[list[list[float]], list[int], int]) -> None:
    """The order itself: by probability, then the shorter prefix, then the earlier lane. More rows never take one away,
    and neither do probabilities beyond a ceiling."""
    joint, ceilings, target_rows = case
    lengths = [1] * len(joint)
    while sum(lengths) < target_rows:
        open_lanes = [slot for slot, length in enumerate(lengths) if length < min(ceilings[slot], 1 + len(joint[slot]))]
        if not open_lanes:
            break
        best = min(open_lanes, key=lambda slot: (-joint[slot][lengths[slot] - 1], lengths[slot], slot))
        lengths[best] += 1
    assert allocate(joint, ceilings, target_rows) == lengths
    more = allocate(joint, ceilings, target_rows + 1)
    assert all(later >= earlier for later, earlier in zip(more, lengths, strict=True))
    cut = [lane[: ceiling - 1] for lane, ceiling in zip(joint, ceilings, strict=True)]
    assert allocate(cut, ceilings, target_rows) == lengths


def test_ties_go_to_the_shorter_prefix_and_then_to_the_earlier_lane() -> None:
    assert allocate([[0.5, 0.5], [0.5, 0.5]], [3, 3], 3) == [2, 1]
    assert allocate([[0.5, 0.5], [0.5, 0.5]], [3, 3], 4) == [2, 2]
    assert allocate([[0.5, 0.5], [0.5, 0.5]], [3, 3], 5) == [3, 2]
