"""Taking a view: the snapshot of scheduling state that one decision reads.

Owns the projection of queued frames into copies of prices, ages and output left, and the decision's shared scale.
Changes nothing. Surprising rule: exponentials and powers are taken here, so that `select` needs none
(docs/scheduling.md, "Decisions that can be taken again").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from .accounting import Accounting
from .execution import Request
from .graph import Source
from .ids import RequestHandle
from .prices import log_scale_for
from .selection.view import GraphRow, Phase, PolicyRow, QueuedFrame, RequestRow, View
from .slot import FrameSlot

LogPrices: TypeAlias = tuple[float | None, float | None]

QueuedOutputs: TypeAlias = dict[RequestHandle, tuple[int, int | None]]
"""By handle: output tokens in flight, and the expected finish of the last frame that delivers to it (None: none)."""


class _Proposed(NamedTuple):
    """What a row says of one source of proposals."""

    survival: tuple[float, ...] = ()
    scored_survival: tuple[float, ...] = ()
    optimistic: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()


_NOTHING = _Proposed()


def phase_of(request: Request) -> Phase:
    """What a request that is to be served or retired needs, once its stages are done."""
    if request.terminal:
        return Phase.TERMINAL
    if not request.prefills:
        return Phase.DECODE
    return Phase.SCORED_PREFILL if request.spec.scored else Phase.PREFILL


def take_view(
    now_ns: int,
    *,
    policy: PolicyRow,
    graphs: tuple[GraphRow, ...],
    requests: Sequence[Request],
    frames: Sequence[FrameSlot],
    accounting: Accounting,
    free_slots: int,
    free_pages: int,
    queued_requests: int,
    queued_tokens: int,
    refresh_funded: bool,
    probe_funded: bool,
    device_allocates: bool,
    keeps_prefixes: bool,
    host_gap_ms: float,
) -> View:
    """The view at `now_ns` of runnable and terminal `requests`, in slot order, and of `frames`, oldest first."""
    ends = [frame.submit.expected_finish_ns for frame in frames if frame.submit is not None]
    planning_ns = max([now_ns, *ends])
    queued = queued_outputs(frames)
    projected = accounting.projected(requests, frames)
    logs = [_paid(pair, request, policy) for request, pair in zip(requests, projected, strict=True)]
    log_scale = log_scale_for([log for pair in logs for log in pair if log is not None])
    rows = []
    for request, (log_token, log_delivery) in zip(requests, logs, strict=True):
        assert request.handle is not None
        outputs, delivered_ns = queued.get(request.handle, (0, None))
        waits_from_ns = _since_ns(request, phase_of(request), delivered_ns)
        rows.append(
            _row(
                request,
                outputs,
                token_price=None if log_token is None else math.exp(log_token - log_scale),
                delivery_price=None if log_delivery is None else math.exp(log_delivery - log_scale),
                age_ms=max(0, planning_ns - waits_from_ns) / 1e6,
                hopeful=probe_funded,
            )
        )
    return View(
        now_ns=now_ns,
        planning_ns=planning_ns,
        overrun=bool(ends) and now_ns > ends[0],
        policy=policy,
        log_scale=log_scale,
        value_scale=math.exp(-log_scale),
        graphs=graphs,
        requests=tuple(rows),
        window=_window(frames),
        free_slots=free_slots,
        free_pages=free_pages,
        queued_requests=queued_requests,
        queued_tokens=queued_tokens,
        refresh_funded=refresh_funded,
        probe_funded=probe_funded,
        device_allocates=device_allocates,
        keeps_prefixes=keeps_prefixes,
        host_gap_ms=host_gap_ms if policy.host_gap_pricing else 0.0,
    )


def _row(
    request: Request,
    queued: int,
    *,
    token_price: float | None,
    delivery_price: float | None,
    age_ms: float,
    hopeful: bool,
) -> RequestRow:
    """The row of a request with so many output tokens `queued`; `hopeful`: with its optimistic estimates."""
    handle, spec, beliefs, phase = request.handle, request.spec, request.beliefs, phase_of(request)
    assert handle is not None
    hopeful = hopeful and phase is Phase.DECODE
    drafts = _proposed(request, Source.DRAFT, hopeful=hopeful)
    copies = _proposed(request, Source.COPY, hopeful=hopeful)
    return RequestRow(
        slot=handle.slot,
        generation=handle.generation,
        phase=phase,
        position=request.position,
        prompt_tokens=spec.prompt_tokens,
        boundary=request.boundary(),
        next_endpoint=request.next_endpoint(),
        output_left=max(0, spec.max_tokens - request.produced - queued),
        token_price=token_price,
        delivery_price=delivery_price,
        age_ms=age_ms,
        last_fence=request.last_fence,
        needs_feedback=spec.needs_feedback,
        stages=() if phase is Phase.TERMINAL else request.stages,
        spans=tuple([span for span in spec.spans if span[1] > request.position]) if spec.spans else (),
        survival=drafts.survival,
        scored_survival=drafts.scored_survival,
        forecast=() if beliefs is None or beliefs.forecast is None else beliefs.forecast.survival,
        copy_survival=copies.survival,
        copy_scored_survival=copies.scored_survival,
        optimistic=drafts.optimistic,
        copy_optimistic=copies.optimistic,
        weights=drafts.weights,
        copy_weights=copies.weights,
    )


def _proposed(request: Request, source: Source, *, hopeful: bool) -> _Proposed:
    """What a row says of the proposals of `source`: of those that the host copies, as many as it can supply now."""
    acceptance = None if request.beliefs is None else request.beliefs.acceptance.get(source)
    if acceptance is None:
        return _NOTHING
    count = request.offered if source is Source.COPY else None
    survival, scored = acceptance.survival[:count], acceptance.scored_survival[:count]
    if not hopeful:
        return _Proposed(survival, scored)
    weights = acceptance.weights(request.produced)
    bounds = acceptance.scored(acceptance.optimistic(weights))
    return _Proposed(survival, scored, bounds[:count], weights[:count])


def _paid(logs: LogPrices, request: Request, policy: PolicyRow) -> LogPrices:
    """The (token, delivery) log prices that the decision pays for. Any other is that of 1: it may have grown beyond all
    that has a value, and would scale it away."""
    token, delivery = logs
    if request.terminal or policy.token_fairness == 0.0:
        token = None if token is None else 0.0
    if request.terminal or policy.delivery_fairness == 0.0:
        delivery = None if delivery is None else 0.0
    return token, delivery


def _since_ns(request: Request, phase: Phase, delivered_ns: int | None) -> int:
    """When the wait began that a request's age measures; `delivered_ns`: queued work is expected to end it then."""
    match phase:
        case Phase.DECODE:
            return request.visible_at_ns if delivered_ns is None else delivered_ns
        case Phase.TERMINAL:
            return request.terminal_at_ns
        case Phase.PREFILL | Phase.SCORED_PREFILL:
            return request.arrived_at_ns


