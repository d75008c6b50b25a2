"""A server in virtual time over measured synthetic durations: what scenarios are played on.

Owns virtual time, the requests of a scenario and a log of all that happened. Does not own any decision: scheduler,
selector and driver are the product's. Surprising rule: unlike a server's, its catalog is measured before the first
request; scenarios say where that is otherwise.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare.config.loader import load_policy
from flare.config.schema import Policy
from flare.engine.driver import Driver
from flare.graphs.frames import Binding, Completion, LaneInput, LaneResult, Sampling, StageInput
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.timing import Faults, by_shape
from flare.graphs.sim.tokens import TokenSource, hash_tokens
from flare.machines.acceptance import WEIGHT_MAX
from flare.machines.beliefs import Beliefs
from flare.machines.durations import DurationTable
from flare.machines.events import (
    Arrive,
    Deliver,
    Dispatch,
    Effect,
    Event,
    FrameCounted,
    LedgerMoved,
    Published,
    RequestLost,
    Retired,
    SubmitFrame,
)
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.ids import RequestHandle, RequestId
from flare.machines.pages import PagePool
from flare.machines.request import RequestSpec
from flare.machines.scheduler import Scheduler
from flare.machines.selection.view import Plan, View
from flare.machines.waiting import WaitingQueue
from flare.scheduling import policy_row

START_NS = 1_000_000_000
PAGE_TOKENS = 1_024
PAGES = 512
STEPS_MAX = 200_000
_SAMPLING = Sampling(temperature=0.0)

Costs = Mapping[GraphShape, float]
"""Milliseconds that each graph takes."""


class Output(NamedTuple):
    """A delivery: when it became visible, and how many tokens it brought."""

    at_ms: float
    tokens: int


@dataclass
class Client:
    """One request and what came of it. Times are ms from the start of the scenario."""

    id: RequestId
    spec: RequestSpec
    arrived_ms: float
    outputs: list[Output] = field(default_factory=list)
    ended_ms: float | None = None
    retired_ms: float | None = None
    error: str | None = None

    @property
    def prompt(self) -> NDArray[np.int32]:
        """Its tokens, like no other's."""
        return np.arange(self.spec.prompt_tokens, dtype=np.int32) + 100_000 * self.id

    @property
    def slot(self) -> int:
        """Its slot, where as many requests as slots came one after the other."""
        return self.id - 1

    @property
    def first_ms(self) -> float:
        """From its arrival to its first output."""
        return self.outputs[0].at_ms - self.arrived_ms

    @property
    def gaps_ms(self) -> list[float]:
        """Between its outputs."""
        return [after.at_ms - before.at_ms for before, after in itertools.pairwise(self.outputs)]

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return sum(output.tokens for output in self.outputs)

    @property
    def complete(self) -> bool:
        """Whether it had all its tokens, and no error."""
        return self.ended_ms is not None and self.error is None and self.tokens == self.spec.max_tokens


