"""What the scheduler is told, and what it asks for.

Owns the events that go into `Scheduler.apply` and the effects that come out. Does not own any behaviour. Surprising
rule: effects are carried out in their order, and a `Deliver` is answered (`Published`, `HostStop`) before the next
completion is applied, so that a publication never corrects an interval that later observations have already built upon.
"""

from __future__ import annotations

import msgspec

from .graph import GraphShape
from .ids import Fence, PageId, RequestHandle, RequestId
from .request import EndReason, RequestSpec
from .selection.view import LaneWork, Plan, Reason
from .slot import Participant, StageWork


class Arrive(msgspec.Struct, frozen=True):
    """A request was accepted. Ids rise with arrival."""

    request: RequestId
    spec: RequestSpec


class CancelRequest(msgspec.Struct, frozen=True):
    """Its client is gone. Harmless for a request that has ended."""

    request: RequestId


class CompletionRecord(msgspec.Struct, frozen=True):
    """What a frame says of one lane: `committed` context tokens after it (prompt consumed and output drawn).

    Of a decode lane, `verified` counts its target positions (0: as planned). Of one that proposed, `confidence` has the
    conditional probability of each proposal made and the joint one of each prefix (docs/scheduling.md, "Confidence"),
    and `survival` the products of min(1, p/q) of the prefixes that were verified, where the program writes them.
    """

    handle: RequestHandle
    committed: int
    ended: EndReason | None
    verified: int = 0
    confidence: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    survival: tuple[float, ...] | None = None


class CompleteFrame(msgspec.Struct, frozen=True):
    """The device reported the end of a frame; `error` None means success. `device_ns` 0: not measured."""

    fence: Fence
    device_ns: int
    records: tuple[CompletionRecord, ...]
    error: str | None = None


class Published(msgspec.Struct, frozen=True):
    """A non-empty delta was handed to the client's buffer under the fence whose completion released it."""

    request: RequestId
    fence: Fence


class HostStop(msgspec.Struct, frozen=True):
    """The host found a stop string: the output is complete."""

    request: RequestId


class CopyOffered(msgspec.Struct, frozen=True):
    """From now on the host can supply so many proposals for a request, copied from its own tokens."""

    request: RequestId
    proposals: int


class PreemptRequest(msgspec.Struct, frozen=True):
    """A resident request is to give its slot and pages up for now, and to go on later where it stands.

    Nothing happens, and no effect comes of it, where that cannot be: the request is not resident, has ended or stands
    before stages; no state row is free; the catalog cannot save or resume.
    """

    request: RequestId


Event = Arrive | CancelRequest | CompleteFrame | Published | HostStop | CopyOffered | PreemptRequest


class RequestMoved(msgspec.Struct, frozen=True):
    """A request's machine moved; `cause` names the event."""

    request: RequestId
    handle: RequestHandle | None
    before: str
    after: str
    cause: str


class SlotMoved(msgspec.Struct, frozen=True):
    """A frame slot's machine moved."""

    frame_slot: int
    fence: Fence
    before: str
    after: str
    cause: str


class WindowMoved(msgspec.Struct, frozen=True):
    """A request's image windows moved."""

    request: RequestId
    before: str
    after: str
    cause: str


class LedgerMoved(msgspec.Struct, frozen=True):
    """A ledger, `refresh` or `probe`, changed its state; `credit_ns` is the execution that its credit pays for then
    (negative: owed)."""

    ledger: str
    before: str
    after: str
    cause: str
    credit_ns: int


class Dispatch(msgspec.Struct, frozen=True):
    """One lane to submit. The `work` of a stage starts where the device's row stands, which a prefix that is yet to be
    restored does not count for. `pages` is given with the first frame of a generation, for its binding; `stage` in
    frames of stage kinds."""

    request: RequestId
    work: LaneWork
    pages: tuple[PageId, ...] | None
    stage: StageWork | None = None


class SubmitFrame(msgspec.Struct, frozen=True):
    """Hand this frame to the device. `participants` are those that its commit froze; `credit_ns` is the execution that
    credit paid for at commit: the probe ledger's if the plan is an acceptance probe, else the refresh ledger's."""

    fence: Fence
    plan: Plan
    lanes: tuple[Dispatch, ...]
    participants: tuple[Participant, ...]
    credit_ns: int = 0


class Deliver(msgspec.Struct, frozen=True):
    """Validated results of a lane are to be published under `fence`. `ended` says that the output is complete: its text
    is final. Where ended requests retire through a snapshot (`Scheduler.retires`), the finish itself waits for
    `Retired`."""

    request: RequestId
    handle: RequestHandle
    fence: Fence
    ended: EndReason | None


class Retired(msgspec.Struct, frozen=True):
    """An ended request is retired: its client may be told that the response is complete."""

    request: RequestId


class RequestLost(msgspec.Struct, frozen=True):
    """The frame that served the request failed; its client is to be told."""

    request: RequestId
    error: str


class FrameCounted(msgspec.Struct, frozen=True):
    """A frame ended: what it was, how long it took, and the service that it gave (0 of a failed frame).

    `rounds` has the target positions and output tokens of each lane that offered proposals."""

    fence: Fence
    shape: GraphShape
    reason: Reason
    device_ns: int
    wall_ns: int
    prompt_tokens: int
    output_tokens: int
    error: str | None
    rounds: tuple[tuple[int, int], ...] = ()


Effect = (
    RequestMoved | WindowMoved | SlotMoved | LedgerMoved | SubmitFrame | Deliver | Retired | RequestLost | FrameCounted
)
