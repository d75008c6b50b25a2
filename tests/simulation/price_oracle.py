"""Service prices, worked out a second time from the rules alone.

Owns an exponential average of each measured rate in decimals of unbounded range, written from docs/scheduling.md,
"Prices", and nothing of the implementation. Surprising rule: it keeps rates where the implementation keeps logarithms
of prices, so that a common mistake would have to be made twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

NS_PER_MS = 1_000_000


def decay(interval_ns: int, adaptation_ms: float) -> Decimal:
    """exp(-interval / adaptation)."""
    return (-Decimal(interval_ns) / (NS_PER_MS * Decimal(adaptation_ms))).exp()


def averaged(rate: Decimal, units: float, interval_ns: int, kept: Decimal) -> Decimal:
    """The rate (units/ms) after an interval; `kept` is its `decay`."""
    now = Decimal(units) * NS_PER_MS / interval_ns
    return now + (rate - now) * kept


def log_price(rate: Decimal) -> float:
    """The natural logarithm of 1/rate."""
    exponent = rate.adjusted()
    return -(math.log(float(rate.scaleb(-exponent))) + exponent * math.log(10.0))


@dataclass(slots=True)
class Rates:
    """The measured token and delivery rates of one request; None: not yet set. `window` is the charge that a
    publication may correct: its fence, its interval and the delivery rate before it."""

    tokens: Decimal | None = None
    deliveries: Decimal | None = None
    window: tuple[int, int, Decimal | None] | None = None

    def start(self, share: float, requests: int, tokens_per_ms: float | None) -> None:
        """A newcomer has had 1/share of its fair part."""
        if self.tokens is None and tokens_per_ms is not None:
            self.tokens = Decimal(tokens_per_ms) / (Decimal(share) * requests)

    def charge(self, fence: int, units: int, interval_ns: int, kept: Decimal) -> None:
        """A participant's interval."""
        if self.tokens is not None:
            self.tokens = averaged(self.tokens, units, interval_ns, kept)
        self.window = (fence, interval_ns, self.deliveries)
        if self.deliveries is not None:
            self.deliveries = averaged(self.deliveries, 0, interval_ns, kept)

    def publish(self, fence: int, adaptation_ms: float) -> None:
        """Text became visible under `fence`."""
        if self.window is None or self.window[0] != fence:
            return
        _, interval_ns, before = self.window
        self.window = None
        if before is None:
            self.deliveries = Decimal(NS_PER_MS) / interval_ns
        else:
            self.deliveries = averaged(before, 1, interval_ns, decay(interval_ns, adaptation_ms))

    def projected(
        self, queued: Iterable[tuple[float, bool, int]], adaptation_ms: float
    ) -> tuple[Decimal | None, Decimal | None]:
        """The rates after frames of (expected tokens, expects a delivery, duration)."""
        tokens, deliveries = self.tokens, self.deliveries
        for units, delivers, duration_ns in queued:
            kept = decay(duration_ns, adaptation_ms)
            tokens = None if tokens is None else averaged(tokens, units, duration_ns, kept)
            deliveries = None if deliveries is None else averaged(deliveries, int(delivers), duration_ns, kept)
        return tokens, deliveries
