"""A scheduler with a small measured catalog, driven by hand.

Owns the shortest way to bring a scheduler into a state. Surprising rule: plans are built here and not selected, so
that a test says exactly which frame runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.machines.durations import DurationTable
from flare.machines.events import Arrive, CompleteFrame, CompletionRecord, Deliver, Effect, Published, SubmitFrame
from flare.machines.execution import Request
from flare.machines.graph import QUEUEABLE_KINDS, GraphKind, GraphShape, Source, rectangular
from flare.machines.ids import Fence, RequestHandle, RequestId
from flare.machines.pages import PagePool
from flare.machines.request import EndReason, RequestSpec
from flare.machines.scheduler import Scheduler
from flare.machines.selection.board import Board
from flare.machines.selection.view import LaneWork, Plan, PolicyRow, Reason, View
from flare.machines.waiting import WaitingQueue

MS = 1_000_000
DECODE = GraphShape(GraphKind.DECODE, 4)
SMALL_DECODE = GraphShape(GraphKind.DECODE, 1)
PREFILL = GraphShape(GraphKind.PREFILL, 1, 16)
SCORED = GraphShape(GraphKind.SCORED_PREFILL, 1, 16)
CATALOG = (SMALL_DECODE, DECODE, PREFILL, SCORED)
INITIALIZE = GraphShape(GraphKind.INITIALIZE, 2)
RESTORE = GraphShape(GraphKind.RESTORE, 2)
VISION = GraphShape(GraphKind.VISION, 2)
SNAPSHOT = GraphShape(GraphKind.SNAPSHOT, 2)
RETIRE = GraphShape(GraphKind.TERMINAL_SNAPSHOT, 2)
RESUME = GraphShape(GraphKind.RESUME, 2)
STAGED = (*CATALOG, INITIALIZE, RESTORE, VISION, SNAPSHOT, RETIRE, RESUME)
"""A catalog of all stage kinds: ended requests are retired through a snapshot."""
ROUND = rectangular(GraphKind.SPECULATIVE, 4, 4)
MIXED = GraphShape(GraphKind.MIXED, 4, 16, 2)
WIDE_MIXED = rectangular(GraphKind.MIXED, 4, 2, 16, 1)
NARROW = GraphShape(GraphKind.SPECULATIVE, 4, width=4, draft_depth=2, packed_targets=16, drafts=True)
RAGGED = GraphShape(GraphKind.SPECULATIVE, 4, width=4, draft_depth=3, packed_targets=8, drafts=True)
UPKEEP = rectangular(GraphKind.SPECULATIVE, 4, 1)
COPIES = rectangular(GraphKind.SPECULATIVE, 4, 4, source=Source.COPY)
PAIR = GraphShape(GraphKind.PREFILL, 2, 16)
COSTS_MS = {
    SMALL_DECODE: 5,
    DECODE: 10,
    PREFILL: 20,
    SCORED: 25,
    ROUND: 15,
    NARROW: 13,
    RAGGED: 14,
    UPKEEP: 11,
    COPIES: 12,
    MIXED: 30,
    WIDE_MIXED: 35,
    PAIR: 25,
    **dict.fromkeys(STAGED[len(CATALOG) :], 4),
}
TTL_NS = 1_000 * MS
ADAPTATION_MS = 100.0
SHARE = 8.0


class Rig:
    """A scheduler at `now_ns`; `known` graphs (unless given: all) are measured at its start."""

    def __init__(
        self,
        *,
        slots: int = 4,
        pages: int = 64,
        catalog: Sequence[GraphShape] = CATALOG,
        known: Sequence[GraphShape] | None = None,
        waiting: WaitingQueue | None = None,
        state_rows: int = 0,
        alpha: float = 1.0,
        device_allocates: bool = False,
        keeps_prefixes: bool = False,
        host_gap_pricing: bool = False,
    ) -> None:
        self.now_ns = 1_000 * MS
        durations = DurationTable(catalog, TTL_NS)
        for shape in catalog if known is None else known:
            durations.observe(shape, COSTS_MS[shape] * MS, self.now_ns)
        self.scheduler = Scheduler(
            catalog,
            PolicyRow(64.0, 16.0, 4.0, 0.1, SHARE, host_gap_pricing=host_gap_pricing),
            slots=slots,
            pages=PagePool(pages, 4),
            waiting=waiting or WaitingQueue(None, None),
            durations=durations,
            adaptation_ms=ADAPTATION_MS,
            state_rows=state_rows,
            adaptive_verification_alpha=alpha,
            device_allocates=device_allocates,
            keeps_prefixes=keeps_prefixes,
        )
        self.last = 0

    def arrive(self, prompt_tokens: int = 8, max_tokens: int = 8, **fields: object) -> Request:
        """A request, admitted at once if it fits."""
        self.last += 1
        values: dict[str, object] = {"client": "a", "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, **fields}
        spec = RequestSpec(**values)  # type: ignore[arg-type]
        self.scheduler.apply(Arrive(RequestId(self.last), spec), self.now_ns)
        return self.scheduler.requests[RequestId(self.last)]

    def decoding(self, count: int, max_tokens: int = 8, **fields: object) -> list[Request]:
        """Requests that have their first token, published."""
        requests = [self.arrive(8, max_tokens, **fields) for _ in range(count)]
        for request in requests:
            self.run(prefill(request, 8))
        return requests

    def commit(self, plan: Plan, view: View | None = None) -> Fence:
        """Commit a plan now; returns its fence."""
        board = Board.of(view or self.scheduler.view(self.now_ns), self.scheduler.compiled)
        effects = self.scheduler.commit(plan, board, self.now_ns)
        self.scheduler.check()
        submit = effects[-1]
        assert isinstance(submit, SubmitFrame)
        return submit.fence

    def complete(
        self,
        *records: CompletionRecord,
        after_ms: float = 0.0,
        device_ms: float | None = None,
        error: str | None = None,
        publish: bool = True,
    ) -> list[Effect]:
        """The oldest frame ends `after_ms` from now. Without `records` or `error` it did what it was to do."""
        self.now_ns += round(after_ms * MS)
        commit = self.scheduler.in_flight[0].commit
        assert commit is not None
        device_ns = commit.plan.duration_ns if device_ms is None else round(device_ms * MS)
        found = () if error else records or tuple(self.record(work) for work in commit.plan.lanes)
        effects = self.scheduler.apply(CompleteFrame(commit.fence, device_ns, found, error), self.now_ns)
        self.scheduler.check()
        for effect in effects:
            if publish and isinstance(effect, Deliver):
                self.scheduler.apply(Published(effect.request, effect.fence), self.now_ns)
        return effects

    def record(self, work: LaneWork) -> CompletionRecord:
        """What a healthy device says of a lane whose request still has its slot: rounds accept every proposal."""
        handle = RequestHandle(work.slot, work.generation)
        request = next(request for request in self.scheduler.residents if request.handle == handle)
        if request.restores_prefix and not work.tokens:
            return CompletionRecord(handle, request.spec.restored_tokens, None)
        units = work.tokens if request.produced else work.tokens + work.emits
        full = work.emits and request.committed + units == request.spec.prompt_tokens + request.spec.max_tokens
        return CompletionRecord(handle, request.committed + units, EndReason.LENGTH if full else None)

    def run(self, plan: Plan) -> list[Effect]:
        """Commit a plan and complete it after its duration."""
        self.commit(plan)
        return self.complete(after_ms=plan.duration_ns / MS)


def plan_of(shape: GraphShape, *lanes: LaneWork, duration_ms: float | None = None) -> Plan:
    """A plan as `select` would make it."""
    duration_ns = round((COSTS_MS[shape] if duration_ms is None else duration_ms) * MS)
    return Plan(shape, lanes, duration_ns, 0, 1.0, 0.0, Reason.ORDINARY, shape.kind not in QUEUEABLE_KINDS)


def prefill(request: Request, tokens: int, shape: GraphShape | None = None) -> Plan:
    """The next `tokens` prompt tokens of a request."""
    assert request.handle is not None
    spec, start = request.spec, request.consumed
    emits = start + tokens == spec.prompt_tokens and spec.max_tokens > 0
    work = LaneWork(*request.handle, start, tokens, emits, False, float(tokens + emits))
    return plan_of(shape or (SCORED if spec.scored else PREFILL), work)


def decode(*requests: Request, shape: GraphShape = DECODE) -> Plan:
    """One token for each."""
    return plan_of(shape, *(decode_lane(request) for request in requests))


def decode_lane(request: Request, targets: int = 1) -> LaneWork:
    assert request.handle is not None
    return LaneWork(*request.handle, request.spec.prompt_tokens, targets, True, True, float(targets))


def stage(shape: GraphShape, *requests: Request) -> Plan:
    """One operation for each."""
    return plan_of(shape, *(stage_lane(request) for request in requests))


def stage_lane(request: Request) -> LaneWork:
    assert request.handle is not None
    return LaneWork(*request.handle, request.position, 0, False, False, 0.0)
