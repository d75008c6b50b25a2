"""Small views for tests: everything has a plain default, and a test names only what it is about."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.selection.view import GraphRow, Phase, PolicyRow, QueuedFrame, RequestRow, View

NOW_NS = 50_000_000_000
BALANCED = PolicyRow(
    output_token_value=64.0, token_fairness=16.0, delivery_fairness=4.0, decode_age_price=0.1, newcomer_share=8.0
)


def decode_shape(batch: int) -> GraphShape:
    return GraphShape(GraphKind.DECODE, batch)


def prefill_shape(tokens: int) -> GraphShape:
    return GraphShape(GraphKind.PREFILL, 1, tokens)


def scored_shape(tokens: int) -> GraphShape:
    return GraphShape(GraphKind.SCORED_PREFILL, 1, tokens)


def packed_shape(tokens: int, rows: int) -> GraphShape:
    return GraphShape(GraphKind.PREFILL, rows, tokens)


def speculative_shape(batch: int, width: int) -> GraphShape:
    return rectangular(GraphKind.SPECULATIVE, batch, width)


def mixed_shape(batch: int, tokens: int, *, rows: int = 1, width: int | None = None) -> GraphShape:
    """A mixed graph, one that keeps the draft's context if it names a width."""
    if width is None:
        return GraphShape(GraphKind.MIXED, batch, tokens, rows)
    return rectangular(GraphKind.MIXED, batch, width, tokens, rows)


def stage_shape(kind: GraphKind, batch: int) -> GraphShape:
    return GraphShape(kind, batch)


def graph(shape: GraphShape, ms: float = 0.0, *, stale: bool = False) -> GraphRow:
    """A graph that takes `ms`; 0: unknown."""
    return GraphRow(shape, round(ms * 1e6), NOW_NS - 1_000_000_000 if ms else 0, 0, stale)


def decoder(
    slot: int,
    *,
    stages: tuple[GraphKind, ...] = (),
    survival: tuple[float, ...] = (),
    scored_survival: tuple[float, ...] | None = None,
    token_price: float | None = 10.0,
    delivery_price: float | None = 20.0,
    age_ms: float = 0.0,
    last_fence: int = 0,
    output_left: int = 100,
    needs_feedback: bool = False,
) -> RequestRow:
    return RequestRow(
        slot=slot,
        generation=slot + 1,
        phase=Phase.DECODE,
        position=10,
        prompt_tokens=10,
        boundary=10,
        next_endpoint=10,
        output_left=output_left,
        token_price=token_price,
        delivery_price=delivery_price,
        age_ms=age_ms,
        last_fence=last_fence,
        needs_feedback=needs_feedback,
        stages=stages,
        survival=survival,
        scored_survival=survival if scored_survival is None else scored_survival,
    )


def prompt(
    slot: int,
    tokens: int,
    *,
    stages: tuple[GraphKind, ...] = (),
    spans: tuple[tuple[int, int], ...] = (),
    age_ms: float = 0.0,
    position: int = 0,
    boundary: int | None = None,
    next_endpoint: int | None = None,
    phase: Phase = Phase.PREFILL,
    output_left: int = 100,
    token_price: float | None = 10.0,
    last_fence: int = 0,
    needs_feedback: bool = False,
) -> RequestRow:
    return RequestRow(
        slot=slot,
        generation=slot + 1,
        phase=phase,
        position=position,
        prompt_tokens=tokens,
        boundary=tokens if boundary is None else boundary,
        next_endpoint=tokens if next_endpoint is None else next_endpoint,
        output_left=output_left,
        token_price=token_price,
        delivery_price=None,
        age_ms=age_ms,
        last_fence=last_fence,
        needs_feedback=needs_feedback,
        stages=stages,
        spans=spans,
    )


def terminal(slot: int, *, age_ms: float = 0.0, last_fence: int = 0) -> RequestRow:
    """A finished request that only its retirement is left for."""
    return msgspec.structs.replace(
        decoder(slot, age_ms=age_ms, last_fence=last_fence), phase=Phase.TERMINAL, output_left=0
    )


def queued(shape: GraphShape, *slots: int, fence: int = 1) -> QueuedFrame:
    return QueuedFrame(fence, shape, NOW_NS + 5_000_000, slots)


def view(
    graphs: Iterable[GraphRow],
    requests: Iterable[RequestRow],
    *,
    policy: PolicyRow = BALANCED,
    window: tuple[QueuedFrame, ...] = (),
    overrun: bool = False,
    log_scale: float = 0.0,
    value_scale: float = 1.0,
    queued_requests: int = 0,
    refresh_funded: bool = False,
) -> View:
    return View(
        now_ns=NOW_NS,
        planning_ns=NOW_NS,
        overrun=overrun,
        policy=policy,
        log_scale=log_scale,
        value_scale=value_scale,
        graphs=tuple(graphs),
        requests=tuple(requests),
        window=window,
        free_slots=0,
        free_pages=0,
        queued_requests=queued_requests,
        queued_tokens=0,
        refresh_funded=refresh_funded,
    )
