"""Service prices: what a unit of service to one request is worth now.

Owns the exact update of a price over a measured interval, the newcomer's start, the correction that a publication
makes, projection over queued frames, and the shared scale of one decision (docs/scheduling.md, "Prices"). Does not own
who takes part in an interval or what was served. Surprising rule: prices are kept as natural logarithms, because the
price of a request that is not served grows exponentially and without bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .ids import Fence

MODERATE_LOG_PRICE = 200.0
"""Up to this logarithm a decision needs no scale: e**200 times any count of tokens is far from overflow."""


def charge(log_price: float, served: float, interval_ms: float, adaptation_ms: float) -> float:
    """The logarithm of a price after `interval_ms` in which `served` >= 0 units arrived.

    1/price is an exponential average of the measured rate with time constant `adaptation_ms`. Without service the
    logarithm grows by interval/adaptation, exactly. Both times must be positive, else ValueError.
    """
    if not interval_ms > 0.0:
        raise ValueError(f"interval_ms must be positive, not {interval_ms}: leave out frames that were not measured")
    if not adaptation_ms > 0.0:
        raise ValueError(f"adaptation_ms must be positive, not {adaptation_ms}")
    if served < 0.0:
        raise ValueError(f"served must not be negative, not {served}")
    elapsed = interval_ms / adaptation_ms
    if served == 0.0:
        return log_price + elapsed
    # Adding the two parts of the new rate as logarithms keeps the sum finite whatever their sizes.
    larger = -log_price - elapsed
    smaller = math.log(served / interval_ms * -math.expm1(-elapsed))
    if smaller > larger:
        larger, smaller = smaller, larger
    return -(larger + math.log1p(math.exp(smaller - larger)))


def newcomer_log_price(newcomer_share: float, requests: int, tokens_per_ms: float) -> float:
    """The logarithm of a newcomer's token price: that of a request with 1/`newcomer_share` of its fair part so far.

    `requests` counts the resident requests, itself included; `tokens_per_ms` is its token normalizer. All positive.
    """
    return math.log(newcomer_share) + math.log(requests) - math.log(tokens_per_ms)


def log_scale_for(log_prices: Iterable[float]) -> float:
    """The logarithm of the factor by which all values of one decision are divided; 0 while prices are moderate.

    A scaled price is exp(log price - log scale), never above e**200; what underflows is worth 0.
    """
    return max(0.0, max(log_prices, default=0.0) - MODERATE_LOG_PRICE)


class QueuedService(NamedTuple):
    """What a queued frame is expected to do for one request: tokens, deliveries (0 or 1), and how long it takes."""

    tokens: float
    deliveries: int
    duration_ms: float


class _OpenCharge(NamedTuple):
    """A charge that a publication may still correct."""

    fence: Fence
    log_delivery_before: float | None
    interval_ms: float


@dataclass(slots=True)
class ServicePrices:
    """The prices of one request: logarithms of ms/token and ms/delivery. None: not yet set."""

    log_token: float | None = None
    log_delivery: float | None = None
    _open: _OpenCharge | None = field(default=None, repr=False)

    def start(self, newcomer_share: float, requests: int, tokens_per_ms: float | None) -> None:
        """Set the token price if it is unset and a normalizer exists. Call it at admission and before each charge."""
        if self.log_token is None and tokens_per_ms is not None:
            self.log_token = newcomer_log_price(newcomer_share, requests, tokens_per_ms)

    def charge(self, fence: Fence, tokens: float, interval_ms: float, adaptation_ms: float) -> None:
        """A participant's interval: `tokens` arrived and, until a publication says otherwise, no delivery."""
        if self.log_token is not None:
            self.log_token = charge(self.log_token, tokens, interval_ms, adaptation_ms)
        self._open = _OpenCharge(fence, self.log_delivery, interval_ms)
        if self.log_delivery is not None:
            self.log_delivery = charge(self.log_delivery, 0.0, interval_ms, adaptation_ms)

    def publish(self, fence: Fence, adaptation_ms: float) -> None:
        """Text became visible under `fence`: its charge becomes one delivery.

        Only the first publication of the latest charged frame changes it; the first of all starts the delivery price.
        """
        opened = self._open
        if opened is None or opened.fence != fence:
            return
        self._open = None
        before, interval_ms = opened.log_delivery_before, opened.interval_ms
        self.log_delivery = math.log(interval_ms) if before is None else charge(before, 1.0, interval_ms, adaptation_ms)

    def projected(self, queued: Iterable[QueuedService], adaptation_ms: float) -> tuple[float | None, float | None]:
        """(token, delivery) log prices after `queued`, in order. Changes nothing; what is unset stays so."""
        token, delivery = self.log_token, self.log_delivery
        for frame in queued:
            if token is not None:
                token = charge(token, frame.tokens, frame.duration_ms, adaptation_ms)
            if delivery is not None:
                delivery = charge(delivery, frame.deliveries, frame.duration_ms, adaptation_ms)
        return token, delivery
