"""A frame slot: one of the two frames that may be in flight.

Owns what a frame was promised at commit (plan, participants, expected service and finish) and how far it has come. Does
not own requests or prices. Surprising rule: publication holds no slot; a frame leaves it as soon as its completion
is validated, even while its text is held back for a stop string.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from .ids import Fence, RequestHandle, StateRow
from .selection.reference import Normalizer
from .selection.view import Plan
from .table import State, Transitions, next_state


class SlotState(State):
    """States of a frame slot (docs/architecture.md, "State machines")."""

    FREE = "free"
    COMMITTED = "committed"
    SUBMITTED = "submitted"
    EXECUTED = "executed"
    VALIDATED = "validated"
    FAILED = "failed"


class Participant(msgspec.Struct, frozen=True):
    """A request that was resident and runnable at commit: its normalizer, and the service expected of the frame."""

    handle: RequestHandle
    normalizer: Normalizer
    expected_tokens: float
    expects_delivery: bool


class StageWork(msgspec.Struct, frozen=True):
    """What a frame of a stage kind does for one lane.

    `state_row` is where a snapshot puts the state, or where it is taken from; None: no state row is involved.
    `operation` is the index of a vision operation within its window, `restored_tokens` the length of a cached prefix to
    bring back. `retires`: the lane's request was terminal when the frame was committed.
    """

    state_row: StateRow | None = None
    operation: int = 0
    restored_tokens: int = 0
    retires: bool = False


class Commit(msgspec.Struct, frozen=True):
    """A plan was committed under a fence, with its participants frozen. `closes_window`: nothing may be queued behind
    it (its kind cannot be queued, or its cost is unknown or stale). `stages` are in the order of the plan's lanes, and
    empty for kinds that give tokens."""

    fence: Fence
    plan: Plan
    participants: tuple[Participant, ...]
    closes_window: bool
    stages: tuple[StageWork, ...] = ()


class Submit(msgspec.Struct, frozen=True):
    """The frame was handed to the device. `isolated`: no other frame was in flight."""

    at_ns: int
    expected_finish_ns: int
    isolated: bool


class Execute(msgspec.Struct, frozen=True):
    """The device reported its end."""

    at_ns: int
    device_ns: int


class Validate(msgspec.Struct, frozen=True):
    """Every lane of its completion was found in order."""


class Reject(msgspec.Struct, frozen=True):
    """The device failed, or its completion was malformed."""


class Free(msgspec.Struct, frozen=True):
    """All that the frame brought about has been applied."""


SlotEvent = Commit | Submit | Execute | Validate | Reject | Free

_S = SlotState
TRANSITIONS: Transitions[SlotState] = {
    (_S.FREE, Commit): _S.COMMITTED,
    (_S.COMMITTED, Submit): _S.SUBMITTED,
    (_S.SUBMITTED, Execute): _S.EXECUTED,
    (_S.EXECUTED, Validate): _S.VALIDATED,
    (_S.EXECUTED, Reject): _S.FAILED,
    (_S.VALIDATED, Free): _S.FREE,
    (_S.FAILED, Free): _S.FREE,
}


class SlotStep(msgspec.Struct, frozen=True):
    """One move of a frame slot, for the trace."""

    before: SlotState
    after: SlotState


@dataclass(slots=True)
class FrameSlot:
    """The machine. `commit` and `submit` are the frozen promises of the frame that it holds."""

    index: int
    state: SlotState = SlotState.FREE
    commit: Commit | None = None
    submit: Submit | None = None
    execute: Execute | None = None

    def apply(self, event: SlotEvent) -> SlotStep:
        """Move by one event. Raises `IllegalTransition`; then nothing has changed."""
        before = self.state
        after = next_state("frame slot", TRANSITIONS, before, event)
        match event:
            case Commit():
                self.commit = event
            case Submit():
                self.submit = event
            case Execute():
                self.execute = event
            case Free():
                self.commit = self.submit = self.execute = None
            case Validate() | Reject():
                pass
        self.state = after
        return SlotStep(before, after)

    def reanchor(self, expected_finish_ns: int) -> None:
        """Move the expected finish of a frame in flight, once an earlier completion tells when it really started."""
        assert self.submit is not None and self.state is SlotState.SUBMITTED
        self.submit = Submit(self.submit.at_ns, expected_finish_ns, self.submit.isolated)

    @property
    def interval_ns(self) -> int:
        """The interval that an executed frame charges: the device's own time, or for an isolated frame the wall time
        from dispatch to observed completion if that is larger (docs/scheduling.md, "Prices"). 0 if untimed."""
        assert self.submit is not None and self.execute is not None
        device_ns = self.execute.device_ns
        if device_ns <= 0 or not self.submit.isolated:
            return max(device_ns, 0)
        return max(device_ns, self.execute.at_ns - self.submit.at_ns)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        order = [SlotState.FREE, SlotState.COMMITTED, SlotState.SUBMITTED]
        depth = order.index(self.state) if self.state in order else len(order)
        assert (self.commit is not None) == (depth >= 1)
        assert (self.submit is not None) == (depth >= 2)
        assert (self.execute is not None) == (depth >= 3)
