"""Faults planted in the device's own code, each of which the suites find.

Owns the faults. Surprising rule: each is a plausible slip of one line, with which a single request is served well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch

from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.seats import Flight, Seat
from flare.graphs.frames import Frame
from flare.machines.graph import GraphShape
from tests.graphs.conformance import DeviceConformance
from tests.graphs.cuda.devices import PlainDevice, make_cuda
from tests.graphs.host import CATALOG, Host
from tests.simulation.__main__ import EVENTS
from tests.simulation.cuda_world import CudaWorld, SimulatedCuda, cuda_scenario

SEEDS = 40


class ReusesEarly(CudaDevice):
    """A seat is free as soon as its frame has been asked for, and the card has yet to read it."""

    def _board(self, frame: Frame) -> Flight:
        flight = super()._board(frame)
        if flight.seat is not None:
            self._seats.appendleft(flight.seat)
        return flight


class SharesMemory(CudaDevice):
    """Both seats have the same pinned memory, which is written again while the card has yet to read it."""

    def _load(self, catalog: Sequence[GraphShape]) -> Callable[[GraphShape], Callable[[], None]]:
        fresh, known = self._runtime.pinned, dict[int, torch.Tensor]()
        with patch.object(self._runtime, "pinned", lambda nbytes: known.setdefault(nbytes, fresh(nbytes))):
            return super()._load(catalog)


class TellsEarly(CudaDevice):
    """A frame is done before its outputs have been copied."""

    def _enqueue(self, shape: GraphShape, seat: Seat, sends: int, fetches: int) -> str | None:
        error = super()._enqueue(shape, seat, sends, 0)
        self._runtime.copy(seat.outputs[:fetches], self._outputs[:fetches])
        return error


class CopiesAside(CudaDevice):
    """Outputs are copied on another stream, which does not wait for the replay."""

    def _enqueue(self, shape: GraphShape, seat: Seat, sends: int, fetches: int) -> str | None:
        error = super()._enqueue(shape, seat, sends, 0)
        self._runtime.copy_aside(seat.outputs[:fetches], self._outputs[:fetches])  # type: ignore[attr-defined]
        return error


class KeepsTheOldRow(CudaDevice):
    """A slot's next generation is not bound on the card: what it gets is its predecessor's."""

    def _enqueue(self, shape: GraphShape, seat: Seat, sends: int, fetches: int) -> str | None:
        seat._bound_slot[:] = self.request_slots
        return super()._enqueue(shape, seat, sends, fetches)


class ServesTheStale(PlainDevice):
    """Whoever names a slot is served from it, whatever the generation."""

    def _check(self, frame: Frame) -> None:
        for lane in frame.lanes:
            if lane.binding is None:
                self._mirror.rows.generation[lane.handle.slot] = lane.handle.generation
        super()._check(frame)


@pytest.mark.parametrize("plant", [ReusesEarly, SharesMemory, TellsEarly, CopiesAside, KeepsTheOldRow])
def test_worlds_find(plant: type[CudaDevice]) -> None:
    assert first_failure(type(plant.__name__, (plant, SimulatedCuda), {})) is not None


def test_worlds_find_nothing_in_the_device_itself() -> None:
    assert first_failure(SimulatedCuda, 5) is None


def test_conformance_finds_a_result_of_a_stale_generation() -> None:
    device = make_cuda(CATALOG, kind=ServesTheStale)
    try:
        with pytest.raises(AssertionError):
            DeviceConformance().test_a_slot_is_used_again_by_a_new_generation(Host(device))
    finally:
        device.close()


def first_failure(kind: type[SimulatedCuda], seeds: int = SEEDS) -> int | None:
    """The first seed whose world fails with this device."""
    for seed in range(seeds):
        world = type("Planted", (CudaWorld,), {"kind": kind})(cuda_scenario(seed))
        try:
            world.run(EVENTS)
        except AssertionError:
            return seed
    return None
