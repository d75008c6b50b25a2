"""Exploration credit: ordinary service earns it, and an episode of exploration pays with it.

Owns the credit of one purpose as a typed state machine (docs/scheduling.md, "Timing refresh" and "Acceptance probes").
Does not own what an episode runs. Surprising rule: credit is a whole number, `earn` for each nanosecond earned and
`pay` for each nanosecond paid, so that "full" is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from .table import State, Transitions, next_state


class LedgerState(State):
    """States of a ledger (docs/architecture.md, "State machines")."""

    IDLE = "idle"
    EARNING = "earning"
    FUNDED = "funded"
    OPEN = "open"
    DEBT = "debt"


class Earned(msgspec.Struct, frozen=True):
    """Ordinary service was measured; credit is not full yet, or debt is left."""


class Repaid(msgspec.Struct, frozen=True):
    """Ordinary service was measured, and the last of a debt is paid."""


class Filled(msgspec.Struct, frozen=True):
    """Ordinary service was measured, and credit is full."""


class Opened(msgspec.Struct, frozen=True):
    """An episode was committed."""


class Spent(msgspec.Struct, frozen=True):
    """The episode ended, and its credit covered it."""


class Overdrawn(msgspec.Struct, frozen=True):
    """The episode ended and took longer than its credit covers."""


class Rested(msgspec.Struct, frozen=True):
    """Nothing is resident and nothing in flight: what is positive is dropped, what is owed stays."""


LedgerEvent = Earned | Repaid | Filled | Opened | Spent | Overdrawn | Rested

_S = LedgerState
TRANSITIONS: Transitions[LedgerState] = {
    (_S.IDLE, Earned): _S.EARNING,
    (_S.IDLE, Filled): _S.FUNDED,
    (_S.IDLE, Rested): _S.IDLE,
    (_S.EARNING, Earned): _S.EARNING,
    (_S.EARNING, Filled): _S.FUNDED,
    (_S.EARNING, Rested): _S.IDLE,
    (_S.FUNDED, Filled): _S.FUNDED,
    (_S.FUNDED, Opened): _S.OPEN,
    (_S.FUNDED, Rested): _S.IDLE,
    (_S.OPEN, Filled): _S.OPEN,
    (_S.OPEN, Spent): _S.EARNING,
    (_S.OPEN, Overdrawn): _S.DEBT,
    (_S.DEBT, Earned): _S.DEBT,
    (_S.DEBT, Repaid): _S.EARNING,
    (_S.DEBT, Filled): _S.FUNDED,
    (_S.DEBT, Rested): _S.DEBT,
}


class Terms(NamedTuple):
    """Credit per nanosecond earned, credit per nanosecond paid, and the credit that is full."""

    earn: int
    pay: int
    cap: int


REFRESH = Terms(2, 998, 998 * 5_000_000)
"""Timing refresh: a share of 0.002 of the time, up to 5 ms at once."""

PROBE = Terms(1, 99, 99 * 5_000_000)
"""Acceptance probes: a share of 0.01, up to 5 ms at once."""


class LedgerStep(msgspec.Struct, frozen=True):
    """One move, for the trace."""

    before: LedgerState
    after: LedgerState
    cause: str


@dataclass(slots=True)
class Ledger:
    """The machine. `credit` may be negative: then it is debt."""

    terms: Terms
    state: LedgerState = LedgerState.IDLE
    credit: int = 0

    def earn(self, duration_ns: int) -> LedgerStep:
        """Credit ordinary service of `duration_ns` >= 0. While an episode is open, credit is full already."""
        if duration_ns < 0:
            raise ValueError(f"duration_ns must not be negative, not {duration_ns}")
        credit = min(self.terms.cap, self.credit + self.terms.earn * duration_ns)
        if credit == self.terms.cap:
            return self._apply(Filled(), credit)
        return self._apply(Repaid() if credit >= 0 and self.state is LedgerState.DEBT else Earned(), credit)

    def open(self) -> LedgerStep:
        """An episode begins. Raises `IllegalTransition` unless credit is full and no other is open."""
        return self._apply(Opened(), self.credit)

    def close(self, duration_ns: int) -> LedgerStep:
        """The open episode took `duration_ns` > 0, whatever came of it."""
        if duration_ns <= 0:
            raise ValueError(f"duration_ns must be positive, not {duration_ns}")
        credit = self.credit - self.terms.pay * duration_ns
        return self._apply(Overdrawn() if credit < 0 else Spent(), credit)

    def rest(self) -> LedgerStep:
        """Nothing is resident, and nothing in flight."""
        return self._apply(Rested(), min(0, self.credit))

    @property
    def funded(self) -> bool:
        """Whether an episode may be opened."""
        return self.state is LedgerState.FUNDED

    @property
    def credit_ns(self) -> int:
        """The time that the credit pays for, rounded down; of a debt, what is owed, negative."""
        return self.credit // self.terms.pay

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        full = self.credit == self.terms.cap
        assert self.credit <= self.terms.cap
        assert full == (self.state in (LedgerState.FUNDED, LedgerState.OPEN))
        assert (self.credit < 0) == (self.state is LedgerState.DEBT)
        assert self.credit == 0 or self.state is not LedgerState.IDLE

    def _apply(self, event: LedgerEvent, credit: int) -> LedgerStep:
        before = self.state
        self.state = next_state("ledger", TRANSITIONS, before, event)
        self.credit = credit
        return LedgerStep(before, self.state, type(event).__name__)
