"""The conformance suite on the simulated device in real time."""

from __future__ import annotations

from flare.graphs.device import Device
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.paced import PacedDevice
from flare.graphs.sim.timing import by_kind
from flare.machines.graph import GraphKind
from tests.graphs.conformance import DeviceConformance

MICROSECONDS_100 = 100_000


def make_sim() -> Device:
    """A device whose frames take 0.1 ms."""
    core = SimCore(4, 64, 16, by_kind(dict.fromkeys(GraphKind, MICROSECONDS_100)), strict=True)
    return PacedDevice(core)


class TestSim(DeviceConformance):
    """Every check, on the simulated device."""

    make = staticmethod(make_sim)
