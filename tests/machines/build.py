"""Small views for tests: everything has a plain default, and a test names only what it is about."""

from __future__ import annotations

from collections.abc import Iterable

from flare.machines.graph import GraphKind, GraphShape
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


def graph(shape: GraphShape, ms: float = 0.0, *, stale: bool = False) -> GraphRow:
    """A graph that takes `ms`; 0: unknown."""
    return GraphRow(shape, round(ms * 1e6), NOW_NS - 1_000_000_000 if ms else 0, 0, stale)


def decoder(
    slot: int,
    *,
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
    )


def prompt(
    slot: int,
    tokens: int,
    *,
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
        age_ms=0.0,
        last_fence=last_fence,
        needs_feedback=needs_feedback,
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
        queued_requests=0,
        queued_tokens=0,
    )
