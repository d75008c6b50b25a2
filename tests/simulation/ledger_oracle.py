"""What exploration may spend, worked out a second time (docs/scheduling.md, "Timing refresh" and "Acceptance probes").

Owns the bound on the time of the episodes of one kind, and the credit in whole numbers. Surprising rule: the bound is
checked on sums that know nothing of credit.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL_NS = 5_000_000


@dataclass(slots=True)
class Episodes:
    """`earn_rate` / `pay_rate` is the part of ordinary time that episodes may take. `ordinary_ns` and `paid_ns` are
    sums over all that was, `last_ns` is the last episode."""

    earn_rate: int
    pay_rate: int
    credit: int = 0
    is_open: bool = False
    ordinary_ns: int = 0
    paid_ns: int = 0
    last_ns: int = 0

    @property
    def full(self) -> int:
        """The credit that opens an episode."""
        return self.pay_rate * FULL_NS

    @property
    def funded(self) -> bool:
        """Whether an episode may begin."""
        return self.credit == self.full and not self.is_open

    def earn(self, interval_ns: int) -> None:
        """An ordinary frame was good."""
        self.ordinary_ns += interval_ns
        self.credit = min(self.full, self.credit + self.earn_rate * interval_ns)

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
        self.credit -= self.pay_rate * duration_ns

    def rest(self) -> None:
        """Nobody is there, and nothing runs."""
        self.credit = min(0, self.credit)

    def check(self) -> None:
        """The bound that holds at every moment."""
        ordinary, paid = self.earn_rate * self.ordinary_ns, self.pay_rate * (self.paid_ns - self.last_ns)
        assert paid <= ordinary, "more episodes than are paid for"


def ledgers(*, probes: bool) -> dict[str, Episodes]:
    """By the reason of the frames that they pay for: two parts in a thousand, and one in a hundred where something is
    proposed."""
    return {"timing_refresh": Episodes(2, 998)} | ({"acceptance_probe": Episodes(1, 99)} if probes else {})
