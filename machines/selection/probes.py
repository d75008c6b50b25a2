"""The round that is run to learn how many of its proposals are accepted, in place of the ordinary winner.

Owns docs/scheduling.md, "Acceptance probes", as far as one decision goes. Does not own the ledger that pays for it, nor
the bounded optimistic estimates. Surprising rule: candidates are chosen anew, cohorts too, as if every estimate were at
its bound; they are held against the ordinary winner as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from ..graph import GraphKind
from .board import Board
from .cohort import rank
from .compiled import KINDS, Offer
from .decode import RoundPool, round_pool
from .lanes import NS_PER_MS, Option
from .order import Leader, standing
from .streams import streams_of

_SPECULATIVE = KINDS.index(GraphKind.SPECULATIVE)


class Probe(NamedTuple):
    """What displaces the ordinary winner: a candidate of a pool that is priced optimistically."""

    leader: Leader
    pool: RoundPool
    candidate: int


def probe(board: Board, ordinary: Leader) -> Probe | None:
    """The measured speculative round that may gain most value per ms on a measured `ordinary` winner; None if none that
    may gain offers a request more, with output left to profit from what is learned."""
    view = board.view
    if view.keeps_prefixes or not ordinary.place.known or len(board.compiled.offers) == 1:
        return None
    hopeful = _hopeful(board)
    score = -ordinary.place.value
    pool = round_pool(hopeful, above=score)
    if pool is None:
        return None
    terms = pool.terms
    rounds = board.compiled.rounds
    able = terms.eligible & (terms.duration_ms > 0.0) & (terms.score > score) & (rounds.kind_at == _SPECULATIVE)
    offered = _offered(ordinary.option)
    found = []
    for index in np.flatnonzero(able).tolist():
        option = pool.option(index)
        weight = _least_weight(option, offered)
        if weight is not None:
            ms, place = option.graph.duration_ns / NS_PER_MS, standing(terms, index, option)
            gain = float(terms.score[index]) - score
            found.append(((-gain, weight, ms, option.graph.shape, place), Probe(Leader(place, option), pool, index)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _hopeful(board: Board) -> Board:
    """The same board with the ready streams priced by their optimistic estimates."""
    streams = board.streams
    ready = [
        msgspec.structs.replace(row, scored_survival=row.optimistic, copy_scored_survival=row.copy_optimistic)
        for row in streams.rows[: streams.ready]
    ]
    priced = streams_of(board.compiled, board.times.rounds, board.scaled, ready, streams.rows[streams.ready :])
    service, age_ms = priced.service[:, : len(ready)], priced.age_ms[: len(ready)]
    best = rank(service, np.full(len(ready), board.urgency), age_ms)
    return board._replace(streams=priced, best=best, plain=rank(service, np.zeros(len(ready)), age_ms))


def _offered(option: Option) -> dict[int, int]:
    """How many proposals a plan is expected to verify for each slot whose stream it serves."""
    targets = option.targets or [lane.tokens for lane in option.lanes]
    return {lane.slot: rows - 1 for lane, rows in zip(option.lanes, targets, strict=True) if lane.delivers}


def _least_weight(option: Option, offered: dict[int, int]) -> float | None:
    """The least weight of an estimate about a proposal beyond what is `offered`, of the requests that have output left
    after all that they are offered; None without any."""
    copied = Offer.of(option.graph.shape).copied
    weights: list[float] = []
    for row, proposals in zip(option.requests, _offered(option).values(), strict=True):
        if row.output_left > proposals + 1:
            known = row.copy_weights if copied else row.weights
            weights += known[offered.get(row.slot, 0) : proposals]
    return min(weights, default=None)
