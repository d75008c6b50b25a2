"""What a frame costs the streams whose text it holds up.

Owns the gap price (docs/scheduling.md, "Gap price"). Does not own reference intervals. Surprising rule: the mean of a
high power of all gaps over a frame is a polynomial in the frame's time, so that the streams are looked at once in a
decision, and every horizon costs a few multiplications.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from .lanes import Floats, Scaled

EXPONENT = 8
"""A gap of the tolerated length costs the price; one of two thirds a twenty-fifth of it; one of 1.5 times, 25 times."""

AGE_MAX = 1.5
"""Ages count up to so many tolerated gaps: text that is held back must not make every frame infinitely dear."""

_BINOMIALS = np.array([[9.0], [36.0], [84.0], [126.0], [126.0], [84.0], [36.0], [9.0], [1.0]]) / (EXPONENT + 1)
"""Ways to choose j = 1..9 of 9, over 9."""

Horizon = TypeVar("Horizon", float, Floats)


class Gaps(NamedTuple):
    """The gap price of one view, scaled: `factors` of (H/`tolerated_ms`)^0..8."""

    tolerated_ms: float
    factors: tuple[float, ...]

    @staticmethod
    def of(scaled: Scaled, sigma_ms: float | None, streams: int, age_ms: Floats) -> Gaps | None:
        """Price the gaps of decoding requests of `age_ms` [m] among `streams` (K) ones, with the reference interval of
        the ready ones; None if they cost nothing."""
        if scaled.gap_price == 0.0 or sigma_ms is None or not len(age_ms):
            return None
        tolerated_ms = scaled.gap_stretch * sigma_ms
        ages = np.minimum(age_ms / tolerated_ms, AGE_MAX)
        powers = np.ones((EXPONENT + 1, len(ages)))
        powers[:-1] = ages
        # Ages to the power of 8, 7, .. 0: each by one multiplication, and sums from the first stream on.
        powers = powers[::-1].cumprod(axis=0)[::-1]
        factors = scaled.gap_price / streams * (_BINOMIALS * powers).cumsum(axis=1)[:, -1]
        return Gaps(tolerated_ms, tuple(factors.tolist()))

    def cost(self, horizon_ms: Horizon) -> Horizon:
        """Value per ms that a frame or sequence of `horizon_ms` costs."""
        share = horizon_ms / self.tolerated_ms
        total = share * self.factors[-1]
        for factor in self.factors[-2:0:-1]:
            total += factor
            total *= share
        total += self.factors[0]
        return total
