"""How large a frame of a prepared graph can become.

Owns the arithmetic from shapes to lanes, prompt lanes and packed token rows, by which buffers are allocated and frames
checked. Does not own what a shape may be (`flare.machines.graph`). Surprising rule: a mixed frame is largest with a
single prompt lane that fills the prompt capacity, since every other lane then decodes beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flare.machines.graph import GraphKind, GraphShape


class Extents(NamedTuple):
    """The most `lanes`, prompt lanes (`prompts`) and packed token `rows` of any frame, and the most target positions
    (`width`) of a lane."""

    lanes: int
    prompts: int
    rows: int
    width: int = 1


def prompt_lanes(shape: GraphShape) -> int:
    """How many lanes of a frame may consume a prompt."""
    match shape.kind:
        case GraphKind.PREFILL | GraphKind.SCORED_PREFILL:
            return shape.batch
        case _:
            return shape.prompt_rows


def decodes(shape: GraphShape) -> bool:
    """Whether lanes of a frame may consume their pending token."""
    return shape.kind in (GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED)


def packed_rows(shape: GraphShape) -> int:
    """The most token rows that one frame packs (docs/scheduling.md, "Graphs")."""
    match shape.kind:
        case GraphKind.MIXED:
            return shape.prefill_tokens + (shape.batch - 1) * shape.width
        case GraphKind.DECODE | GraphKind.SPECULATIVE:
            return shape.batch * shape.width
        case _:
            return shape.prefill_tokens


def extents_of(catalog: Sequence[GraphShape]) -> Extents:
    """What serves every graph of a catalog; at least one of each, so that no buffer is empty."""
    return Extents(
        max(1, *(shape.batch for shape in catalog)),
        max(1, *(prompt_lanes(shape) for shape in catalog)),
        max(1, *(packed_rows(shape) for shape in catalog)),
        max(1, *(max(shape.width, shape.draft_depth + 1) for shape in catalog)),
    )
