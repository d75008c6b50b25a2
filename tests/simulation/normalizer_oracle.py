"""Normalizers, worked out a second time: one loop over graphs for each request.

Owns the fastest expected token service of a request (docs/scheduling.md, "Prices"). Surprising rule: it is written for
reading and uses no arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flare.machines.graph import GraphKind
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


def round_tokens(row: RequestRow, width: int) -> tuple[int, float]:
    """Targets of a decoding row in a graph of this width, and the tokens that are expected of them."""
    targets = min(width, len(row.survival) + 1, row.output_left)
    return targets, 1.0 + sum(row.survival[: targets - 1])


def _row_rate(row: RequestRow, graphs: Iterable[GraphRow]) -> float | None:
    rates = []
    for graph in graphs:
        shape = graph.shape
        units = 0.0
        if row.phase is Phase.DECODE and shape.kind in STEPS and row.output_left > 0:
            units = round_tokens(row, shape.width)[1]
        elif shape.kind in PROMPTS.get(row.phase, ()):
            units = reach(row.position, row.boundary, row.spans, shape.prefill_tokens)
            units += units > 0 and row.output_left > 0 and row.position + units == row.prompt_tokens
        if graph.duration_ns > 0 and units > 0:
            rates.append(units * NS_PER_MS / graph.duration_ns)
    return max(rates, default=None)


def view_rates(view: View) -> dict[RequestHandle | None, float | None]:
    """Tokens/ms of every request of a view."""
    return {RequestHandle(row.slot, row.generation): _row_rate(row, view.graphs) for row in view.requests}
