"""How long simulated frames take, and how they fail: both are data, fixed by a seed.

Owns durations (tables, noise) and the fault plan. Surprising rule: noise depends on the seed and the frame's fence
alone, so that a run which submits the same frames at other times sees the same durations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence

from ..frames import Frame
from .tokens import mix

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
    if not 0 <= spread < 1:
        raise ValueError(f"spread is {spread}; it must be at least 0 and below 1")

    def noisy(frame: Frame) -> int:
        uniform = mix(mix(seed + 1) ^ frame.fence) / 2**64
        return round(duration(frame) * (1 + spread * (2 * uniform - 1)))

    return noisy


class Fault(StrEnum):
    """What goes wrong with a frame.

    FAILED: it ends with an error and changes no row. UNTIMED: it succeeds, with a device time of 0. LATE: it succeeds
    in time, but its completion comes `Faults.late_ns` later. MALFORMED: it succeeds, but its counters say one token
    more than it drew. LOST: the device dies; this frame and all later ones end with an error.
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
            uniform = mix(mix(seed + 2) ^ fence) / 2**64
            for fault, rate in rates.items():
                uniform -= rate
                if uniform < 0:
                    at[Fence(fence)] = fault
                    break
        return cls(at, late_ns)
