"""Image windows: whole images whose features fit the prepared storage, one window after the other.

Owns how far a request is with its windows (docs/architecture.md, "State machines"). Does not own prompt positions or
state rows. Surprising rule: between two windows the request's exact state is saved and bound to a fresh generation, so
that what an earlier window's frames may still say of the slot can never be taken for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .graph import GraphKind
from .request import ImageWindow
from .table import State, Transitions, next_state


class WindowState(State):
    """States of a request's image windows (docs/architecture.md, "State machines")."""

    AHEAD = "ahead"
    FILLING = "filling"
    ACTIVE = "active"
    DRAINING = "draining"
    SNAPSHOTTING = "snapshotting"
    RESTORING = "restoring"
    DONE = "done"


class Reached(msgspec.Struct, frozen=True):
    """The prompt stands at the first position that reads the next window."""


class Drained(msgspec.Struct, frozen=True):
    """No frame in flight serves the request any longer."""


class Saved(msgspec.Struct, frozen=True):
    """The exact state is in the request's state row."""


class Restored(msgspec.Struct, frozen=True):
    """The state is bound to a fresh generation."""


class Encoded(msgspec.Struct, frozen=True):
    """A vision operation of the window is done, and more are left."""


class Filled(msgspec.Struct, frozen=True):
    """The last vision operation of the window is done."""


class Finished(msgspec.Struct, frozen=True):
    """The prompt is consumed."""


WindowEvent = Reached | Drained | Saved | Restored | Encoded | Filled | Finished

_S = WindowState
TRANSITIONS: Transitions[WindowState] = {
    (_S.AHEAD, Reached): _S.FILLING,
    (_S.FILLING, Encoded): _S.FILLING,
    (_S.FILLING, Filled): _S.ACTIVE,
    (_S.ACTIVE, Reached): _S.DRAINING,
    (_S.DRAINING, Drained): _S.SNAPSHOTTING,
    (_S.SNAPSHOTTING, Saved): _S.RESTORING,
    (_S.RESTORING, Restored): _S.FILLING,
    (_S.ACTIVE, Finished): _S.DONE,
}


class WindowStep(msgspec.Struct, frozen=True):
    """One move, for the trace."""

    before: WindowState
    after: WindowState
    cause: str


@dataclass(slots=True)
class Windows:
    """The machine. `index` is the window reached last, -1 before the first; `encoded` counts its operations done."""

    windows: Sequence[ImageWindow]
    state: WindowState = WindowState.AHEAD
    index: int = -1
    encoded: int = 0

    def apply(self, event: WindowEvent) -> WindowStep:
        """Move by one event. Raises `IllegalTransition`, or ValueError for a window or an operation that there is not;
        then nothing has changed."""
        before = self.state
        after = next_state("image windows", TRANSITIONS, before, event)
        match event:
            case Reached():
                if self.next_start() is None:
                    raise ValueError("there is no further image window")
                self.index, self.encoded = self.index + 1, 0
            case Encoded() | Filled():
                left = self.windows[self.index].operations - self.encoded
                if (left == 1) != isinstance(event, Filled):
                    raise ValueError(f"{left} vision operations were left")
                self.encoded += 1
            case Finished():
                if self.next_start() is not None:
                    raise ValueError("an image window is left")
            case Drained() | Saved() | Restored():
                pass
        self.state = after
        return WindowStep(before, after, type(event).__name__)

    def next_start(self) -> int | None:
        """The first position that reads the window after the one reached last; None if there is none."""
        following = self.index + 1
        return self.windows[following].start if following < len(self.windows) else None

    def stages(self) -> tuple[GraphKind, ...]:
        """The operations that the window still needs before the prompt can go on, in order."""
        match self.state:
            case WindowState.AHEAD | WindowState.ACTIVE | WindowState.DONE:
                return ()
            case WindowState.DRAINING | WindowState.SNAPSHOTTING:
                first: tuple[GraphKind, ...] = (GraphKind.SNAPSHOT, GraphKind.RESTORE)
            case WindowState.RESTORING:
                first = (GraphKind.RESTORE,)
            case WindowState.FILLING:
                first = ()
        return first + (GraphKind.VISION,) * (self.windows[self.index].operations - self.encoded)

    def committed(self, kind: GraphKind) -> WindowEvent:
        """What it means to the windows that a frame of the first kind of `stages` was completed."""
        match kind:
            case GraphKind.SNAPSHOT:
                return Saved()
            case GraphKind.RESTORE:
                return Restored()
            case _:
                return Filled() if self.encoded + 1 == self.windows[self.index].operations else Encoded()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        assert (self.state is WindowState.AHEAD) == (self.index == -1)
        assert self.index < len(self.windows)
        if self.index >= 0:
            operations = self.windows[self.index].operations
            waiting = (WindowState.DRAINING, WindowState.SNAPSHOTTING, WindowState.RESTORING)
            assert 0 <= self.encoded <= operations
            assert (self.encoded == operations) == (self.state in (WindowState.ACTIVE, WindowState.DONE))
            assert self.encoded == 0 or self.state not in waiting
        assert self.state is not WindowState.DONE or self.next_start() is None
