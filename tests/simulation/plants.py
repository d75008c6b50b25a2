"""Deliberate faults, each in one function of the machines, to show that worlds find what is wrong.

Owns the faults. Does not own the search for them (`test_plants`). Surprising rule: each is a plausible slip and leaves
every single test of shape and type content; only what the machines do together is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from flare.machines import completion, scheduler, snapshot
from flare.machines.accounting import Accounting
from flare.machines.events import CompleteFrame, Deliver, Effect
from flare.machines.execution import Request
from flare.machines.ids import Fence, RequestHandle
from flare.machines.ledger import Ledger, LedgerState, LedgerStep
from flare.machines.ledgers import Ledgers
from flare.machines.lifecycle import FENCED
from flare.machines.roster import Roster
from flare.machines.selection.view import Reason
from flare.machines.slot import Commit, FrameSlot
from flare.machines.snapshot import QueuedOutputs
from flare.machines.validation import Progress, validate

_release, _charge, _close = Roster.release_if_unfenced, Accounting.charge, Ledger.close
_account, _validate = Ledgers.account, validate
_advance, _queued = completion.advance, snapshot.queued_outputs


def _release_at_once(roster: Roster, request: Request, effects: list[Effect]) -> None:
    """Slot and pages are free although a frame in flight still uses them."""
    if request.state in FENCED:
        request.last_fence = Fence(0)
    _release(roster, request, effects)


def _charge_the_slot(
    accounting: Accounting,
    commit: Commit,
    interval_ns: int,
    resident: Sequence[Request | None],
    progress: Iterable[Progress],
) -> None:
    """Whoever has the slot now is charged for its owner at commit."""
    present = [None if owner is None else owner.handle for owner in resident]
    charged = [replace(one, handle=present[one.handle.slot] or one.handle) for one in commit.participants]
    _charge(accounting, replace(commit, participants=tuple(charged)), interval_ns, resident, progress)


def _forget_debt(ledger: Ledger, duration_ns: int) -> LedgerStep:
    """An episode that took longer than its credit leaves nothing owed."""
    step = _close(ledger, duration_ns)
    if ledger.credit < 0:
        ledger.credit, ledger.state = 0, LedgerState.EARNING
    return step


def _project_one(frames: Sequence[FrameSlot]) -> QueuedOutputs:
    """A queued round is taken to bring one token, however many targets it has."""
    found = _queued(frames)
    lanes = [RequestHandle(w.slot, w.generation) for f in frames if f.commit is not None for w in f.commit.plan.lanes]
    return {handle: (min(tokens, lanes.count(handle)), end) for handle, (tokens, end) in found.items()}


def _keep_generation(_roster: Roster, _request: Request, _effects: list[Effect]) -> None:
    """A saved state is bound to the generation that it had."""


def _deliver_one(lane: Progress, commit: Commit, roster: Roster, now_ns: int, effects: list[Effect]) -> None:
    """Of the results that one completion brings, only the first is delivered."""
    delivered = any(isinstance(effect, Deliver) for effect in effects)
    before = len(effects)
    _advance(lane, commit, roster, now_ns, effects)
    if delivered:
        effects[before:] = [effect for effect in effects[before:] if not isinstance(effect, Deliver)]


def _learn_as_planned(
    commit: Commit, lanes: Sequence[Request | None], event: CompleteFrame
) -> tuple[tuple[Progress, ...], str | None]:
    """Proposals that a program had no rows for count as rejected."""
    progress, error = _validate(commit, lanes, event)
    planned = {work.slot: work.tokens for work in commit.plan.lanes}
    slots = [one.request.handle.slot if one.request.handle is not None else 0 for one in progress]
    pairs = zip(progress, slots, strict=True)
    return tuple(replace(one, targets=planned[slot] if one.targets else 0) for one, slot in pairs), error


def _fill_from_episodes(ledgers: Ledgers, reason: Reason, frame: FrameSlot, **others: Any) -> None:
    """An episode of one kind earns for the other."""
    _account(ledgers, reason, frame, **others)
    for other, ledger in ledgers.by_reason.items():
        if reason in ledgers.by_reason and other is not reason:
            ledger.earn(frame.interval_ns)


PLANTS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "pages are released before the last fence": lambda: patch.object(Roster, "release_if_unfenced", _release_at_once),
    "a later owner of the slot is charged": lambda: patch.object(Accounting, "charge", _charge_the_slot),
    "the debt of an episode is forgotten": lambda: patch.object(Ledger, "close", _forget_debt),
    "an episode earns for the other ledger": lambda: patch.object(Ledgers, "account", _fill_from_episodes),
    "proposals that were not verified are learned of": lambda: patch.object(scheduler, "validate", _learn_as_planned),
    "a queued round is projected as one token": lambda: patch.object(snapshot, "queued_outputs", _project_one),
    "a window is restored without a fresh generation": lambda: patch.object(Roster, "rebind", _keep_generation),
    "a delivery of a completion is dropped": lambda: patch.object(scheduler, "advance", _deliver_one),
}
"""What each fault is, and what puts it in place for a while."""
