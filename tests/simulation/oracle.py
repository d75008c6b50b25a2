"""What the rules say must be so, worked out beside the scheduler from the same events.

Owns a second account of every request, frame, page and price, written from docs/scheduling.md and from none of the
machines. Takes two things from the scheduler as given: the durations of the graphs, and which plan was chosen.
Surprising rule: requests are told apart by their id alone, so that a mistake about generations cannot be shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from flare.machines.events import Deliver, Dispatch, Effect, RequestLost, RequestMoved, Retired, SubmitFrame
from flare.machines.execution import Request
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.ids import RequestHandle, RequestId
from flare.machines.request import EndReason, RequestSpec
from flare.machines.scheduler import Scheduler
from flare.machines.selection.view import Reason, View

from .acceptance_oracle import observed
from .account import Account
from .known import Known, Stage, Step, way_of
from .lane_oracle import check_lanes
from .normalizer_oracle import view_rates
from .price_oracle import decay

QUEUED_KINDS = (GraphKind.DECODE, GraphKind.SPECULATIVE)


@dataclass(slots=True)
class Flight:
    """One submitted frame."""

    fence: int
    shape: GraphShape
    reason: Reason
    duration_ns: int
    submitted_ns: int
    finish_ns: int
    isolated: bool
    fresh: bool
    lanes: dict[RequestId, Dispatch]
    token_rates: dict[RequestId, float | None]
    retires: frozenset[RequestId]


@dataclass(frozen=True, slots=True)
class Report:
    """What a completion says of one request."""

    committed: int
    ended: EndReason | None
    verified: int
    joint: tuple[float, ...]
    survival: tuple[float, ...] | None


class Oracle(Account):
    """The second account. Every method raises AssertionError where the scheduler does otherwise."""

    # What happens

    def arrive(self, request: RequestId, spec: RequestSpec, now_ns: int) -> None:
        """A request was accepted. A client that comes back starts no lower than the least busy, or an even share."""
        busy = self.busy()
        if spec.client not in busy:
            least = min((self.service[client] for client in busy), default=0)
            self.service[spec.client] = max(self.service[spec.client], least, self.even_share)
        self.requests[request] = Known(request, spec, now_ns, way_of(spec))

    def cancel(self, request: RequestId) -> None:
        """Nobody wants it any longer."""
        if (known := self.requests.get(request)) is not None:
            known.stage = Stage.OVER

    def stop(self, request: RequestId, now_ns: int) -> None:
        """The host found its end."""
        known = self.requests.get(request)
        if known is not None and known.produced and (known.advances or known.stage is Stage.AWAY):
            self._end(known, now_ns)

    def offer(self, request: RequestId, proposals: int) -> None:
        """So many proposals can be copied for it now."""
        if (known := self.requests.get(request)) is not None:
            known.offered = proposals

    def preempt(self, request: RequestId, now_ns: int) -> bool:
        """It is to give its slot up, if that can be. Returns whether it will."""
        known = self.requests.get(request)
        kinds = {shape.kind for shape in self.catalog}
        if known is None or known.stage not in (Stage.PROMPT, Stage.DECODE):
            return False
        if not {GraphKind.TERMINAL_SNAPSHOT, GraphKind.RESUME} <= kinds:
            return False
        if known.state_row is None and not self.free_rows:
            return False
        known.stage, known.terminal_ns = Stage.LEAVING, now_ns
        self.takes_row = known if known.state_row is None else None
        return True

    def publish(self, request: RequestId, fence: int, now_ns: int) -> None:
        """Text was handed to the client."""
        known = self.requests.get(request)
        if known is not None:
            known.visible_ns = now_ns
            known.rates.publish(fence, self.adaptation_ms)

    def submit(self, submit: SubmitFrame, view: View, now_ns: int) -> None:
        """A plan was committed that was chosen from `view`."""
        plan, shape = submit.plan, submit.plan.shape
        self.newcomers = []
        self.fence += 1
        assert submit.fence == self.fence
        for planned, lane in zip(plan.lanes, submit.lanes, strict=True):
            start = self.requests[lane.request].position if lane.stage else lane.work.start
            assert planned == replace(lane.work, start=start)
        check_lanes(self, submit, view)
        fresh = shape in self.seen_ns and now_ns - self.seen_ns[shape] <= self.ttl_ns
        if self.flights:
            assert len(self.flights) == 1, "three frames in flight"
            for kind in (shape.kind, self.flights[0].shape.kind):
                assert kind in QUEUED_KINDS, f"{kind} overlaps"
            assert shape.source is not Source.COPY, "a copy of what the host does not know yet"
            assert fresh and self.flights[0].fresh, "a frame of unknown or stale cost overlaps"
            for lane in submit.lanes:
                assert not self.requests[lane.request].spec.needs_feedback, "queued without feedback"
        if plan.reason is Reason.TIMING_REFRESH:
            assert shape in self.seen_ns and not fresh, "a refresh of what is not stale"
        if plan.reason in self.ledgers:
            self.ledgers[plan.reason].open()
        start_ns = max([now_ns, *(flight.finish_ns for flight in self.flights)])
        measured = view_rates(view)
        rates = {known.id: measured.get(known.handle, None) for known in self.requests.values() if known.live}
        self.flights.append(
            Flight(
                fence=self.fence,
                shape=shape,
                reason=plan.reason,
                duration_ns=plan.duration_ns,
                submitted_ns=now_ns,
                finish_ns=start_ns + plan.duration_ns,
                isolated=not self.flights,
                fresh=fresh,
                lanes={lane.request: lane for lane in submit.lanes},
                token_rates=rates,
                retires=frozenset(lane.request for lane in submit.lanes if self.requests[lane.request].terminal),
            )
        )
        for lane in submit.lanes:
            self.requests[lane.request].last_fence = self.fence
            self.requests[lane.request].bound = True

    def counts(self, request: RequestId) -> bool:
        """Whether what the oldest frame says of one of its lanes still matters."""
        known, flight = self.requests[request], self.flights[0]
        if flight.lanes[request].stage is None:
            return known.advances
        return known.terminal if request in flight.retires else known.live

    def complete(
        self, fence: int, device_ns: int, failed: bool, reports: Mapping[RequestId, Report], now_ns: int
    ) -> None:
        """The oldest frame ended. `failed`: nothing of it counts."""
        flight = self.flights[0]
        assert flight.fence == fence
        counting = {request for request in flight.lanes if self.counts(request)}
        self.flights.pop(0)
        start_ns = now_ns
        for later in self.flights:
            start_ns += later.duration_ns
            later.finish_ns = start_ns
        wall_ns = now_ns - flight.submitted_ns
        if flight.isolated and flight.submitted_ns == self.ended_ns and device_ns > 0:
            self.gaps_ns.append(max(0, wall_ns - device_ns))
        self.ended_ns = now_ns
        interval_ns = 0 if device_ns <= 0 else max(device_ns, wall_ns) if flight.isolated else device_ns
        if flight.reason in self.ledgers:
            self.ledgers[flight.reason].pay(device_ns if device_ns > 0 else max(1, wall_ns))
        elif flight.reason is Reason.ORDINARY and not failed:
            for episodes in self.ledgers.values():
                episodes.earn(interval_ns)
        if failed:
            self._fail(flight)
            return
        if device_ns > 0:
            self.seen_ns[flight.shape] = now_ns
            self._charge(flight, interval_ns, {request: reports[request] for request in counting})
        for request, lane in flight.lanes.items():
            if request in counting:
                self._advance(self.requests[request], flight, lane, reports[request], now_ns)

    def _fail(self, flight: Flight) -> None:
        for request in flight.lanes:
            known = self.requests[request]
            if known.stage is Stage.RETIRING:
                known.stage = Stage.OVER
                self.retired.add(request)
            elif known.advances:
                known.stage = Stage.OVER
                self.lost.add(request)

    def _charge(self, flight: Flight, interval_ns: int, reports: Mapping[RequestId, Report]) -> None:
        count = sum(known.advances for known in self.requests.values())
        kept = decay(interval_ns, self.adaptation_ms)
        for request, token_rate in flight.token_rates.items():
            known = self.requests.get(request)
            if known is None or not known.advances:
                continue
            tokens = flight.lanes[request].stage is None if request in flight.lanes else False
            units = reports[request].committed - known.committed if tokens else 0
            known.rates.start(self.share, count, token_rate)
            known.rates.charge(flight.fence, units, interval_ns, kept)

    def _advance(self, known: Known, flight: Flight, lane: Dispatch, report: Report, now_ns: int) -> None:
        if lane.stage is not None:
            self._finish_stage(known, flight)
            return
        spec, work, served = known.spec, lane.work, report.committed - known.committed
        prompt, ended = (work.tokens if known.prefills else 0), report.ended
        output = served - prompt
        self.serve(spec.client, prompt + 2 * output)
        known.offered = 0
        known.consumed += prompt
        known.produced += output
        if prompt:
            if known.way and known.way[0] == known.consumed:
                del known.way[0]
            if not known.prefills:
                known.visible_ns = now_ns
                ended = EndReason.LENGTH if spec.max_tokens == 0 else ended
        elif known.estimates:
            self._learn(known, flight.shape.source, work.tokens, served, report)
        if output or ended or spec.scored:
            self.delivered[known.id] = ended
        if ended:
            self._end(known, now_ns)
        elif known.stage is not Stage.LEAVING:
            known.go_on()

    def _learn(self, known: Known, source: Source, ceiling: int, served: int, report: Report) -> None:
        targets = report.verified or ceiling
        if targets > 1:
            values = observed(targets, served, report.ended is not None, report.survival)
            known.estimates[source].see(values, known.produced, self.priors[source])
        if report.joint and known.forecast is not None:
            known.forecast.see(report.joint[: ceiling - 1], known.produced, self.confidence)

    def _finish_stage(self, known: Known, flight: Flight) -> None:
        if known.stage is Stage.LEAVING:
            self.departures += 1
            known.stage, known.away, known.handle, known.pages = Stage.AWAY, self.departures, None, ()
            known.bound = False
            known.way.insert(0, Step(GraphKind.RESUME))
            return
        if known.stage is Stage.RETIRING:
            known.stage = Stage.OVER
            self.retired.add(known.id)
            return
        step = known.way.pop(0)
        assert isinstance(step, Step) and step.kind is flight.shape.kind
        if step.prefix:
            known.consumed = step.prefix
        if step.kind is GraphKind.RESUME and not known.needs_row:
            known.state_row = None
        if step.kind is GraphKind.SNAPSHOT and known.due and known.due[0].kind is GraphKind.RESTORE:
            assert known.handle is not None
            self.generations[known.handle.slot] += 1
            known.handle = RequestHandle(known.handle.slot, self.generations[known.handle.slot])
            known.bound = False
        known.go_on()

    def _end(self, known: Known, now_ns: int) -> None:
        if self.retires and known.bound:
            if known.stage is not Stage.LEAVING:
                known.terminal_ns = now_ns
            known.stage = Stage.RETIRING
            return
        known.stage = Stage.OVER
        if self.retires:
            self.retired.add(known.id)

    # What the scheduler made of it

    def settle(self, effects: Sequence[Effect], scheduler: Scheduler, now_ns: int) -> None:
        """Follow releases and admissions, and compare what clients are told."""
        assert Counter(effect.request for effect in effects if isinstance(effect, RequestLost)) == Counter(self.lost)
        assert Counter(effect.request for effect in effects if isinstance(effect, Retired)) == Counter(self.retired)
        delivered = [effect for effect in effects if isinstance(effect, Deliver)]
        assert {effect.request: effect.ended for effect in delivered} == self.delivered
        assert len(delivered) == len(self.delivered)
        self.lost, self.retired, self.delivered = set(), set(), {}
        if self.takes_row is not None:
            self.take_row(self.takes_row, scheduler.requests[self.takes_row.id])
            self.takes_row = None
        for known in list(self.requests.values()):
            if known.stage is Stage.OVER and not any(known.id in flight.lanes for flight in self.flights):
                del self.requests[known.id]
        moved = [effect for effect in effects if isinstance(effect, RequestMoved) and effect.cause == "Admitted"]
        admitted = [self._admit(scheduler.requests[effect.request]) for effect in moved]
        newcomers = [known for known in admitted if known is not None]
        if newcomers:
            self._start(newcomers, scheduler, now_ns)
        if not self.flights and not any(known.live or known.terminal for known in self.requests.values()):
            for episodes in self.ledgers.values():
                episodes.rest()

    def _start(self, admitted: Sequence[Known], scheduler: Scheduler, now_ns: int) -> None:
        count = sum(known.live for known in self.requests.values())
        if now_ns != self.newcomers_ns:
            self.newcomers, self.newcomers_ns = [], now_ns
        self.newcomers += admitted
        rates = view_rates(scheduler.view(now_ns))
        for known in self.newcomers:
            if known.id in self.requests:
                known.rates.tokens = None
                known.rates.start(self.share, count, rates.get(known.handle))

    def _admit(self, request: Request) -> Known | None:
        """A slot was given; returns who is new here, and None for one that comes back."""
        known = self.requests[request.id]
        assert known is self.next(), f"{known.id} was admitted out of turn"
        assert request.handle is not None
        slot, generation = request.handle
        held = [other for other in self.requests.values() if other.handle is not None]
        assert all(other.handle is not None and other.handle.slot != slot for other in held), "a slot was given twice"
        self.generations[slot] += 1
        assert generation == self.generations[slot]
        owned = {page for other in held for page in other.pages}
        pages = request.pages
        assert len(set(pages)) == len(pages) == self.pages_of(known)
        assert owned.isdisjoint(pages), "a page was given twice"
        assert all(0 <= page < self.pages for page in pages)
        is_new = known.stage is Stage.QUEUED
        known.handle, known.pages = request.handle, pages
        if is_new and known.needs_row:
            self.take_row(known, request)
        if is_new:
            self.believe(known)
        known.go_on()
        return known if is_new else None
