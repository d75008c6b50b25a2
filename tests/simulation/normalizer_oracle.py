"""Normalizers, worked out a second time: one loop over graphs for each request.

Owns the fastest expected token service of a request (docs/scheduling.md, "Prices"). Surprising rule: it is written for
reading and uses no arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.ids import RequestHandle
from flare.machines.selection.view import GraphRow, Phase, RequestRow, View

NS_PER_MS = 1_000_000
STEPS = (GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED)
PROMPTS = {Phase.PREFILL: (GraphKind.PREFILL, GraphKind.MIXED), Phase.SCORED_PREFILL: (GraphKind.SCORED_PREFILL,)}


def reach(position: int, boundary: int, spans: Sequence[tuple[int, int]], capacity: int) -> int:
    """Prompt tokens of a chunk from `position` that may not pass `boundary` nor stop inside a span."""
    end = min(position + capacity, boundary)
    cut = [start for start, beyond in spans if start < end < beyond]
    return min([end, *cut]) - position


def round_targets(row: RequestRow, shape: GraphShape) -> int:
    """Targets of a decoding row in a program that it has for itself."""
    limits = (shape.width, shape.draft_depth + 1, len(_known(row, shape)) + 1, row.output_left)
    return min(*limits, shape.packed_targets or shape.batch)


def round_tokens(row: RequestRow, shape: GraphShape, targets: int) -> float:
    """The tokens that are expected of so many targets."""
    return 1.0 + sum(_known(row, shape)[: targets - 1])


def _known(row: RequestRow, shape: GraphShape) -> tuple[float, ...]:
    return row.copy_survival if shape.source is Source.COPY else row.survival


def _row_rate(row: RequestRow, graphs: Iterable[GraphRow]) -> float | None:
    rates = []
    for graph in graphs:
        shape = graph.shape
        units = 0.0
        if row.phase is Phase.DECODE and shape.kind in STEPS and row.output_left > 0:
            units = round_tokens(row, shape, round_targets(row, shape))
        elif shape.kind in PROMPTS.get(row.phase, ()):
            units = reach(row.position, row.boundary, row.spans, shape.prefill_tokens)
            units += units > 0 and row.output_left > 0 and row.position + units == row.prompt_tokens
        if graph.duration_ns > 0 and units > 0:
            rates.append(units * NS_PER_MS / graph.duration_ns)
    return max(rates, default=None)


def view_rates(view: View) -> dict[RequestHandle | None, float | None]:
    """Tokens/ms of every request of a view."""
    return {RequestHandle(row.slot, row.generation): _row_rate(row, view.graphs) for row in view.requests}
