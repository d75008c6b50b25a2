"""The conformance suites on the simulated device in real time."""

from __future__ import annotations

from flare.graphs.device import Device
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.paced import PacedDevice
from flare.graphs.sim.timing import by_kind
from flare.machines.graph import GraphKind
from tests.graphs.conformance import DeviceConformance
from tests.graphs.conformance_mixed import MixedConformance
from tests.graphs.conformance_rounds import RoundConformance, SharingConformance
from tests.graphs.conformance_stages import StageConformance

MICROSECONDS_100 = 100_000


def make_sim() -> Device:
    """A device whose frames take 0.1 ms."""
    process = RandomAcceptance(seed=1, mean=0.6, spread=0.3)
    core = SimCore(
        4,
        64,
        16,
        by_kind(dict.fromkeys(GraphKind, MICROSECONDS_100)),
        acceptance=process,
        confidence=process.confidence,
        state_rows=2,
        strict=True,
    )
    return PacedDevice(core)


class TestSim(DeviceConformance):
    """Every check, on the simulated device."""

    make = staticmethod(make_sim)


class TestSimMixed(MixedConformance):
    """Mixed graphs and packed prompts."""

    make = staticmethod(make_sim)


class TestSimRounds(RoundConformance):
    """Speculative rounds."""

    make = staticmethod(make_sim)


class TestSimSharing(SharingConformance):
    """Confidence, and programs that share out their target rows."""

    make = staticmethod(make_sim)


class TestSimStages(StageConformance):
    """State operations."""

    make = staticmethod(make_sim)
