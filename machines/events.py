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
from .slot import Participant


class Arrive(msgspec.Struct, frozen=True):
    """A request was accepted. Ids rise with arrival."""

    request: RequestId
    spec: RequestSpec


class CancelRequest(msgspec.Struct, frozen=True):
    """Its client is gone. Harmless for a request that has ended."""

    request: RequestId


class CompletionRecord(msgspec.Struct, frozen=True):
    """What a frame says of one lane: `committed` context tokens after it (prompt consumed and output drawn)."""

    handle: RequestHandle
    committed: int
    ended: EndReason | None


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


Event = Arrive | CancelRequest | CompleteFrame | Published | HostStop


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


class Dispatch(msgspec.Struct, frozen=True):
    """One lane to submit. `pages` is given with the first frame of a generation, for its binding."""

    request: RequestId
    work: LaneWork
    pages: tuple[PageId, ...] | None


class SubmitFrame(msgspec.Struct, frozen=True):
    """Hand this frame to the device. `participants` are those that its commit froze."""

    fence: Fence
    plan: Plan
    lanes: tuple[Dispatch, ...]
    participants: tuple[Participant, ...]


class Deliver(msgspec.Struct, frozen=True):
    """Validated results of a lane are to be published under `fence`. `ended` says that the output is complete."""

    request: RequestId
    handle: RequestHandle
    fence: Fence
    ended: EndReason | None


class RequestLost(msgspec.Struct, frozen=True):
    """The frame that served the request failed; its client is to be told."""

    request: RequestId
    error: str


class FrameCounted(msgspec.Struct, frozen=True):
    """A frame ended: what it was, how long it took, and the service that it gave (0 of a failed frame)."""

    fence: Fence
    shape: GraphShape
    reason: Reason
    device_ns: int
    wall_ns: int
    prompt_tokens: int
    output_tokens: int
    error: str | None


Effect = RequestMoved | SlotMoved | SubmitFrame | Deliver | RequestLost | FrameCounted
