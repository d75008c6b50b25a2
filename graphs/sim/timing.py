"""How long simulated frames take, and how they fail: both are data, fixed by a seed.

Owns durations (tables; noise, drift and throttling over any of them) and the fault plan. Surprising rule: what changes
durations knows the seed and the frame alone, its fence in place of the time, so that a run which submits the same
frames at other times sees the same durations.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence

from ..frames import Frame
from .tokens import HASH_MASK, mix

Duration = Callable[[Frame], int]
"""The time that a frame takes on the device, in nanoseconds, at least 0."""


def by_shape(table: Mapping[GraphShape, int]) -> Duration:
    """Durations from a table; a frame of a shape that it lacks raises `KeyError`."""
    return lambda frame: table[frame.shape]


def by_kind(table: Mapping[GraphKind, int]) -> Duration:
    """One duration for each kind of graph, whatever its size."""
    return lambda frame: table[frame.shape.kind]


def with_noise(duration: Duration, seed: int, spread: float) -> Duration:
    """Multiply each duration by a factor that is uniform in [1 - spread, 1 + spread]; 0 <= spread < 1."""
    _check_spread(spread)

    def noisy(frame: Frame) -> int:
        return round(duration(frame) * (1 + spread * (2 * _uniform(seed + 1, frame.fence) - 1)))

    return noisy


def with_drift(duration: Duration, seed: int, spread: float, frames: int) -> Duration:
    """Let the cost of each shape wander on its own: every `frames` frames a factor that is uniform in
    [1 - spread, 1 + spread] is aimed at, and moved to evenly. It begins at 1; 0 <= spread < 1, frames >= 1."""
    _check_spread(spread)
    if frames < 1:
        raise ValueError(f"frames is {frames}; it must be at least 1")

    def drifting(frame: Frame) -> int:
        leg, passed = divmod(frame.fence, frames)
        key = seed + 5 + (zlib.crc32(frame.shape.name.encode()) << 32)
        before, after = (1 + spread * (2 * _uniform(key, aim) - 1) if aim else 1.0 for aim in (leg, leg + 1))
        return round(duration(frame) * (before + (after - before) * passed / frames))

    return drifting


def with_throttling(duration: Duration, seed: int, factor: float, share: float, frames: int) -> Duration:
    """Slow the clock down at times: of the periods of `frames` frames, a `share` takes `factor` times as long;
    factor >= 1, 0 <= share <= 1, frames >= 1."""
    if factor < 1 or not 0 <= share <= 1 or frames < 1:
        raise ValueError(f"factor {factor}, share {share} and frames {frames} must be at least 1, in [0, 1], and 1")

    def throttled(frame: Frame) -> int:
        slow = _uniform(seed + 6, frame.fence // frames) < share
        return round(duration(frame) * factor) if slow else duration(frame)

    return throttled


class Fault(StrEnum):
    """What goes wrong with a frame.

    FAILED: it ends with an error and changes no row. UNTIMED: it succeeds, with a device time of 0, which is
    what a missing measurement and one of zero become. LATE: it succeeds in time, but its completion comes
    `Faults.late_ns` later. MALFORMED: it succeeds, but its counters say one token more than its rows hold. LOST: the
    device dies; this frame and all later ones end with an error.
    """

    FAILED = "failed"
    UNTIMED = "untimed"
    LATE = "late"
    MALFORMED = "malformed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Faults:
    """The fault of each fence; all others run well."""

    at: Mapping[Fence, Fault] = field(default_factory=dict)
    late_ns: int = 0

    @classmethod
    def random(cls, seed: int, fences: int, rates: Mapping[Fault, float], late_ns: int = 0) -> Faults:
        """Each fence from 1 to `fences` has each fault with its rate (probabilities that sum to at most 1)."""
        if sum(rates.values()) > 1 or any(rate < 0 for rate in rates.values()):
            raise ValueError(f"rates are {dict(rates)}; they must be probabilities that sum to at most 1")
        at: dict[Fence, Fault] = {}
        for fence in range(1, fences + 1):
            uniform = _uniform(seed + 2, fence)
            for fault, rate in rates.items():
                uniform -= rate
                if uniform < 0:
                    at[Fence(fence)] = fault
                    break
        return cls(at, late_ns)


def _uniform(key: int, index: int) -> float:
    """A number in [0, 1) for each pair."""
    return mix(mix(key & HASH_MASK) ^ index) / 2**64


def _check_spread(spread: float) -> None:
    if not 0 <= spread < 1:
        raise ValueError(f"spread is {spread}; it must be at least 0 and below 1")