def queued_outputs(frames: Sequence[FrameSlot]) -> QueuedOutputs:
    """What `frames` in flight will bring to each request, at most: a lane that decodes, all of its targets."""
    queued: QueuedOutputs = {}
    for frame in frames:
        if frame.commit is None or frame.submit is None:
            continue
        for work in frame.commit.plan.lanes:
            handle = RequestHandle(work.slot, work.generation)
            outputs, delivered_ns = queued.get(handle, (0, None))
            finish_ns = frame.submit.expected_finish_ns if work.delivers else delivered_ns
            # A prompt lane emits one token, whatever it consumes, and counts no delivery; a decode lane its targets, of
            # which a program that shares them out has no more than its rows.
            targets = min(work.tokens, frame.commit.plan.shape.packed_targets or work.tokens)
            queued[handle] = (outputs + (targets if work.delivers else int(work.emits)), finish_ns)
    return queued


def _window(frames: Sequence[FrameSlot]) -> tuple[QueuedFrame, ...]:
    return tuple(
        QueuedFrame(
            frame.commit.fence,
            frame.commit.plan.shape,
            frame.submit.expected_finish_ns,
            tuple(work.slot for work in frame.commit.plan.lanes),
        )
        for frame in frames
        if frame.commit is not None and frame.submit is not None
    )
