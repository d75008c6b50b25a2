"""What the rules say must be so, worked out beside the scheduler from the same events.

Owns a second account of every request, frame, page and price, written from docs/scheduling.md and from none of the
machines. Takes two things from the scheduler as given: the durations of the graphs, and which plan was chosen.
Surprising rule: requests are told apart by their id alone, so that a mistake about generations cannot be shared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from flare.machines.events import Deliver, Dispatch, Effect, RequestLost, RequestMoved, SubmitFrame
from flare.machines.execution import Request
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import PageId, RequestHandle, RequestId
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason, RequestSpec
from flare.machines.scheduler import Scheduler
from flare.machines.selection.view import View

from .normalizer_oracle import newcomer_rates, view_rates
from .price_oracle import Rates, decay, log_price

LOG_TOLERANCE = 1e-9


class Stage(Enum):
    """How far a request is."""

    QUEUED = "queued"
    PROMPT = "prompt"
    DECODE = "decode"
    OVER = "over"


STATES = {
    RequestState.QUEUED: Stage.QUEUED,
    RequestState.PREFILLING: Stage.PROMPT,
    RequestState.DECODING: Stage.DECODE,
    RequestState.ENDED: Stage.OVER,
    RequestState.CANCELLED: Stage.OVER,
    RequestState.FAILED: Stage.OVER,
}


@dataclass(slots=True)
class Known:
    """One request."""

    id: RequestId
    spec: RequestSpec
    stage: Stage = Stage.QUEUED
    handle: RequestHandle | None = None
    pages: tuple[PageId, ...] = ()
    consumed: int = 0
    produced: int = 0
    last_fence: int = 0
    visible_ns: int = 0
    rates: Rates = field(default_factory=Rates)

    @property
    def live(self) -> bool:
        return self.stage in (Stage.PROMPT, Stage.DECODE)

    @property
    def boundary(self) -> int:
        return self.spec.system_end if self.consumed < self.spec.system_end else self.spec.prompt_tokens


@dataclass(slots=True)
class Flight:
    """One submitted frame."""

    fence: int
    shape: GraphShape
    duration_ns: int
    submitted_ns: int
    finish_ns: int
    isolated: bool
    fresh: bool
    lanes: dict[RequestId, Dispatch]
    token_rates: dict[RequestId, float | None]


class Oracle:
    """The second account. Every method raises AssertionError where the scheduler does otherwise."""

    def __init__(self, slots: int, pages: int, page_tokens: int, share: float, adaptation_ms: float, ttl_ns: int):
        self.slots, self.pages, self.page_tokens = slots, pages, page_tokens
        self.share, self.adaptation_ms, self.ttl_ns = share, adaptation_ms, ttl_ns
        self.requests: dict[RequestId, Known] = {}
        self.flights: list[Flight] = []
        self.fence = 0
        self.generations = [0] * slots
        self.seen_ns: dict[GraphShape, int] = {}
        self.service: defaultdict[str, float] = defaultdict(float)
        self.even_share = 0.0
        self.newcomers: list[Known] = []
        self.newcomers_ns = 0
        self.lost: set[RequestId] = set()
        self.delivered: dict[RequestId, EndReason | None] = {}

    # What happens

    def arrive(self, request: RequestId, spec: RequestSpec) -> None:
        """A request was accepted. A client that comes back starts no lower than the least busy, or an even share."""
        busy = self._busy()
        if spec.client not in busy:
            least = min((self.service[client] for client in busy), default=0)
            self.service[spec.client] = max(self.service[spec.client], least, self.even_share)
        self.requests[request] = Known(request, spec)

    def _busy(self) -> set[str]:
        return {known.spec.client for known in self.requests.values()}

    def _serve(self, client: str, weighted_tokens: int) -> None:
        self.service[client] += weighted_tokens
        self.even_share += weighted_tokens / len(self._busy())

    def give_up(self, request: RequestId) -> None:
        """It was cancelled, or the host found its end."""
        known = self.requests.get(request)
        if known is not None:
            known.stage = Stage.OVER

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
        assert len({lane.request for lane in submit.lanes}) == len(submit.lanes) <= shape.batch
        assert plan.lanes == tuple(lane.work for lane in submit.lanes)
        for lane in submit.lanes:
            self._check_lane(lane, shape)
        fresh = shape in self.seen_ns and now_ns - self.seen_ns[shape] <= self.ttl_ns
        if self.flights:
            assert len(self.flights) == 1, "three frames in flight"
            for kind in (shape.kind, self.flights[0].shape.kind):
                assert kind is GraphKind.DECODE, f"{kind} overlaps"
            assert fresh and self.flights[0].fresh, "a frame of unknown or stale cost overlaps"
            for lane in submit.lanes:
                assert not self.requests[lane.request].spec.needs_feedback, "queued without feedback"
        start_ns = max([now_ns, *(flight.finish_ns for flight in self.flights)])
        measured = view_rates(view)
        rates = {known.id: measured.get(known.handle, None) for known in self.requests.values() if known.live}
        lanes = {lane.request: lane for lane in submit.lanes}
        finish_ns = start_ns + plan.duration_ns
        self.flights.append(
            Flight(self.fence, shape, plan.duration_ns, now_ns, finish_ns, not self.flights, fresh, lanes, rates)
        )
        for lane in submit.lanes:
            self.requests[lane.request].last_fence = self.fence

    def _check_lane(self, lane: Dispatch, shape: GraphShape) -> None:
        known, work = self.requests[lane.request], lane.work
        spec = known.spec
        assert known.live and known.handle == (work.slot, work.generation)
        assert lane.pages == (None if known.last_fence else known.pages)
        if shape.kind is GraphKind.DECODE:
            queued = sum(known.id in flight.lanes for flight in self.flights)
            assert known.stage is Stage.DECODE and known.produced + queued < spec.max_tokens
            assert work.emits and work.delivers and work.tokens == 1 and work.expected_tokens == 1.0
            return
        assert known.stage is Stage.PROMPT and (shape.kind is GraphKind.SCORED_PREFILL) == spec.scored
        assert work.start == known.consumed and 0 < work.tokens <= shape.prefill_tokens
        end = work.start + work.tokens
        assert end <= known.boundary and not work.delivers
        assert work.emits == (end == spec.prompt_tokens and spec.max_tokens > 0)

    def complete(
        self, fence: int, device_ns: int, failed: bool, ended: dict[RequestId, EndReason], now_ns: int
    ) -> None:
        """The oldest frame ended. `failed`: nothing of it counts. `ended`: the rows that it ended."""
        flight = self.flights.pop(0)
        assert flight.fence == fence
        self.lost, self.delivered = set(), {}
        start_ns = now_ns
        for later in self.flights:
            start_ns += later.duration_ns
            later.finish_ns = start_ns
        if failed:
            self.lost = {request for request in flight.lanes if self._live(request)}
            for request in self.lost:
                self.requests[request].stage = Stage.OVER
            return
        if device_ns > 0:
            self.seen_ns[flight.shape] = now_ns
            wall_ns = now_ns - flight.submitted_ns
            self._charge(flight, max(device_ns, wall_ns) if flight.isolated else device_ns)
        for request, lane in flight.lanes.items():
            if self._live(request):
                self._advance(self.requests[request], lane, ended.get(request), now_ns)

    def _live(self, request: RequestId) -> bool:
        known = self.requests.get(request)
        return known is not None and known.live

    def _charge(self, flight: Flight, interval_ns: int) -> None:
        count = sum(known.live for known in self.requests.values())
        kept = decay(interval_ns, self.adaptation_ms)
        for request, token_rate in flight.token_rates.items():
            if self._live(request):
                known, lane = self.requests[request], flight.lanes.get(request)
                units = 0 if lane is None else self._units(known, lane)
                known.rates.start(self.share, count, token_rate)
                known.rates.charge(flight.fence, units, interval_ns, kept)

    @staticmethod
    def _units(known: Known, lane: Dispatch) -> int:
        return 1 if known.stage is Stage.DECODE else lane.work.tokens + lane.work.emits

    def _advance(self, known: Known, lane: Dispatch, ended: EndReason | None, now_ns: int) -> None:
        spec, work = known.spec, lane.work
        self._serve(spec.client, (work.tokens if known.stage is Stage.PROMPT else 0) + 2 * work.emits)
        if known.stage is Stage.PROMPT:
            known.consumed += work.tokens
            if known.consumed == spec.prompt_tokens:
                known.stage, known.visible_ns = Stage.DECODE, now_ns
                ended = EndReason.LENGTH if spec.max_tokens == 0 else ended
        if work.emits:
            known.produced += 1
        if work.emits or ended or spec.scored:
            self.delivered[known.id] = ended
        if ended:
            known.stage = Stage.OVER

    # What the scheduler made of it

    def settle(self, effects: Sequence[Effect], scheduler: Scheduler, now_ns: int) -> None:
        """Follow releases and admissions, and compare what clients are told."""
        assert {effect.request for effect in effects if isinstance(effect, RequestLost)} == self.lost
        delivered = [effect for effect in effects if isinstance(effect, Deliver)]
        assert {effect.request: effect.ended for effect in delivered} == self.delivered
        assert len(delivered) == len(self.delivered)
        self.lost, self.delivered = set(), {}
        for known in list(self.requests.values()):
            if known.stage is Stage.OVER and not any(known.id in flight.lanes for flight in self.flights):
                del self.requests[known.id]
        admitted = [
            self._admit(scheduler.requests[effect.request], scheduler.pages.total)
            for effect in effects
            if isinstance(effect, RequestMoved) and effect.after == RequestState.PREFILLING.value
        ]
        if admitted:
            count = sum(known.live for known in self.requests.values())
            graphs = scheduler.durations.rows(now_ns)
            if now_ns != self.newcomers_ns:
                self.newcomers, self.newcomers_ns = [], now_ns
            self.newcomers += admitted
            for known in self.newcomers:
                known.rates.tokens = None
                known.rates.start(self.share, count, newcomer_rates(known.spec, graphs))

    def _admit(self, request: Request, total: int) -> Known:
        known = self.requests[request.id]
        queued = [other for other in self.requests.values() if other.stage is Stage.QUEUED]
        firsts = {other.spec.client: other for other in sorted(queued, key=lambda other: other.id, reverse=True)}
        best = min(firsts.values(), key=lambda other: (self.service[other.spec.client], other.id))
        assert known is best, f"{known.id} was admitted before {best.id}"
        assert request.handle is not None
        slot, generation = request.handle
        held = [other for other in self.requests.values() if other.handle is not None]
        assert all(other.handle is not None and other.handle.slot != slot for other in held), "a slot was given twice"
        self.generations[slot] += 1
        assert generation == self.generations[slot]
        owned = {page for other in held for page in other.pages}
        pages = request.pages
        tokens = known.spec.prompt_tokens + known.spec.max_tokens
        assert len(set(pages)) == len(pages) == -(-tokens // self.page_tokens)
        assert owned.isdisjoint(pages), "a page was given twice"
        assert all(0 <= page < total for page in pages)
        known.stage, known.handle, known.pages = Stage.PROMPT, request.handle, pages
        return known

    def compare(self, scheduler: Scheduler) -> None:
        """Compare everything that the scheduler shows."""
        assert scheduler.requests.keys() == self.requests.keys()
        for known in self.requests.values():
            self._compare_request(known, scheduler.requests[known.id])
        held = [known for known in self.requests.values() if known.handle is not None]
        queued = [known for known in self.requests.values() if known.stage is Stage.QUEUED]
        free_pages = self.pages - sum(len(known.pages) for known in held)
        assert scheduler.free_slots == self.slots - len(held)
        assert scheduler.pages.free == free_pages
        assert scheduler.waiting.requests == len(queued)
        assert scheduler.waiting.tokens == sum(known.spec.prompt_tokens for known in queued)
        assert [frame.commit.fence for frame in scheduler.in_flight if frame.commit] == [f.fence for f in self.flights]
        head = scheduler.waiting.head()
        assert (head is None) == (not queued)
        if head is not None and scheduler.free_slots:
            assert scheduler.pages.needed(head.spec.prompt_tokens + head.spec.max_tokens) > free_pages, "idle slot"

    @staticmethod
    def _compare_request(known: Known, request: Request) -> None:
        assert STATES[request.state] is known.stage
        assert request.handle == known.handle
        assert request.pages == known.pages
        assert (request.consumed, request.produced) == (known.consumed, known.produced)
        assert request.last_fence == known.last_fence
        if not known.live:
            return
        if known.stage is Stage.DECODE:
            assert request.visible_at_ns == known.visible_ns
        for log, rate in (
            (request.prices.log_token, known.rates.tokens),
            (request.prices.log_delivery, known.rates.deliveries),
        ):
            assert (log is None) == (rate is None), f"request {known.id}: price set by one account alone"
            if log is not None and rate is not None:
                assert close(log, log_price(rate)), f"request {known.id}: {log} is not {log_price(rate)}"


def close(log: float, other: float) -> bool:
    """Whether two logarithms of prices are the same but for rounding."""
    return abs(log - other) <= LOG_TOLERANCE * (1.0 + abs(other))
