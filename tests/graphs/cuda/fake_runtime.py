"""CUDA without a card: a queue that a thread works off, over CPU tensors.

Owns streams with order and delays, events, copies that really happen late, and calls that fail as planned. Does not own
what is done with it: the device's code is the real one. Surprising rule: everything happens as late as it may. While it
is `held`, nothing runs at all but by a seeded whim and by `release`, so that the same seed brings the same order;
otherwise a thread of its own works, each step after a delay.
"""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flare.graphs.cuda.failures import LOST, MEMORY
from flare.graphs.cuda.runtime import CardFacts, CudaError, Event, Graph
from tests.graphs.cuda.capture_mode import CaptureMode

FACTS = CardFacts("a fake card", (9, 0), (13, 0), (13, 0), 1 << 34)
BLOCKING = ("free_bytes", "settle", "pinned", "capture", "event", "wait", "close")
"""Calls that may wait for the card."""


class Synchronized(AssertionError):
    """A call that may block was made on the thread that must not."""


@dataclass(eq=False)
class FakeEvent:
    """The last time that it was recorded: whether that has happened, and when."""

    timed: bool
    mark: threading.Event = field(default_factory=threading.Event)
    at_ns: int = 0


@dataclass(frozen=True, eq=False)
class FakeGraph:
    """A body."""

    body: Callable[[], None]


class FakeStream:
    """Does what it is asked in order, later. `hurt` hears of a step that raised."""

    def __init__(self, hurt: Callable[[BaseException], None]) -> None:
        self._hurt = hurt
        self._steps: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()

    def put(self, step: Callable[[], None]) -> None:
        """Ask for a step."""
        self._steps.append(step)

    def step(self) -> bool:
        """Do the oldest, if there is one."""
        with self._turn:
            if not self._steps:
                return False
            try:
                self._steps[0]()
            except Exception as error:  # noqa: BLE001 - a kernel that fails takes the card with it
                self._hurt(error)
            self._steps.popleft()
            return True

    @property
    def idle(self) -> bool:
        """Whether all is done."""
        return not self._steps


