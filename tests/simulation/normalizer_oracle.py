"""Normalizers, worked out a second time: one loop over graphs for each request.

Owns the fastest expected token service of a request (docs/scheduling.md, "Prices"). Surprising rule: it is written for
reading and uses no arrays.
"""

from __future__ import annotations

from collections.abc import Iterable

from flare.machines.graph import GraphKind
from flare.machines.ids import RequestHandle
from flare.machines.request import RequestSpec
from flare.machines.selection.view import GraphRow, Phase, View

NS_PER_MS = 1_000_000


def prompt_rate(graphs: Iterable[GraphRow], kind: GraphKind, left: int, *, emits_at: int | None) -> float | None:
    """Tokens/ms of the best measured graph for a prompt row that may go `left` tokens on and emits after `emits_at`."""
    best = None
    for graph in graphs:
        if graph.shape.kind is kind and graph.duration_ns > 0:
            tokens = min(left, graph.shape.prefill_tokens)
            units = tokens + (tokens == emits_at)
            rate = units * NS_PER_MS / graph.duration_ns
            best = rate if best is None else max(best, rate)
    return best


def newcomer_rates(spec: RequestSpec, graphs: Iterable[GraphRow]) -> float | None:
    """Tokens/ms of a request that was admitted now."""
    kind = GraphKind.SCORED_PREFILL if spec.scored else GraphKind.PREFILL
    left = spec.system_end or spec.prompt_tokens
    return prompt_rate(graphs, kind, left, emits_at=spec.prompt_tokens if spec.max_tokens else None)


def view_rates(view: View) -> dict[RequestHandle | None, float | None]:
    """Tokens/ms of every request of a view."""
    found: dict[RequestHandle | None, float | None] = {}
    for row in view.requests:
        rate = None
        if row.phase is Phase.DECODE:
            known = [g.duration_ns for g in view.graphs if g.shape.kind is GraphKind.DECODE and g.duration_ns > 0]
            if known and row.output_left > 0:
                rate = NS_PER_MS / min(known)
        else:
            kind = GraphKind(row.phase.value)
            emits_at = row.prompt_tokens - row.position if row.output_left > 0 else None
            rate = prompt_rate(view.graphs, kind, row.boundary - row.position, emits_at=emits_at)
        found[RequestHandle(row.slot, row.generation)] = rate
    return found
