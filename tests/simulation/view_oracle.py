"""What a view must say, from the second account.

Owns the comparison of a view with `oracle.Oracle`: projection, ages, prices and their common scale. Surprising rule:
prices are compared as logarithms with the scale added back, so that it does not matter which scale was chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from flare.machines.graph import Source
from flare.machines.selection.view import Phase, RequestRow, View

from .acceptance_oracle import Estimates
from .account import close
from .known import Known
from .oracle import Flight, Oracle
from .price_oracle import log_price


def check_view(oracle: Oracle, view: View, now_ns: int) -> None:
    """Raise AssertionError where `view` differs from what `oracle` knows."""
    flights = oracle.flights
    planning_ns = max([now_ns, *(flight.finish_ns for flight in flights)])
    assert (view.now_ns, view.planning_ns) == (now_ns, planning_ns)
    assert view.overrun == (bool(flights) and now_ns > flights[0].finish_ns)
    window = [(frame.fence, frame.shape, frame.expected_finish_ns) for frame in view.window]
    assert window == [(flight.fence, flight.shape, flight.finish_ns) for flight in flights]
    probe = oracle.ledgers.get("acceptance_probe")
    assert view.refresh_funded == oracle.ledgers["timing_refresh"].funded
    assert view.probe_funded == (probe is not None and probe.funded)
    assert view.keeps_prefixes == oracle.keeps_prefixes
    priced = view.policy.host_gap_pricing and bool(oracle.gaps_ns)
    assert view.host_gap_ms == (statistics.median(oracle.gaps_ns[-9:]) / 1e6 if priced else 0.0)
    assert view.queued_requests == sum(known.waits for known in oracle.requests.values())
    assert math.isclose(view.value_scale, math.exp(-view.log_scale)) and view.log_scale >= 0.0
    served = [known for known in oracle.requests.values() if known.live or known.terminal]
    live = sorted((known.handle, known) for known in served if known.handle)
    assert [(row.slot, row.generation) for row in view.requests] == [handle for handle, _ in live]
    for row, (_, known) in zip(view.requests, live, strict=True):
        _check_row(oracle, known, row, view)
    for graph in view.graphs:
        seen_ns = oracle.seen_ns.get(graph.shape)
        assert (graph.duration_ns > 0) == (seen_ns is not None)
        assert graph.stale == (seen_ns is not None and now_ns - seen_ns > oracle.ttl_ns)


def _phase(known: Known) -> Phase:
    if known.terminal:
        return Phase.TERMINAL
    if not known.prefills:
        return Phase.DECODE
    return Phase.SCORED_PREFILL if known.spec.scored else Phase.PREFILL


def _check_row(oracle: Oracle, known: Known, row: RequestRow, view: View) -> None:
    spec, serving = known.spec, [flight for flight in oracle.flights if known.id in flight.lanes]
    phase = _phase(known)
    assert row.phase is phase
    assert (row.position, row.prompt_tokens) == (known.position, spec.prompt_tokens)
    assert row.stages == (() if known.terminal else tuple(step.kind for step in known.due))
    assert [span for span in spec.spans if span[1] > known.position] == list(row.spans)
    if known.live:
        assert row.boundary == known.boundary
    endpoints = [end for end in (*spec.messages, spec.prompt_tokens) if end > known.position]
    assert row.next_endpoint == min(endpoints, default=spec.prompt_tokens)
    works = [flight.lanes[known.id].work for flight in serving]
    emitted = sum(work.tokens if work.delivers else work.emits for work in works)
    assert row.output_left == max(0, spec.max_tokens - known.produced - emitted)
    assert (row.last_fence, row.needs_feedback) == (known.last_fence, spec.needs_feedback)
    _check_proposals(known, row, oracle.exponent, hopeful=view.probe_funded and phase is Phase.DECODE)
    assert row.age_ms >= 0.0
    since_ns = known.terminal_ns if known.terminal else known.arrived_ns
    if phase is Phase.DECODE:
        finishes = [flight.finish_ns for flight in serving if flight.lanes[known.id].work.delivers]
        since_ns = max(finishes, default=known.visible_ns)
    assert math.isclose(row.age_ms, max(0, view.planning_ns - since_ns) / 1e6)
    queued = [_expected(flight, known) for flight in oracle.flights if known.id in flight.token_rates]
    rates = known.rates.projected([frame for frame in queued if frame[2] > 0], oracle.adaptation_ms)
    paid = (view.policy.token_fairness, view.policy.delivery_fairness)
    for price, rate, coefficient in zip((row.token_price, row.delivery_price), rates, paid, strict=True):
        assert (price is None) == (rate is None)
        if price is not None and rate is not None:
            assert math.isfinite(price) and price >= 0.0
            log = log_price(rate) if coefficient > 0.0 and not known.terminal else 0.0
            # A price that vanishes beside the greatest of its view is worth nothing; its logarithm is lost.
            assert close(math.log(price) + view.log_scale, log) if price > 1e-290 else log - view.log_scale < -600.0


def _check_proposals(known: Known, row: RequestRow, exponent: float, *, hopeful: bool) -> None:
    """What is expected of proposals; `hopeful`: at best, too."""
    _same(row.forecast, [] if known.forecast is None else known.forecast.survival())
    drafts = (row.survival, row.scored_survival, row.optimistic, row.weights)
    copies = (row.copy_survival, row.copy_scored_survival, row.copy_optimistic, row.copy_weights)
    for source, (survival, scored, bounds, weights) in {Source.DRAFT: drafts, Source.COPY: copies}.items():
        estimates, most = known.estimates.get(source, Estimates()), None if source is Source.DRAFT else known.offered
        _same(survival, estimates.survival()[:most])
        _same(scored, [one**exponent for one in survival])
        known_bounds = estimates.optimistic(known.produced)[:most] if hopeful else []
        _same(bounds, [one**exponent for one in known_bounds])
        _same(weights, estimates.weights(known.produced)[:most] if hopeful else [])


def _same(found: Sequence[float], expected: Sequence[float]) -> None:
    assert len(found) == len(expected)
    assert all(math.isclose(*pair, rel_tol=1e-9) for pair in zip(found, expected, strict=True))


def _expected(flight: Flight, known: Known) -> tuple[float, bool, int]:
    lane = flight.lanes.get(known.id)
    if lane is None:
        return 0.0, False, flight.duration_ns
    return lane.work.expected_tokens, lane.work.delivers, flight.duration_ns
