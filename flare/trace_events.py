"""The events of the trace: what the scheduler reports of itself.

Owns the records and their JSON form (docs/observability.md, "Trace"). Does not own where they are written. Surprising
rule: every line begins with its `event` name, so that a reader finds the lines that it wants without parsing the rest.

Instants (`at_ns`) are of the process's monotonic clock; the first line of a trace, `trace.opened`, relates it to the
wall clock.
"""

from __future__ import annotations

import msgspec

from flare.machines.events import SubmitFrame
from flare.machines.ids import Fence, RequestHandle, RequestId
from flare.machines.selection.reference import UNMEASURED
from flare.machines.selection.view import LaneWork, Phase, Reason, View
from flare.machines.slot import Participant


class TraceOpened(msgspec.Struct, frozen=True, tag_field="event", tag="trace.opened"):
    """The first line: one instant on the monotonic clock (`at_ns`) and on the wall clock (since 1970), both ns."""

    at_ns: int
    wall_ns: int


class TraceDropped(msgspec.Struct, frozen=True, tag_field="event", tag="trace.dropped"):
    """`events` events were lost before this line, because the disk was slower than the scheduler."""

    events: int


class RequestTransition(msgspec.Struct, frozen=True, tag_field="event", tag="request.transition"):
    """A request moved. `handle` is None while it has no slot. `cause` names the machine's event."""

    at_ns: int
    request: RequestId
    handle: RequestHandle | None
    before: str
    after: str
    cause: str


class SlotTransition(msgspec.Struct, frozen=True, tag_field="event", tag="slot.transition"):
    """Frame slot `frame_slot` moved; `fence` is the frame that it holds or held, 0 if none yet."""

    at_ns: int
    frame_slot: int
    fence: Fence
    before: str
    after: str
    cause: str


class WindowTransition(msgspec.Struct, frozen=True, tag_field="event", tag="window.transition"):
    """The image windows of a request moved."""

    at_ns: int
    request: RequestId
    before: str
    after: str
    cause: str


class LedgerTransition(msgspec.Struct, frozen=True, tag_field="event", tag="ledger.transition"):
    """A ledger of exploration credit moved; `credit_ns` is the execution that it pays for now (negative: owed)."""

    at_ns: int
    ledger: str
    before: str
    after: str
    cause: str
    credit_ns: int


class LaneEntry(msgspec.Struct, frozen=True):
    """One request of a committed plan: `tokens` positions from `start`."""

    slot: int
    generation: int
    start: int
    tokens: int


class PriceEntry(msgspec.Struct, frozen=True):
    """Normalized service prices of a request, scaled as scores are: 1 is full speed, 10 a tenth of it; None: not yet
    set, or nothing measured."""

    token: float | None
    delivery: float | None


class PlanCommitted(msgspec.Struct, frozen=True, tag_field="event", tag="plan.committed"):
    """A plan was chosen and committed as frame `fence`; `n` counts plans from 1.

    `logical_tokens` is the work of all lanes. `duration_ns` 0: unknown (then `observation_age_ns` is None). `score` is
    the scaled selection value rate (value/ms × exp(−log_scale)). `exploration_credit` is in ns of execution
    (negative: owed).
    `frames_ahead` counts the frames in flight that it is queued behind. `ages_ms` has the projected output age of each
    decoding slot, `prices` the projected prices of each slot beside the best that the catalog could do for it.
    `view` is there with --trace-views alone.
    """

    at_ns: int
    n: int
    fence: Fence
    shape: str
    lanes: tuple[LaneEntry, ...]
    logical_tokens: int
    duration_ns: int
    observation_age_ns: int | None
    score: float
    log_scale: float
    reason: Reason
    queued_requests: int
    queued_tokens: int
    frames_ahead: int
    ages_ms: dict[int, float]
    prices: dict[int, PriceEntry]
    exploration_credit: int = 0
    view: View | msgspec.UnsetType = msgspec.UNSET


class FrameCompleted(msgspec.Struct, frozen=True, tag_field="event", tag="frame.completed"):
    """A frame ended. `device_ns` is the program's own time (0: not measured), `wall_ns` from dispatch to observed
    completion. `committed` counts prompt and output tokens together. `error` None means success."""

    at_ns: int
    fence: Fence
    shape: str
    device_ns: int
    wall_ns: int
    committed: int
    error: str | None


TraceEvent = (
    TraceOpened
    | TraceDropped
    | RequestTransition
    | SlotTransition
    | WindowTransition
    | LedgerTransition
    | PlanCommitted
    | FrameCompleted
)


def lane_entries(lanes: tuple[LaneWork, ...]) -> tuple[LaneEntry, ...]:
    """The logged part of a plan's lanes."""
    return tuple(LaneEntry(lane.slot, lane.generation, lane.start, lane.tokens) for lane in lanes)


def _prices(participants: tuple[Participant, ...], view: View) -> dict[int, PriceEntry]:
    """Each slot's prices beside the normalizers that the commit froze."""
    normalizers = {participant.handle.slot: participant.normalizer for participant in participants}
    found = {}
    for row in view.requests:
        rate, sigma_ms = normalizers.get(row.slot, UNMEASURED)
        found[row.slot] = PriceEntry(
            None if row.token_price is None or rate is None else row.token_price * rate,
            None if row.delivery_price is None or sigma_ms is None else row.delivery_price / sigma_ms,
        )
    return found


def plan_committed(n: int, submit: SubmitFrame, view: View, *, with_view: bool) -> PlanCommitted:
    """The event for plan number `n`, chosen from `view` and submitted as a frame."""
    plan = submit.plan
    return PlanCommitted(
        at_ns=view.now_ns,
        n=n,
        fence=submit.fence,
        shape=plan.shape.name,
        lanes=lane_entries(plan.lanes),
        logical_tokens=sum(lane.tokens for lane in plan.lanes),
        duration_ns=plan.duration_ns,
        observation_age_ns=plan.observation_age_ns,
        score=plan.score,
        log_scale=plan.log_scale,
        reason=plan.reason,
        queued_requests=view.queued_requests,
        queued_tokens=view.queued_tokens,
        frames_ahead=len(view.window),
        ages_ms={row.slot: row.age_ms for row in view.requests if row.phase is Phase.DECODE},
        prices=_prices(submit.participants, view),
        exploration_credit=submit.credit_ns,
        view=view if with_view else msgspec.UNSET,
    )
