"""The paced device: periods, measured times, and death. Times are asserted from below alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from flare.graphs.device import DeviceLost
from flare.graphs.frames import Completion
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.paced import PacedDevice
from flare.graphs.sim.timing import Fault, Faults, by_kind
from flare.machines.graph import GraphKind
from flare.machines.ids import Fence, RequestHandle
from tests.graphs.sim.test_core import decode, frame, prefill

MS = 1_000_000


class Rig:
    """A started device and its completions."""

    def __init__(self, decode_ns: int, faults: Faults | None = None) -> None:
        duration = by_kind({GraphKind.PREFILL: 0, GraphKind.DECODE: decode_ns})
        self.device = PacedDevice(SimCore(4, 16, 16, duration, faults=faults, strict=True))
        self.completions: queue.Queue[Completion] = queue.Queue()
        self.device.start(self.completions.put)

    def wait(self) -> Completion:
        """The next completion."""
        return self.completions.get(timeout=60)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Decode frames of 2 ms."""
    rig = Rig(2 * MS)
    yield rig
    rig.device.close()


def test_frames_last_at_least_their_duration_and_periods_are_kept(rig: Rig) -> None:
    rig.device.submit(frame(1, prefill()))
    assert rig.wait().device_ns >= 1
    rig.device.submit(frame(2, decode()))
    for fence in range(3, 12):
        rig.device.submit(frame(fence, decode()))
        completion = rig.wait()
        assert completion.fence == fence - 1
        assert completion.device_ns > 0
    rig.wait()
    periods = rig.device.periods()
    assert len(periods) == 10
    assert not periods[0].queued
    assert sum(period.period_ns for period in periods[1:]) >= 9 * 2 * MS - 2 * MS


def test_untimed_and_failed_frames_pass_through() -> None:
    rig = Rig(0, Faults({Fence(2): Fault.UNTIMED, Fence(3): Fault.FAILED}))
    for fence, lane in ((1, prefill()), (2, decode()), (3, decode()), (4, decode())):
        rig.device.submit(frame(fence, lane))
        completion = rig.wait()
        assert (completion.error is None) == (fence != 3)
        assert (completion.device_ns == 0) == (fence == 2)
    rig.device.close()


def test_a_device_that_is_lost_fails_its_frames_and_takes_no_more() -> None:
    rig = Rig(5 * MS, Faults({Fence(2): Fault.LOST}))
    rig.device.submit(frame(1, prefill()))
    rig.wait()
    rig.device.submit(frame(2, decode()))
    rig.device.submit(frame(3, decode()))
    assert [rig.wait().error for _ in range(2)] == ["the device died in frame 2"] * 2
    with pytest.raises(DeviceLost, match="died in frame 2"):
        rig.device.submit(frame(4, decode()))
    rig.device.close()


def test_a_page_given_twice_kills_a_strict_device(rig: Rig) -> None:
    rig.device.submit(frame(1, prefill()))
    rig.wait()
    rig.device.submit(frame(2, prefill(RequestHandle(1, 1), (0,))))
    rig.wait()
    rig.device.submit(frame(3, decode()))
    assert "lost a page" in (rig.wait().error or "")
    with pytest.raises(DeviceLost, match="lost a page"):
        rig.device.submit(frame(4, decode()))


def test_a_device_that_never_started_can_be_closed() -> None:
    device = PacedDevice(SimCore(4, 16, 16, by_kind(dict.fromkeys(GraphKind, 1))))
    device.close()
    with pytest.raises(DeviceLost, match="closed"):
        device.submit(frame(1, prefill()))
