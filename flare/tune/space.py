"""The coefficients that are searched, as points of a unit cube.

Owns ranges and their scales. Does not own how points are chosen (`search`). Surprising rule: axes are logarithmic, and
a coefficient that may be off is off on a strip at one end of its axis, since no logarithm reaches zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare.config.schema import Policy

_OFF_STRIP = 0.1
_DIGITS = 3


class Axis(NamedTuple):
    """A coefficient of `Policy` between `low` and `high`; `off_at` is the end, 0 or 1, next to which it is zero."""

    key: str
    low: float
    high: float
    off_at: int | None = None

    def value(self, coordinate: float) -> float:
        """What the coefficient is at a coordinate from 0 to 1, to three digits."""
        if self.off_at is not None and abs(coordinate - self.off_at) < _OFF_STRIP:
            return 0.0
        return float(f"{self.low * (self.high / self.low) ** coordinate:.{_DIGITS}g}")

    def coordinate(self, value: float) -> float:
        """Where a value lies, the nearest end if it is beyond the range."""
        if value <= 0:
            return float(self.off_at or 0)
        return min(1.0, max(0.0, math.log(value / self.low) / math.log(self.high / self.low)))


AXES = (
    Axis("output_token_value", 1, 1e3),
    Axis("token_fairness", 0.1, 1e3, off_at=0),
    Axis("delivery_fairness", 0.1, 1e3, off_at=0),
    Axis("decode_age_price", 1e-3, 10, off_at=0),
    Axis("first_output_age_price", 1e-3, 10, off_at=0),
    Axis("output_time_price", 1, 1e4, off_at=0),
    Axis("prompt_time_price", 1, 1e4, off_at=0),
    Axis("first_output_value", 10, 1e5, off_at=0),
    Axis("first_output_growth_ms", 1e3, 1e6, off_at=1),
    Axis("first_output_urgency", 1, 1e4, off_at=0),
    Axis("first_output_patience_ms", 50, 1e4),
    Axis("gap_price", 1, 1e4, off_at=0),
    Axis("gap_stretch", 1.5, 50),
    Axis("newcomer_share", 1, 100),
)
"""What is searched (docs/simulation.md, "Tuning"): the preferences that a trace of plain requests shows. Only ratios of
values matter, so that each range may be about as wide as the others."""


def point_of(policy: Policy) -> NDArray[np.float64]:
    """Where a policy lies in the cube, `[len(AXES)]`."""
    return np.array([axis.coordinate(getattr(policy, axis.key)) for axis in AXES])


def policy_at(point: Iterable[float], base: Policy) -> Policy:
    """The policy at a point of the cube; what is not searched is as in `base`."""
    values = {axis.key: axis.value(coordinate) for axis, coordinate in zip(AXES, point, strict=True)}
    return msgspec.structs.replace(base, **values)
