"""Candidates of the graphs that move state, for what they bring nearer or end themselves.

Owns single graphs that retire finished requests or advance rows with more stages to come (docs/scheduling.md, "Terminal
retirement" and "Chains of stages"). Does not own prerequisites chosen with the graph that they enable (`pairs`).
Surprising rule: a row with one stage left gives such a graph no value; it takes what room is left, since that costs
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .blocked import Blocked, stage_lane
from .compiled import KINDS
from .lanes import Ints, Option, Terms, terms
from .view import Phase


class StagePool(NamedTuple):
    """Candidates [n]: `places` in the catalog's stage graphs, each with the first `counts` rows of its `order` [n, m]
    among those of value, and then rows with one stage left."""

    terms: Terms
    blocked: Blocked
    places: NDArray[np.intp]
    order: NDArray[np.intp]
    counts: Ints

    @property
    def dispatched(self) -> NDArray[np.intp]:
        """Places in the view's graphs."""
        return self.blocked.board.compiled.stages.index[self.places]

    def option(self, index: int) -> Option:
        """The cohort of one candidate."""
        blocked = self.blocked
        graph = blocked.board.view.graphs[self.dispatched[index]]
        chosen = [blocked.valued.rows[place] for place in self.order[index, : self.counts[index]].tolist()]
        terminal = len([row for row in chosen if row.phase is Phase.TERMINAL])
        chosen += blocked.last(graph.shape.kind)[: graph.shape.batch - len(chosen)]
        chosen.sort(key=lambda row: row.slot)
        lanes = tuple([stage_lane(row) for row in chosen])
        return Option(graph, tuple(chosen), lanes, graph.shape.batch - len(chosen), terminal)

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        shapes = self.blocked.board.compiled.stages
        place = int(self.places[index])
        smaller = shapes.batch[shapes.larger.than[shapes.larger.shape == place]]
        return f"redundant: batch {smaller[smaller >= self.terms.served[index]].min()} serves the same requests"


def stage_pool(blocked: Blocked, *, every: bool) -> StagePool | None:
    """One candidate for each graph that retires a finished request or advances a chain; None without any. Those that do
    not compete are among them only if `every` is asked for."""
    board, valued = blocked.board, blocked.valued
    if not valued.rows:
        return None
    stages = board.compiled.stages
    fits = valued.fits(board.compiled)
    counts = np.minimum(stages.batch, fits.sum(axis=1))
    needed = np.array([blocked.counts.get(kind, 0) for kind in KINDS]).take(stages.kind_at)
    eligible = stages.batch_below < needed
    places = np.flatnonzero(counts if every else counts * eligible)
    if not places.size:
        return None
    fits, counts = fits.take(places, axis=0), counts.take(places)
    index = stages.index.take(places)
    duration_ms = board.times.spent_ms.take(index)
    service, age = valued.worth(duration_ms)
    order = np.argsort(np.where(fits, -(service + age), np.inf), axis=1, kind="stable")
    starts = np.arange(0, order.size, order.shape[1])
    sums = np.array((service, age)).reshape(2, -1).take(order + starts[:, None], axis=1).cumsum(axis=2)
    service, age = sums.reshape(2, -1).take(starts + (counts - 1), axis=1)
    priced = terms(
        duration_ms,
        service,
        age,
        board.waiting_price,
        served=np.minimum(stages.batch, needed).take(places),
        eligible=eligible.take(places),
        gap=None if board.gap_cost is None else board.gap_cost.take(index),
    )
    return StagePool(priced, blocked, places, order, counts)
