"""What every kind of candidate is built from: graphs as arrays, requests in serving order, prices, scores.

Owns the arithmetic that kinds share (docs/scheduling.md, "Value" and "Score"). Does not own which work a kind can do
for a request. Surprising rule: requests are put in the order in which equals are served before anything is ranked, so
that a stable sort by value settles every tie among lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphKind
from .view import GraphRow, LaneWork, Phase, RequestRow, View

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Graphs:
    """The prepared graphs of one kind. Arrays are [g]; `duration_ms` is 0 where the cost is unknown."""

    rows: tuple[GraphRow, ...]
    duration_ms: Floats
    batch: Ints
    prefill_tokens: Ints

    @property
    def known(self) -> Bools:
        """Which graphs have been measured, stale ones too."""
        return self.duration_ms > 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """Candidates of one kind, priced; arrays are [n], values are scaled.

    `service` is the priced service of the lanes, `age` the value of ending their waiting, `waiting` the cost per ms
    that the frame imposes on all streams. `padding` counts physical positions that do no work. Only `eligible` ones
    compete.
    """

    duration_ms: Floats
    service: Floats
    age: Floats
    waiting: Floats
    score: Floats
    served: Ints
    padding: Ints
    eligible: Bools


@dataclass(frozen=True, slots=True)
class Option:
    """One candidate: a graph, the requests that it serves and its work for each, in the order of slots."""

    graph: GraphRow
    requests: tuple[RequestRow, ...]
    lanes: tuple[LaneWork, ...]


def graphs_of(view: View, kind: GraphKind) -> Graphs:
    """The graphs of `kind`, in the catalog's order."""
    rows = tuple([row for row in view.graphs if row.shape.kind is kind])
    return Graphs(
        rows,
        np.array([row.duration_ns for row in rows], np.float64) / NS_PER_MS,
        np.array([row.shape.batch for row in rows], np.int64),
        np.array([row.shape.prefill_tokens for row in rows], np.int64),
    )


def serving_order(requests: Sequence[RequestRow]) -> list[RequestRow]:
    """Least recently served first, then lower slots: the order in which equal lanes are served."""
    return sorted(requests, key=lambda row: (row.last_fence, row.slot))


def decoding(view: View) -> list[RequestRow]:
    """The streams: decoding requests that still have output to produce after queued work, in serving order.

    One that queued work ends waits for nothing more: it is no stream, has no age and enlarges no family.
    """
    return serving_order([row for row in view.requests if row.phase is Phase.DECODE and row.output_left > 0])


def prompting(view: View, phase: Phase) -> list[RequestRow]:
    """Requests of a prompt phase with tokens to consume, in serving order."""
    return serving_order([row for row in view.requests if row.phase is phase and row.position < row.boundary])


def token_prices(view: View, requests: Sequence[RequestRow], tokens_per_ms: Floats) -> Floats:
    """Scaled token prices [m]. An unset one is the newcomer's, from the rates measured now; 0 where there is none."""
    prices = np.array([np.nan if row.token_price is None else row.token_price for row in requests], np.float64)
    unset = np.isnan(prices)
    if unset.any():
        newcomer = view.policy.newcomer_share * len(view.requests) * view.value_scale
        measured = tokens_per_ms > 0.0
        start = np.where(measured, newcomer / np.where(measured, tokens_per_ms, 1.0), 0.0)
        prices = np.where(unset, start, prices)
    return prices


def waiting_price(view: View, streams: int) -> float:
    """Scaled value/ms^2 that the waiting of all streams costs."""
    return view.policy.decode_age_price * view.value_scale * streams


def terms(
    duration_ms: Floats,
    service: Floats,
    age: Floats,
    waiting_price: float,
    *,
    served: Ints,
    padding: Ints,
    eligible: Bools,
) -> Terms:
    """Score candidates: value per ms less the waiting imposed; an unknown graph by its priced service alone.

    `waiting_price` is the sum of c over all streams; `age` is 0 where the duration is unknown.
    """
    known = duration_ms > 0.0
    waiting = duration_ms * (0.5 * waiting_price)
    score = (service + age) / np.where(known, duration_ms, 1.0) - waiting
    return Terms(duration_ms, service, age, waiting, score, served, padding, eligible)