class FakeRuntime:
    """See `Runtime`. `slowest_s`: the longest delay of a step. `free`: free memory, of which nothing is taken but
    `graph_bytes` for each graph.

    `fails` has, for the name of a call, which of its calls from now on fail (1 is the next), and with what error.
    """

    def __init__(
        self, *, seed: int = 0, slowest_s: float = 0.0002, free: int = 1 << 34, checks: bool = True, held: bool = False
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.fails: dict[str, dict[int, str]] = {}
        self.calls: Counter[str] = Counter()
        self.loop_thread: int | None = None
        self.free = free
        self.graph_bytes = 0
        self.total = FACTS.total_bytes
        self._checks = checks
        self._slowest_s = slowest_s
        self._random = random.Random(seed)
        self._streams = (FakeStream(self._hurt), FakeStream(self._hurt))
        self._lost: CudaError | None = None
        self._closing = threading.Event()
        self._released = threading.Semaphore(0)
        self._held = held
        self._asked = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(stream,), name="fake-stream", daemon=True)
            for stream in self._streams
        ]
        for thread in self._threads:
            thread.start()

    # What tests do

    def hold(self) -> None:
        """From now on time stands still, but for whims and `release`."""
        self.settle()
        self._held = True

    def release(self, waits: int = 1) -> None:
        """Let so many calls of `wait` have what they wait for."""
        for _ in range(waits):
            self._released.release()

    def let_go(self) -> None:
        """Time goes on."""
        self._held = False
        self.release(1_000)
        self._wake()

    def fail(self, call: str, at: int = 1, name: str = "cudaErrorInvalidValue") -> None:
        """The `at`-th call of this name from now on fails; from a lost card on, all do."""
        self.fails.setdefault(call, {})[self.calls[call] + at] = name

    def copy_aside(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """A copy on the second stream, which is in no order with the first."""
        self._put(lambda: _copy(to, source), stream=1)

    # What the device asks

    def facts(self) -> CardFacts:
        """See `Runtime`."""
        return CardFacts(FACTS.name, FACTS.capability, FACTS.driver, FACTS.runtime, self.total)

    def free_bytes(self) -> int:
        """See `Runtime`."""
        self._called("free_bytes")
        return self.free

    def settle(self) -> None:
        """See `Runtime`."""
        self._called("settle")
        for stream in self._streams:
            while stream.step():
                pass

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Runtime`."""
        self._called("pinned")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def capture(self, body: Callable[[], None]) -> Graph:
        """See `Runtime`. The body runs once, and must do nothing that cannot be captured."""
        self._called("capture")
        self.settle()
        self.free -= self.graph_bytes
        if self._checks:
            with CaptureMode():
                body()
        return FakeGraph(body)

    def launch(self, graph: Graph) -> None:
        """See `Runtime`."""
        self._called("launch")
        assert isinstance(graph, FakeGraph)
        self._put(graph.body)

    def run(self, body: Callable[[], None]) -> None:
        """See `Runtime`."""
        self._called("run")
        self._put(body)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See `Runtime`."""
        self._called("copy")
        assert to.shape == source.shape and to.is_contiguous() and source.is_contiguous()
        self._put(lambda: _copy(to, source))

    def event(self, *, timed: bool) -> Event:
        """See `Runtime`."""
        self._called("event")
        return FakeEvent(timed)

    def record(self, event: Event) -> None:
        """See `Runtime`."""
        self._called("record")
        assert isinstance(event, FakeEvent)
        event.mark = mark = threading.Event()

        def happen() -> None:
            event.at_ns = time.perf_counter_ns()
            mark.set()

        self._put(happen)

    def wait(self, event: Event) -> None:
        """See `Runtime`."""
        self._called("wait")
        assert isinstance(event, FakeEvent)
        mark = event.mark
        if self._held:
            self._released.acquire()
            while not mark.is_set() and self._streams[0].step():
                pass
        mark.wait()
        self._check_lost("wait")

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """See `Runtime`."""
        self._called("elapsed_ns")
        assert isinstance(began, FakeEvent) and isinstance(ended, FakeEvent) and began.timed and ended.timed
        assert began.mark.is_set() and ended.mark.is_set()
        return ended.at_ns - began.at_ns

    def close(self) -> None:
        """See `Runtime`."""
        if not self._closing.is_set():
            self._held = False
            self._closing.set()
            self._wake()
        for thread in self._threads:
            thread.join()

    # Time

    def _put(self, step: Callable[[], None], stream: int = 0) -> None:
        self._streams[stream].put(step)
        if not self._held:
            self._wake()
        elif self._random.random() < 0.3:
            for _ in range(self._random.randint(1, 4)):
                self._streams[self._random.randrange(2)].step()

    def _wake(self) -> None:
        with self._asked:
            self._asked.notify_all()

    def _work(self, stream: FakeStream) -> None:
        torch.set_num_threads(1)
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._closing.is_set() or not (self._held or stream.idle))
            if stream.idle and self._closing.is_set():
                return
            if self._slowest_s:
                time.sleep(self._random.random() * self._slowest_s)
            stream.step()

    # Failures

    def _called(self, call: str) -> None:
        """Count a call. Raises what is planned for it, or what every call does on a lost card."""
        if call in BLOCKING and threading.get_ident() == self.loop_thread:
            raise Synchronized(f"{call} on the loop's thread")
        self.calls[call] += 1
        self._check_lost(call)
        name = self.fails.get(call, {}).pop(self.calls[call], None)
        if name is not None:
            error = CudaError(call, name, "as planned", lost=name in LOST, memory=name in MEMORY)
            if error.lost:
                self._lost = error
            raise error

    def _hurt(self, error: BaseException) -> None:
        traceback.print_exception(error)
        self._lost = CudaError("launch", "cudaErrorIllegalAddress", repr(error), lost=True)

    def _check_lost(self, call: str) -> None:
        if self._lost is not None:
            raise CudaError(call, self._lost.name, "as before", lost=True)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)
