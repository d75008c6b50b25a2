"""Ordinary decode candidates: one token for each of the best rows that a batch holds.

Owns the candidates of the decode graphs (docs/scheduling.md, "Score"). Does not own how a cohort is filled (`cohort`)
or the comparison with other kinds. Surprising rule: rows whose next step needs feedback compete with all others; if
they win, the window drains for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import GraphKind
from .cohort import Cohorts, Lanes, best_cohorts
from .dominance import smallest_cover, surplus
from .lanes import Floats, Graphs, Option, Terms, graphs_of, terms, token_prices, waiting_price
from .reference import decode_rate, reference_interval
from .view import LaneWork, RequestRow, View


@dataclass(frozen=True, slots=True)
class DecodePool:
    """One candidate for each decode graph."""

    terms: Terms
    graphs: Graphs
    requests: Sequence[RequestRow]
    cohorts: Cohorts

    def option(self, index: int) -> Option:
        """The cohort of one candidate."""
        lanes = self.cohorts.order[index, : self.cohorts.served[index]].tolist()
        chosen = sorted([self.requests[lane] for lane in lanes], key=lambda row: row.slot)
        return Option(self.graphs.rows[index], tuple(chosen), tuple([_lane(row) for row in chosen]))

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        batch = self.graphs.batch
        smaller = smallest_cover(batch, np.asarray(len(self.requests)), np.ones(len(batch), np.bool_))
        return f"redundant: batch {smaller} serves the same requests"


def decode_pool(view: View, requests: Sequence[RequestRow]) -> DecodePool | None:
    """Candidates for the streams of `view`, which are `requests` in serving order; None without any."""
    graphs = graphs_of(view, GraphKind.DECODE)
    if not requests or not graphs.rows:
        return None
    streams = len(requests)
    sigma_ms = reference_interval(graphs.duration_ms, graphs.batch, streams, streams) or 0.0
    lanes = Lanes(
        _priced_service(view, graphs, requests),
        np.full(streams, view.policy.decode_age_price * view.value_scale * sigma_ms),
        np.array([row.age_ms for row in requests], np.float64),
    )
    cohorts = best_cohorts(lanes, graphs.duration_ms, graphs.batch)
    priced = terms(
        graphs.duration_ms,
        cohorts.service,
        cohorts.age,
        waiting_price(view, streams),
        served=cohorts.served,
        padding=graphs.batch - cohorts.served,
        eligible=~surplus(graphs.batch, np.asarray(streams), np.ones(len(graphs.rows), np.bool_)),
    )
    return DecodePool(priced, graphs, requests, cohorts)


def _priced_service(view: View, graphs: Graphs, requests: Sequence[RequestRow]) -> Floats:
    """Scaled value [m] of one output token and its delivery; an unset delivery price is worth 0."""
    policy = view.policy
    tokens = token_prices(view, requests, np.full(len(requests), decode_rate(graphs)))
    deliveries = np.array([row.delivery_price or 0.0 for row in requests], np.float64)
    return (
        policy.output_token_value * view.value_scale
        + policy.token_fairness * tokens
        + policy.delivery_fairness * deliveries
    )


def _lane(row: RequestRow) -> LaneWork:
    return LaneWork(row.slot, row.generation, row.position, 1, emits=True, delivers=True, expected_tokens=1.0)
