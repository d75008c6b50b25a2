"""A whole server in virtual time: scheduler, selector and simulated device, driven by a seed.

Owns time, the load, the faults and what a driver would do with effects; `python -m tests.simulation SEED` runs one
world again. Does not own what is right (`oracle`). Surprising rule: like the server it decides only after all events of
an instant; unlike the server it sometimes commits a plan long after it was chosen.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from flare.graphs.frames import Frame, LaneResult
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.timing import Fault
from flare.machines.commitment import CommitRefused
from flare.machines.durations import DurationTable
from flare.machines.events import (
    Arrive,
    CancelRequest,
    CompleteFrame,
    CopyOffered,
    Deliver,
    Event,
    HostStop,
    LedgerMoved,
    PreemptRequest,
    Published,
    RequestLost,
    RequestMoved,
    Retired,
    SubmitFrame,
)
from flare.machines.graph import GraphKind, Source
from flare.machines.ids import Fence, RequestHandle, RequestId
from flare.machines.pages import PagePool
from flare.machines.scheduler import Scheduler
from flare.machines.selection.board import Board
from flare.machines.selection.select import decide, select
from flare.machines.selection.view import Decision, Plan, View
from flare.machines.waiting import WaitingQueue

from .core import Core, simulated
from .host import Host
from .malformed import spoil
from .oracle import Oracle, Report
from .records import check_counters, records_of, report_of
from .scenario import MS, Scenario
from .seen import STAGES
from .view_oracle import check_view

STEPS_MAX = 20_000


class World:
    """One seed. `run` raises AssertionError, or whatever broke."""

    def __init__(self, scenario: Scenario, tell: Callable[[str], None] = lambda _line: None) -> None:
        self.scenario, self.tell = scenario, tell
        self.rng = random.Random(scenario.seed + 2)
        self.now_ns = self.rng.choice((0, 1, 10**15))
        self.scheduler = Scheduler(
            scenario.catalog,
            scenario.policy,
            slots=scenario.slots,
            pages=PagePool(scenario.pages, scenario.page_tokens),
            waiting=WaitingQueue(scenario.requests_max, scenario.tokens_max, scenario.weights),
            durations=DurationTable(scenario.catalog, scenario.estimate_ttl_ns),
            adaptation_ms=scenario.adaptation_ms,
            state_rows=scenario.state_rows,
            adaptive_verification_alpha=scenario.exponent,
            device_allocates=scenario.device_allocates,
            keeps_prefixes=scenario.keeps_prefixes,
        )
        acceptance = RandomAcceptance(seed=scenario.seed, mean=0.6, spread=0.4)
        self.faults: dict[Fence, Fault] = {}
        self.sim = self.make_device(self.rng.choice((MS, 30 * MS)), acceptance)
        self.oracle = Oracle(
            scenario.catalog,
            slots=scenario.slots,
            pages=scenario.pages,
            page_tokens=scenario.page_tokens,
            state_rows=scenario.state_rows,
            share=scenario.policy.newcomer_share,
            adaptation_ms=scenario.adaptation_ms,
            ttl_ns=scenario.estimate_ttl_ns,
            weights=scenario.weights,
            retires=any(shape.kind is GraphKind.TERMINAL_SNAPSHOT for shape in scenario.catalog),
            keeps_prefixes=scenario.keeps_prefixes,
            exponent=scenario.exponent,
        )
        self.copies = any(shape.source is Source.COPY for shape in scenario.catalog)
        self.queue: list[tuple[int, float, int, Callable[[], None]]] = []
        self.hosts: dict[RequestId, Host] = {}
        self.cancel_at: dict[RequestId, str] = {}
        self.submitted: deque[Frame] = deque()
        self.order = itertools.count()
        self.last_id = 0
        self.calm = False
        self.awaits_completion = False
        self.counts: Counter[str] = Counter()

    def make_device(self, late_ns: int, acceptance: RandomAcceptance) -> Core:
        """The device of the world, whose late completions come `late_ns` later."""
        return simulated(self.scenario, self.faults, late_ns, acceptance)

    def fails(self, fence: Fence) -> bool:
        """Whether a frame's error is one of the faults."""
        return self.faults.get(fence) is Fault.FAILED

    # Time

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something in `delay_ns`; what falls on one instant happens in an order that the seed shuffles."""
        heapq.heappush(self.queue, (self.now_ns + delay_ns, self.rng.random(), next(self.order), action))

    def run(self, events: int) -> None:
        """Load with faults for so many events, then none; everything must come to its end."""
        self.later(0, self.arrivals)
        while self.counts["events"] < events:
            self.instant()
        self.calm = True
        self.faults.clear()
        for _ in range(STEPS_MAX):
            if self.scheduler.idle and not self.queue:
                break
            assert self.queue, "nothing is under way, and requests are left"
            self.instant()
        assert self.scheduler.idle and not self.oracle.requests and not self.hosts
        assert self.scheduler.free_slots == self.scenario.slots
        assert self.scheduler.pages.free == self.scenario.pages
        assert self.scheduler.state_rows.free == self.scenario.state_rows
        assert self.scheduler.waiting.requests == self.scheduler.waiting.tokens == 0

    def instant(self) -> None:
        """All events of the next instant, then decisions."""
        self.now_ns = self.queue[0][0]
        due = []
        while self.queue and self.queue[0][0] == self.now_ns:
            due.append(heapq.heappop(self.queue)[3])
        for action in due:
            action()
        if not self.calm and self.hosts and self.rng.random() < self.scenario.rates.preempt:
            self.preempt(self.rng.choice(sorted(self.hosts)))
        self.decide()

    # Load

    def arrivals(self) -> None:
        """A burst of requests, then a pause."""
        if self.calm:
            return
        scenario = self.scenario
        for index in range(self.rng.randint(1, scenario.burst)):
            self.later(index * scenario.gap_ns, self.arrive)
        self.later(scenario.burst * scenario.gap_ns + self.rng.randint(0, scenario.idle_ns) + MS, self.arrivals)

    def arrive(self) -> None:
        """A request, unless the queue refuses it."""
        if self.calm:
            return
        spec, waiting = self.scenario.spec(self.rng), self.scheduler.waiting
        if self.scheduler.refuses([(spec.prompt_tokens, spec.max_tokens)]):
            assert self.scenario.requests_max is not None or self.scenario.tokens_max is not None
            self.counts["refused"] += 1
            self.counts["events"] += 1
            return
        self.last_id += 1
        request = RequestId(self.last_id)
        self.hosts[request] = Host(request, spec)
        if self.rng.random() < self.scenario.rates.cancel:
            self.cancel_at[request] = self.rng.choice(STAGES)
            if self.cancel_at[request] == "any":
                self.later(self.rng.randint(0, 100) * MS, lambda: self.cancel(request, "any"))
        self.oracle.arrive(request, spec, self.now_ns)
        self.apply(Arrive(request, spec))
        limit = self.scenario.requests_max
        # Those that lost their slot, and those that lack a state row, wait beyond the bound.
        beyond = sum(known.waits and (known.away > 0 or known.needs_row) for known in self.oracle.requests.values())
        assert limit is None or waiting.requests - beyond <= limit
        self.reached(request, "queued")

    def reached(self, request: RequestId, stage: str) -> None:
        """Cancel a request that was to be cancelled here, in this instant or soon."""
        if self.cancel_at.get(request) == stage:
            del self.cancel_at[request]
            self.later(self.rng.choice((0, 0, MS, 7 * MS)), lambda: self.cancel(request, stage))

    def cancel(self, request: RequestId, stage: str) -> None:
        """The client is gone, whether or not its request still is."""
        self.counts["cancelled"] += 1
        self.counts[f"cancelled_{stage}"] += 1
        if request in self.hosts:
            self.hosts[request].over = True
        self.oracle.cancel(request)
        self.apply(CancelRequest(request))

    def preempt(self, request: RequestId) -> None:
        """Somebody wants its slot."""
        leaves = self.oracle.preempt(request, self.now_ns)
        self.counts["preempted"] += leaves
        if leaves and self.rng.random() < 3.0 * self.scenario.rates.cancel:
            self.cancel_at[request] = self.rng.choice(("preempting", "preempted"))
        self.apply(PreemptRequest(request))

    # Events and effects

    def apply(self, event: Event, results: Sequence[LaneResult] = ()) -> None:
        """Apply one event, check everything, and do what it asks for."""
        self.counts["events"] += 1
        self.tell(f"{self.now_ns / 1e6:12.3f} {event}")
        hosts = self.hosts
        effects = self.scheduler.apply(event, self.now_ns)
        self.oracle.settle(effects, self.scheduler, self.now_ns)
        self.check()
        by_handle = {result.handle: result for result in results}
        for effect in effects:
            self.tell(f"{'':12} -> {effect}")
            match effect:
                case Deliver():
                    self.deliver(effect, hosts[effect.request], by_handle[effect.handle])
                case RequestMoved(request, _, _, after, _):
                    self.counts["parked"] += after == "preempted"
                    self.reached(request, after)
                case RequestLost(request, _):
                    self.counts["lost"] += 1
                case Retired():
                    self.counts["retired"] += 1
                case LedgerMoved():
                    self.counts["ledger"] += 1
                case _:
                    pass

    def check(self) -> None:
        """All invariants, and the second account. What nobody knows any longer has no host either."""
        self.scheduler.check()
        self.oracle.compare(self.scheduler)
        self.hosts = {request: host for request, host in self.hosts.items() if request in self.oracle.requests}

    def deliver(self, effect: Deliver, host: Host, result: LaneResult) -> None:
        """Publish now, later, with the next result, or never; perhaps stop."""
        if host.over:
            return
        self.counts["delivered"] += len(result.tokens)
        host.take(result, ended=effect.ended is not None)
        draw, rates = self.rng.random(), self.scenario.rates
        if not self.calm and draw < rates.delay_text:
            delay_ns = self.rng.choice((0, MS, 40 * MS))
            self.later(delay_ns, lambda: self.publish(effect.request, effect.fence))
        elif self.calm or draw > rates.delay_text + rates.hold_text:
            self.publish(effect.request, effect.fence)
        if effect.ended is not None:
            self.counts["completed"] += 1
            host.over = True
        elif result.tokens and not self.calm and self.rng.random() < rates.host_stop:
            if self.rng.random() < 0.7:
                self.stop(effect.request)
            else:
                self.later(self.rng.choice((0, 5 * MS)), lambda: self.stop(effect.request))
        if self.copies and not host.over:
            proposals = self.rng.choice((0, 1, 2, 4, 9))
            self.oracle.offer(effect.request, proposals)
            self.apply(CopyOffered(effect.request, proposals))

    def publish(self, request: RequestId, fence: Fence) -> None:
        """Text reached the client's buffer."""
        self.oracle.publish(request, fence, self.now_ns)
        self.apply(Published(request, fence))

    def stop(self, request: RequestId) -> None:
        """A stop string was found."""
        self.counts["stopped"] += 1
        if request in self.hosts:
            self.hosts[request].over = True
        self.oracle.stop(request, self.now_ns)
        self.apply(HostStop(request))

    # Decisions

    def decide(self) -> None:
        """What a driver does at the end of an instant."""
        scheduler = self.scheduler
        while scheduler.accepts and scheduler.has_runnable:
            view = scheduler.view(self.now_ns)
            check_view(self.oracle, view, self.now_ns)
            board = Board.of(view, scheduler.compiled)
            decision = decide(board)
            self.counts["decisions"] += 1
            if self.rng.random() < 0.05:
                again = select(msgspec.json.decode(msgspec.json.encode(view), type=View))
                assert again == decision == msgspec.json.decode(msgspec.json.encode(decision), type=Decision)
            plan = decision.plan
            if plan is None:
                assert scheduler.in_flight, "requests could be served, the window is empty, and nothing was chosen"
                break
            if not self.calm and self.rng.random() < self.scenario.rates.late_commit:
                self.later(self.rng.choice((0, MS, 50 * MS)), functools.partial(self.commit, plan, board))
                break
            self.commit(plan, board, refusable=False)

    def commit(self, plan: Plan, board: Board, *, refusable: bool = True) -> None:
        """Commit a plan and submit its frame."""
        try:
            effects = self.scheduler.commit(plan, board, self.now_ns)
        except CommitRefused:
            if not refusable:
                raise
            self.counts["refused_commits"] += 1
            self.check()
            return
        for effect in effects:
            if isinstance(effect, SubmitFrame):
                self.submit(effect, board.view)
        self.check()
        for lane in plan.lanes:
            for request in self.scheduler.residents:
                if request.handle == (lane.slot, lane.generation):
                    self.reached(request.id, "in_flight" if lane.tokens else "stage_in_flight")

    def submit(self, effect: SubmitFrame, view: View) -> None:
        """Hand a frame to the device, with the fault that its fence is to have."""
        self.tell(f"{self.now_ns / 1e6:12.3f} {effect}")
        self.oracle.submit(effect, view, self.now_ns)
        self.counts[f"frames_{len(self.submitted) + 1}"] += 1
        if not self.calm:
            fault = self.draw_fault()
            if fault is not None:
                self.counts[fault.value] += 1
                self.faults[effect.fence] = fault
        self.counts[effect.plan.shape.kind.value] += 1
        self.counts[effect.plan.reason.value] += 1
        self.counts["copies"] += effect.plan.shape.source is Source.COPY
        self.counts["allocated"] += effect.plan.allocates
        prefills = {lane.request: self.oracle.requests[lane.request].prefills for lane in effect.lanes}
        source = effect.plan.shape.source
        lanes = tuple(
            self.hosts[lane.request].lane(lane, source, prefills=prefills[lane.request]) for lane in effect.lanes
        )
        frame = Frame(effect.fence, effect.plan.shape, lanes, effect.plan.allocates)
        self.sim.submit(frame, self.now_ns)
        self.submitted.append(frame)
        self.expect_completion()

    def draw_fault(self) -> Fault | None:
        """What goes wrong with the next frame."""
        rates, draw = self.scenario.rates, self.rng.random()
        for fault, rate in ((Fault.FAILED, rates.failed), (Fault.UNTIMED, rates.untimed), (Fault.LATE, rates.late)):
            if draw < rate:
                return fault
            draw -= rate
        return None

    def expect_completion(self) -> None:
        """Take the oldest frame's completion when it is due."""
        finish_ns = self.sim.next_finish_ns()
        if finish_ns is not None and not self.awaits_completion:
            self.awaits_completion = True
            self.later(max(0, finish_ns - self.now_ns), self.complete)

    def complete(self) -> None:
        """The device reports the end of its oldest frame, perhaps wrongly."""
        self.awaits_completion = False
        completion, frame = self.sim.finish(self.now_ns), self.submitted.popleft()
        records, wrong = (
            records_of(self.rng, completion, tells_survival=self.scenario.seed % 3 == 0),
            set[RequestHandle](),
        )
        broken = False
        known = {known.handle: known for known in self.oracle.requests.values()}
        if records and not self.calm and self.rng.random() < self.scenario.rates.malformed:
            self.counts["malformed"] += 1
            lanes = [known[lane.handle] for lane in frame.lanes]
            limits = [k.spec.max_tokens - k.produced for k in lanes]
            records, broken, wrong = spoil(self.rng, records, limits, frame.shape)
        if completion.error is not None:
            assert self.fails(frame.fence), f"the device refuses: {completion.error}"
        failed = completion.error is not None or broken
        failed = failed or any(self.oracle.counts(known[handle].id) for handle in wrong)
        self.counts["failed"] += failed
        reports = dict[RequestId, Report]()
        if not failed:
            ids = {handle: one.id for handle, one in known.items() if handle is not None}
            check_counters(self.oracle, completion, ids)
            reports = {known[record.handle].id: report_of(record) for record in records}
        self.oracle.complete(frame.fence, completion.device_ns, failed, reports, self.now_ns)
        event = CompleteFrame(completion.fence, completion.device_ns, records, completion.error)
        self.apply(event, completion.results)
        self.expect_completion()
