"""The ledgers of exploration: who earns, who pays, and when credit is lost.

Owns one ledger for each reason that is paid for: timing refresh, and acceptance probes where something is proposed
(docs/scheduling.md, "Timing refresh" and "Acceptance probes"). Does not own a ledger's arithmetic (`ledger`).
Surprising rule: ordinary service earns for all of them at once, and no execution is ever charged to two.
"""

from __future__ import annotations

from .events import Effect, LedgerMoved
from .ledger import PROBE, REFRESH, Ledger, LedgerStep
from .selection.view import Reason
from .slot import FrameSlot

_NAMES = {Reason.TIMING_REFRESH: "refresh", Reason.ACCEPTANCE_PROBE: "probe"}


class Ledgers:
    """All ledgers, by the reason of the plans that they pay for. Whatever moves one tells of it in `effects`."""

    def __init__(self, *, probes: bool) -> None:
        self.by_reason = {Reason.TIMING_REFRESH: Ledger(REFRESH)}
        if probes:
            self.by_reason[Reason.ACCEPTANCE_PROBE] = Ledger(PROBE)

    def funded(self, reason: Reason) -> bool:
        """Whether an episode of this reason may begin."""
        ledger = self.by_reason.get(reason)
        return ledger is not None and ledger.funded

    def credit_ns(self, reason: Reason) -> int:
        """The execution that credit pays for: that of the ledger which a plan of this reason is charged to, or else
        that of timing refresh."""
        return self.by_reason.get(reason, self.by_reason[Reason.TIMING_REFRESH]).credit_ns

    def open(self, reason: Reason, effects: list[Effect]) -> None:
        """A plan was committed; an episode begins if it is one."""
        if (ledger := self.by_reason.get(reason)) is not None:
            self._tell(reason, ledger.open(), effects)

    def account(self, reason: Reason, frame: FrameSlot, *, failed: bool, effects: list[Effect]) -> None:
        """An executed frame pays for itself if it is an episode, and earns if it is ordinary and in order."""
        assert frame.submit is not None and frame.execute is not None
        if (paying := self.by_reason.get(reason)) is not None:
            device_ns, wall_ns = frame.execute.device_ns, frame.execute.at_ns - frame.submit.at_ns
            self._tell(reason, paying.close(device_ns if device_ns > 0 else max(1, wall_ns)), effects)
        elif reason is Reason.ORDINARY and not failed and frame.interval_ns > 0:
            for one, ledger in self.by_reason.items():
                self._tell(one, ledger.earn(frame.interval_ns), effects)

    def rest(self, effects: list[Effect]) -> None:
        """Nothing is resident and nothing in flight."""
        for reason, ledger in self.by_reason.items():
            self._tell(reason, ledger.rest(), effects)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        for ledger in self.by_reason.values():
            ledger.check()

    def _tell(self, reason: Reason, step: LedgerStep, effects: list[Effect]) -> None:
        if step.before is not step.after:
            name, credit_ns = _NAMES[reason], self.by_reason[reason].credit_ns
            effects.append(LedgerMoved(name, step.before.value, step.after.value, step.cause, credit_ns))
