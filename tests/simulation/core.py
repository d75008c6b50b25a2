"""What a world asks of its device.

Owns the protocol, and the simulated device in a world's terms. Surprising rule: time is the caller's; the device says
when its next completion is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flare.graphs.frames import Completion, Frame
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.timing import Fault, Faults
from flare.machines.ids import Fence

from .host import TOKENS
from .scenario import Scenario


class Core(Protocol):
    """A device in virtual time, as `SimCore` is."""

    def submit(self, frame: Frame, now_ns: int) -> None:
        """Queue a frame."""
        ...

    def next_finish_ns(self) -> int | None:
        """When the oldest frame's completion is due."""
        ...

    def finish(self, now_ns: int) -> Completion:
        """Take it."""
        ...


def simulated(scenario: Scenario, faults: Mapping[Fence, Fault], late_ns: int, acceptance: RandomAcceptance) -> SimCore:
    """The device of a scenario; late completions come `late_ns` later."""
    sim = SimCore(
        scenario.slots,
        scenario.pages,
        scenario.page_tokens,
        scenario.duration(),
        tokens=TOKENS,
        faults=Faults(faults, late_ns=late_ns),
        acceptance=acceptance,
        confidence=acceptance.confidence if scenario.device_allocates else None,
        state_rows=scenario.state_rows,
        strict=True,
    )
    sim.prepare(scenario.catalog)
    return sim