@dataclass
class Played:
    """A frame: its plan, the view that it was chosen from, and when it was committed (`behind` others in flight)."""

    plan: Plan
    view: View
    at_ms: float
    behind: int
    end_ms: float | None = None

    @property
    def shape(self) -> GraphShape:
        """Its graph."""
        return self.plan.shape

    @property
    def kind(self) -> GraphKind:
        """The kind of its graph."""
        return self.plan.shape.kind

    @property
    def slots(self) -> tuple[int, ...]:
        """Whom it serves."""
        return tuple(lane.slot for lane in self.plan.lanes)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that it consumes."""
        return sum(lane.tokens for lane in self.plan.lanes if not lane.delivers)


class _Accepted:
    """How many proposals each round of a client accepts."""

    _KEY = TokenSource().rules(Binding((), _SAMPLING, (), 1)).key

    def __init__(self) -> None:
        self._counts: dict[int, int | Callable[[int], int]] = {}

    def add(self, prompt: NDArray[np.int32], accepted: int | Callable[[int], int]) -> None:
        """The client with this prompt, which no other has; `accepted` may depend on its outputs so far."""
        self._counts[hash_tokens(prompt, 0) ^ self._KEY] = accepted

    def __call__(self, request: int, output_index: int, drafts: int) -> int:
        """See `Acceptance`."""
        accepted = self._counts[request]
        return min(accepted if isinstance(accepted, int) else accepted(output_index), drafts)


def _seed(beliefs: Beliefs | None, accepted: int) -> None:
    """A long history: prefixes of up to `accepted` proposals were always accepted, and longer ones never."""
    assert beliefs is not None
    acceptance = beliefs.acceptance[Source.DRAFT]
    depth = len(acceptance.survival)
    acceptance._means = [1.0] * accepted + [0.0] * (depth - accepted)
    acceptance._weights = [WEIGHT_MAX] * depth
    acceptance._survive()


class Bench:
    """Requests served from time 0 on. A frame takes what `costs_ns` says of its graph when it is submitted, at first
    `costs_ms`; `measured_ms` is what graphs were measured to take before, `costs_ms` unless given."""

    def __init__(
        self,
        costs_ms: Costs,
        *,
        slots: int = 16,
        policy: str = "balanced",
        measured_ms: Costs | None = None,
        faults: Faults | None = None,
        state_rows: int = 0,
        keeps_prefixes: bool = False,
        **coefficients: float,
    ) -> None:
        self.catalog = tuple(costs_ms)
        self.policy: Policy = msgspec.structs.replace(load_policy(policy), **coefficients)
        self.now_ns = START_NS
        durations = DurationTable(self.catalog, self.policy.estimate_ttl_ns)
        for shape, ms in (costs_ms if measured_ms is None else measured_ms).items():
            durations.observe(shape, round(ms * 1e6), START_NS)
        self.scheduler = Scheduler(
            self.catalog,
            policy_row(self.policy),
            slots=slots,
            pages=PagePool(PAGES, PAGE_TOKENS),
            waiting=WaitingQueue(None, None),
            durations=durations,
            adaptation_ms=self.policy.adaptation_ms,
            state_rows=state_rows,
            adaptive_verification_alpha=self.policy.adaptive_verification_alpha,
            keeps_prefixes=keeps_prefixes,
        )
        self.costs_ns = {shape: round(ms * 1e6) for shape, ms in costs_ms.items()}
        self._accepted = _Accepted()
        duration = by_shape(self.costs_ns)
        self._core = SimCore(
            *(slots, PAGES, PAGE_TOKENS, duration),
            faults=faults,
            acceptance=self._accepted,
            state_rows=state_rows,
            strict=True,
        )
        self._core.prepare(self.catalog)
        self._driver = Driver(self.scheduler, self, lambda frame: self._core.submit(frame, self.now_ns))
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.clients: dict[RequestId, Client] = {}
        self.frames: list[Played] = []
        self.ledger: list[tuple[int, str]] = []
        """When the refresh ledger moved, in ns from the start, and to which state."""
        self.probe_ledger: list[tuple[float, str, int]] = []
        """When the probe ledger moved, to which state, and the execution that its credit paid for then, in ns."""

    @property
    def now_ms(self) -> float:
        """Time since the start."""
        return (self.now_ns - START_NS) / 1e6

    # The load

    def at(self, ms: float, action: Callable[[], None]) -> None:
        """Do something `ms` after the start."""
        heapq.heappush(self._events, (START_NS + round(ms * 1e6), next(self._order), action))

    def arrive(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        at_ms: float = 0.0,
        accepted: int | Callable[[int], int] = 0,
        seeded: bool = False,
        **fields: object,
    ) -> Client:
        """A request that arrives then, of whose proposals each round accepts so many; `seeded`: as if that had long
        been observed (it must find a slot at once)."""
        spec = RequestSpec("client", prompt_tokens, max_tokens, **fields)  # type: ignore[arg-type]
        client = Client(RequestId(len(self.clients) + 1), spec, at_ms)
        self.clients[client.id] = client
        self._accepted.add(client.prompt, accepted)

        def arrival() -> None:
            self.apply(Arrive(client.id, spec))
            if seeded and isinstance(accepted, int):
                _seed(self.scheduler.requests[client.id].beliefs, accepted)

        self.at(at_ms, arrival)
        return client

    def decoding(self, count: int, prompt_tokens: int = 64, max_tokens: int = 20_000, **fields: object) -> list[Client]:
        """Requests that arrive together now and run until all of them have an output."""
        clients = [self.arrive(prompt_tokens, max_tokens, at_ms=self.now_ms, **fields) for _ in range(count)]  # type: ignore[arg-type]
        self.run(lambda: all(client.outputs for client in clients))
        return clients

    # Time

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Go on until it holds, or to the end of everything."""
        for _ in range(STEPS_MAX):
            if until is not None and until():
                return
            if not self._step():
                assert until is None, "everything has ended, and what was waited for has not come"
                assert self.scheduler.idle, "nothing is under way, and requests are left"
                return
        raise AssertionError("the scenario does not end")

    def run_for(self, ms: float) -> list[Played]:
        """Go on for this long; the frames that were committed meanwhile."""
        before, reached = len(self.frames), list[bool]()
        self.at(self.now_ms + ms, lambda: reached.append(True))
        self.run(lambda: bool(reached))
        return self.frames[before:]

    def _step(self) -> bool:
        """Work off the next instant; False if there is none."""
        finish_ns = self._core.next_finish_ns()
        instants = [ns for ns in (finish_ns, self._events[0][0] if self._events else None) if ns is not None]
        if not instants:
            return False
        self.now_ns = min(instants)
        while self._events and self._events[0][0] == self.now_ns:
            heapq.heappop(self._events)[2]()
        completions: deque[Completion] = deque()
        if finish_ns == self.now_ns:
            completions.append(self._core.finish(self.now_ns))
        self._driver.turn(completions, self.now_ns)
        self.scheduler.check()
        return True

    def apply(self, event: Event) -> None:
        """Tell the scheduler of an event, now."""
        self.execute(self.scheduler.apply(event, self.now_ns), (), self.now_ns)

    # The host of the driver

    def lane(self, dispatch: Dispatch, _shape: GraphShape) -> LaneInput:
        """The part of a frame that serves one request."""
        work, stage = dispatch.work, dispatch.stage
        client = self.clients[dispatch.request]
        spec, handle = client.spec, RequestHandle(work.slot, work.generation)
        binding = None
        if dispatch.pages is not None:
            binding = Binding(dispatch.pages, _SAMPLING, (), spec.max_tokens, initialize=spec.initialize)
        if stage is not None:
            state = StageInput(stage.state_row, stage.operation, None, stage.retires)
            return LaneInput(handle, work.start, emits=False, binding=binding, stage=state)
        prompts, end = not work.delivers, work.start + work.tokens
        return LaneInput(
            *(handle, work.start, work.emits),
            tokens=client.prompt[work.start : end] if prompts else None,
            target=int(client.prompt[end]) if prompts and end < spec.prompt_tokens else None,
            binding=binding,
            width=1 if prompts else work.tokens,
        )

    def committed(self, effects: Sequence[Effect], view: View, now_ns: int) -> None:
        """Note the plan."""
        for effect in effects:
            if isinstance(effect, SubmitFrame):
                self.frames.append(Played(effect.plan, view, self.now_ms, len(view.window)))
        self.execute(effects, (), now_ns)

    def execute(self, effects: Sequence[Effect], results: Sequence[LaneResult], now_ns: int) -> None:
        """Publish every delivery at once, and note what became of frames and requests."""
        drawn = {result.handle: len(result.tokens) for result in results}
        for effect in effects:
            match effect:
                case Deliver(request, handle, fence, ended):
                    client = self.clients[request]
                    client.outputs.append(Output(self.now_ms, drawn[handle]))
                    if ended is not None:
                        client.ended_ms = self.now_ms
                    self.apply(Published(request, fence))
                case Retired(request):
                    self.clients[request].retired_ms = self.now_ms
                case RequestLost(request, error):
                    self.clients[request].error = error
                case FrameCounted(fence):
                    self.frames[fence - 1].end_ms = self.now_ms
                case LedgerMoved("refresh", _, after):
                    self.ledger.append((self.now_ns - START_NS, after))
                case LedgerMoved("probe", _, after, _, credit_ns):
                    self.probe_ledger.append((self.now_ms, after, credit_ns))
                case _:
                    pass
