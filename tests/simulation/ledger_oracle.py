"""What the funded refresh may spend, worked out a second time (docs/scheduling.md, "Timing refresh").

Owns the bound on the time of episodes, and the credit in whole numbers. Surprising rule: the bound is checked on sums
that know nothing of credit.
"""

from __future__ import annotations

from dataclasses import dataclass

EARN, PAY = 2, 998
FULL = PAY * 5_000_000


@dataclass(slots=True)
class Refresh:
    """`ordinary_ns` and `paid_ns` are sums over all that was, `last_ns` is the last episode."""

    credit: int = 0
    is_open: bool = False
    ordinary_ns: int = 0
    paid_ns: int = 0
    last_ns: int = 0

    @property
    def funded(self) -> bool:
        """Whether an episode may begin."""
        return self.credit == FULL and not self.is_open

    def earn(self, interval_ns: int) -> None:
        """An ordinary frame was good."""
        self.ordinary_ns += interval_ns
        self.credit = min(FULL, self.credit + EARN * interval_ns)

    def open(self) -> None:
        """An episode was committed."""
        assert self.funded, "an episode without full credit"
        self.is_open = True

    def pay(self, duration_ns: int) -> None:
        """The episode is over."""
        assert self.is_open
        self.is_open = False
        self.paid_ns += duration_ns
        self.last_ns = duration_ns
        self.credit -= PAY * duration_ns
        assert PAY * self.paid_ns <= EARN * self.ordinary_ns + PAY * self.last_ns, "more episodes than are paid for"

    def rest(self) -> None:
        """Nobody is there, and nothing runs."""
        self.credit = min(0, self.credit)
