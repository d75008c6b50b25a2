"""What the second account holds, and its comparison with everything that the scheduler shows.

Owns queries over the account and the comparison. Does not own what events do to it (`oracle`). Surprising rule: a
resource is free here as soon as nobody is known to own it, since fences end before the next comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flare.machines.execution import Request
from flare.machines.graph import GraphShape, Source
from flare.machines.ids import RequestId
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason
from flare.machines.scheduler import Scheduler

from .acceptance_oracle import Estimates
from .known import Known, Stage
from .ledger_oracle import ledgers
from .price_oracle import log_price

if TYPE_CHECKING:
    from .oracle import Flight

LOG_TOLERANCE = 1e-9
STATES = {
    RequestState.QUEUED: Stage.QUEUED,
    RequestState.PREPARING: Stage.BLOCKED,
    RequestState.PREFILLING: Stage.PROMPT,
    RequestState.DECODING: Stage.DECODE,
    RequestState.PREEMPTING: Stage.LEAVING,
    RequestState.PREEMPTED: Stage.AWAY,
    RequestState.RETIRING: Stage.RETIRING,
    RequestState.ENDED: Stage.OVER,
    RequestState.CANCELLED: Stage.OVER,
    RequestState.FAILED: Stage.OVER,
}


class Account:
    """Requests, frames and resources. `retires`: the catalog has a terminal snapshot."""

    def __init__(
        self,
        catalog: Sequence[GraphShape],
        *,
        slots: int,
        pages: int,
        page_tokens: int,
        state_rows: int,
        share: float,
        adaptation_ms: float,
        ttl_ns: int,
        weights: dict[str, float],
        retires: bool,
        keeps_prefixes: bool,
        exponent: float,
    ) -> None:
        self.catalog, self.retires, self.weights = catalog, retires, weights
        self.slots, self.pages, self.page_tokens, self.state_rows = slots, pages, page_tokens, state_rows
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
        self.departures = 0
        self.takes_row: Known | None = None
        self.lost: set[RequestId] = set()
        self.retired: set[RequestId] = set()
        self.delivered: dict[RequestId, EndReason | None] = {}
        depths = {source: max((s.draft_depth for s in catalog if s.source is source), default=0) for source in Source}
        self.priors = {source: _halves(depth) for source, depth in depths.items() if depth}
        self.confidence = _halves(depths[Source.DRAFT])
        self.ledgers = ledgers(probes=bool(self.priors) and not keeps_prefixes)
        self.keeps_prefixes, self.exponent = keeps_prefixes, exponent
        self.ended_ns, self.gaps_ns = -1, list[int]()

    # Queries

    def busy(self) -> set[str]:
        """Clients with requests."""
        return {known.spec.client for known in self.requests.values()}

    def serve(self, client: str, weighted_tokens: int) -> None:
        """A client was served."""
        self.service[client] += weighted_tokens / self.weights.get(client, 1.0)
        self.even_share += weighted_tokens / sum(self.weights.get(other, 1.0) for other in sorted(self.busy()))

    def next(self) -> Known | None:
        """Who gets the next slot. Those that lost theirs come first within a client, the last of them before all; and
        before everybody while the first in line lacks a state row."""

        def turn(known: Known) -> tuple[int, int]:
            return (0, -known.away) if known.stage is Stage.AWAY else (1, known.id)

        waiting = [known for known in self.requests.values() if known.waits]
        firsts: dict[str, Known] = {}
        for known in sorted(waiting, key=turn):
            firsts.setdefault(known.spec.client, known)
        best = min(firsts.values(), key=lambda known: (self.service[known.spec.client], known.id), default=None)
        if best is None or best.stage is Stage.AWAY or not best.needs_row or self.free_rows:
            return best
        return min((known for known in waiting if known.stage is Stage.AWAY), key=lambda known: known.id, default=None)

    def pages_of(self, known: Known) -> int:
        """Pages that it needs."""
        return -(-(known.spec.prompt_tokens + known.spec.max_tokens) // self.page_tokens)

    @property
    def free_rows(self) -> int:
        """State rows that nobody owns."""
        return self.state_rows - sum(known.state_row is not None for known in self.requests.values())

    def take_row(self, known: Known, request: Request) -> None:
        """It was given a state row."""
        row = request.state_row
        assert row is not None and 0 <= row < self.state_rows
        assert all(other.state_row != row for other in self.requests.values()), "a state row was given twice"
        known.state_row = row

    def believe(self, known: Known) -> None:
        """What is expected of a newcomer's proposals, if any can be made."""
        if not known.spec.needs_feedback:
            known.estimates = {source: Estimates.start(prior) for source, prior in self.priors.items()}
            known.forecast = Estimates.start(self.confidence) if self.confidence else None

    # Comparison

    def compare(self, scheduler: Scheduler) -> None:
        """Compare everything that the scheduler shows."""
        assert scheduler.requests.keys() == self.requests.keys()
        for known in self.requests.values():
            self._compare_request(known, scheduler.requests[known.id])
        held = [known for known in self.requests.values() if known.handle is not None]
        waiting = [known for known in self.requests.values() if known.waits]
        free_pages = self.pages - sum(len(known.pages) for known in held)
        assert scheduler.free_slots == self.slots - len(held)
        assert scheduler.pages.free == free_pages
        assert scheduler.state_rows.free == self.free_rows
        assert scheduler.waiting.requests == len(waiting)
        assert scheduler.waiting.tokens == sum(known.spec.prompt_tokens for known in waiting)
        assert [frame.commit.fence for frame in scheduler.in_flight if frame.commit] == [f.fence for f in self.flights]
        kept = {reason.value: (one.credit, one.funded) for reason, one in scheduler.ledgers.by_reason.items()}
        assert kept == {reason: (one.credit, one.funded) for reason, one in self.ledgers.items()}
        for episodes in self.ledgers.values():
            episodes.check()
        following = self.next()
        if following is not None and scheduler.free_slots:
            assert self.pages_of(following) > free_pages, "idle slot"

    @staticmethod
    def _compare_request(known: Known, request: Request) -> None:
        assert STATES[request.state] is known.stage
        assert request.handle == known.handle
        assert request.pages == known.pages
        assert request.state_row == known.state_row
        assert (request.consumed, request.produced) == (known.consumed, known.produced)
        assert request.last_fence == known.last_fence
        if not known.live:
            return
        assert request.stages == tuple(step.kind for step in known.due)
        if known.stage is Stage.DECODE:
            assert request.visible_at_ns == known.visible_ns
        for log, rate in (
            (request.prices.log_token, known.rates.tokens),
            (request.prices.log_delivery, known.rates.deliveries),
        ):
            assert (log is None) == (rate is None), f"request {known.id}: price set by one account alone"
            if log is not None and rate is not None:
                assert close(log, log_price(rate)), f"request {known.id}: {log} is not {log_price(rate)}"


def _halves(depth: int) -> list[float]:
    """What is expected where nothing has been seen."""
    return [0.5 ** (index + 1) for index in range(depth)]


def close(log: float, other: float) -> bool:
    """Whether two logarithms of prices are the same but for rounding."""
    return abs(log - other) <= LOG_TOLERANCE * (1.0 + abs(other))
