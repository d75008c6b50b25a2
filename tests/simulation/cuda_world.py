"""Worlds whose device is the CUDA device: all of its code but the model, on the fake runtime, in virtual time.

Owns how a seed's scenario is cut to what that device has, and the way from virtual time to a runtime that stands still
until it is told. Does not own the worlds (`world`). Surprising rule: between two instants of a world the card works off
as much as a seeded whim has it, and the rest only when its completion is due; so a frame's copies happen anywhere
between its submission and its end.
"""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from flare.graphs.cuda.seats import Flight
from flare.graphs.frames import Completion, Frame
from flare.graphs.memory.pages import PAGE_TOKENS
from flare.graphs.programs.extents import decodes, prompt_lanes
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.timing import Fault
from flare.machines.graph import GraphShape
from flare.machines.ids import Fence
from tests.graphs.cuda.devices import TinyDevice
from tests.graphs.cuda.fake_runtime import FakeRuntime

from .host import TOKENS
from .scenario import LONGEST, Scenario, scenario
from .world import World

FAILING = (("copy", 1), ("copy", 2), ("record", 1), ("record", 2), ("record", 3), ("launch", 1))
"""The calls that a failed frame may fail in when it is submitted, and which of them."""
PATIENCE_S = 60.0


def cuda_scenario(seed: int) -> Scenario:
    """The scenario of a seed, with the kinds of graph and the pages that the device has."""
    whole = scenario(seed)
    costs: dict[GraphShape, int] = {}
    for shape, cost_ns in whole.costs_ns.items():
        if decodes(shape) or prompt_lanes(shape):
            costs.setdefault(msgspec.structs.replace(shape, draft_depth=shape.width - 1), cost_ns)
    largest = -(-LONGEST // PAGE_TOKENS)
    return replace(
        whole,
        catalog=tuple(costs),
        costs_ns=costs,
        pages=random.Random(seed + 3).randint(largest, largest * whole.slots),
        page_tokens=PAGE_TOKENS,
        state_rows=0,
    )


class SimulatedCuda(TinyDevice):
    """The device of a world; notes which frames it waits for."""

    def __init__(self, scenario: Scenario, runtime: FakeRuntime, acceptance: RandomAcceptance) -> None:
        super().__init__(
            scenario.catalog,
            runtime,
            slots=scenario.slots,
            pages=scenario.pages,
            max_model_len=LONGEST,
            tokens=TOKENS,
            acceptance=acceptance,
        )
        self.waits: dict[Fence, bool] = {}

    def _board(self, frame: Frame) -> Flight:
        flight = super()._board(frame)
        self.waits[frame.fence] = flight.seat is not None
        return flight


class CudaCore:
    """What a world asks of `SimCore`, of a CUDA device."""

    def __init__(
        self,
        scenario: Scenario,
        faults: Mapping[Fence, Fault],
        late_ns: int,
        acceptance: RandomAcceptance,
        kind: type[SimulatedCuda] = SimulatedCuda,
    ) -> None:
        self._faults = faults
        self._late_ns = late_ns
        self._duration = scenario.duration()
        self._random = random.Random(scenario.seed + 4)
        self._tells = scenario.device_allocates
        self.runtime = FakeRuntime(seed=scenario.seed, slowest_s=0.0, checks=False)
        self.device = kind(scenario, self.runtime, acceptance)
        self.device.prepare(scenario.catalog, lambda *_: None)
        self.runtime.hold()
        self._completions: queue.Queue[Completion] = queue.Queue()
        self.device.start(self._completions.put)
        self._due: deque[tuple[Fence, int, int]] = deque()
        self._free_at_ns = self._delivered_at_ns = 0
        self.failed: set[Fence] = set()
        self._fail_at_end: set[Fence] = set()

    def submit(self, frame: Frame, now_ns: int) -> None:
        """See `SimCore`."""
        fault = self._faults.get(frame.fence)
        if fault is Fault.FAILED:
            self.failed.add(frame.fence)
            if self._random.random() < 0.8:
                self.runtime.fail(*self._random.choice(FAILING))
            else:
                self._fail_at_end.add(frame.fence)
        self.device.submit(frame)
        self.runtime.fails.clear()
        start_ns = max(now_ns, self._free_at_ns)
        self._free_at_ns = end_ns = start_ns + self._duration(frame)
        late_ns = self._late_ns if fault is Fault.LATE else 0
        self._delivered_at_ns = max(end_ns + late_ns, self._delivered_at_ns)
        device_ns = 0 if fault is Fault.UNTIMED else max(1, end_ns - start_ns)
        self._due.append((frame.fence, self._delivered_at_ns, device_ns))

    def next_finish_ns(self) -> int | None:
        """See `SimCore`."""
        return self._due[0][1] if self._due else None

    def finish(self, now_ns: int) -> Completion:
        """See `SimCore`."""
        fence, due_ns, device_ns = self._due.popleft()
        assert now_ns >= due_ns
        if fence in self._fail_at_end:
            self.runtime.fail("elapsed_ns")
        if self.device.waits[fence]:
            self.runtime.release()
        completion = self._completions.get(timeout=PATIENCE_S)
        self.runtime.fails.clear()
        assert completion.fence == fence
        assert not self.device.tiny.complaints, self.device.tiny.complaints
        confidence = completion.confidence if self._tells else None
        return replace(completion, device_ns=device_ns, confidence=confidence)

    def close(self) -> None:
        """Stop its threads."""
        self.runtime.let_go()
        self.device.close()


class CudaWorld(World):
    """A world over the device."""

    kind: type[SimulatedCuda] = SimulatedCuda

    def make_device(self, late_ns: int, acceptance: RandomAcceptance) -> CudaCore:
        """The device in place of the simulated one."""
        return CudaCore(self.scenario, self.faults, late_ns, acceptance, self.kind)

    def fails(self, fence: Fence) -> bool:
        """Faults are planned when a frame is submitted, and stay when the world calms down."""
        assert isinstance(self.sim, CudaCore)
        return fence in self.sim.failed

    def run(self, events: int) -> None:
        """See `World`."""
        try:
            super().run(events)
        finally:
            assert isinstance(self.sim, CudaCore)
            self.sim.close()
