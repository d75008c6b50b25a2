"""A frame slot's state, told from its history.

Owns the order of a frame's life as docs/architecture.md, "State machines", gives it. Surprising rule: only what
happened since the slot was last freed counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.machines.slot import Commit, Execute, Free, Reject, SlotEvent, SlotState, Submit, Validate


def life(history: Sequence[SlotEvent]) -> list[type]:
    """The kinds of event since the slot was last free."""
    kinds = [type(event) for event in history]
    start = max((index + 1 for index, kind in enumerate(kinds) if kind is Free), default=0)
    return kinds[start:]


def state(history: Sequence[SlotEvent]) -> SlotState:
    """The state after `history`, all of which was allowed."""
    lived = life(history)
    if Reject in lived:
        return SlotState.FAILED
    for kind, reached in (
        (Validate, SlotState.VALIDATED),
        (Execute, SlotState.EXECUTED),
        (Submit, SlotState.SUBMITTED),
        (Commit, SlotState.COMMITTED),
    ):
        if kind in lived:
            return reached
    return SlotState.FREE


def possible(history: Sequence[SlotEvent], event: SlotEvent) -> bool:
    """Whether `event` may follow: each step comes once and in order, a frame may be rejected instead of
    validated, and is freed when it is judged."""
    lived = life(history)
    judged = Validate in lived or Reject in lived
    match event:
        case Commit():
            return not lived
        case Submit():
            return lived == [Commit]
        case Execute():
            return lived == [Commit, Submit]
        case Validate():
            return lived == [Commit, Submit, Execute]
        case Reject():
            return lived == [Commit, Submit, Execute]
        case Free():
            return judged
