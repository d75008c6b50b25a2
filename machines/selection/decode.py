"""Rounds of output without a prompt: one round for each of the best rows that a batch holds.

Owns the candidates of the decode and speculative graphs, and those of mixed graphs that consume no prompt
(docs/scheduling.md, "Score"). Does not own how lanes are ranked (`cohort`) or the comparison with other kinds.
Surprising rule: rows whose next step needs feedback compete with all others; if they win, the window drains for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .board import Board
from .compiled import Ints
from .lanes import Floats, Option, Terms, padding, terms
from .streams import round_lane
from .view import RequestRow


class RoundPool(NamedTuple):
    """One candidate for each graph of `Compiled.rounds`."""

    terms: Terms
    board: Board

    @property
    def dispatched(self) -> NDArray[np.intp]:
        """Places in the view's graphs."""
        return self.board.compiled.rounds.index

    def option(self, index: int) -> Option:
        """The cohort of one candidate."""
        board, shapes = self.board, self.board.compiled.rounds
        graph = board.view.graphs[shapes.index[index]]
        count = int(self.terms.served[index])
        chosen = best_streams(board, graph.duration_ns > 0, int(shapes.width_at[index]), count)
        chosen.sort(key=lambda row: row.slot)
        lanes = tuple([round_lane(row, graph.shape.width) for row in chosen])
        return Option(graph, tuple(chosen), lanes, padding(graph.shape, lanes))

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        shapes = self.board.compiled.rounds
        smaller = shapes.larger.than[shapes.larger.shape == index]
        enough = smaller[shapes.batch[smaller] >= self.terms.served[index]]
        if shapes.mixed[index]:
            return f"redundant: {min([shapes.shapes[place] for place in enough.tolist()]).name} does the same work"
        return f"redundant: batch {shapes.batch[enough].min()} serves the same requests"


def round_pool(board: Board) -> RoundPool | None:
    """Candidates for the ready streams; None without any."""
    shapes, ready = board.compiled.rounds, board.streams.ready
    if not ready or not len(shapes):
        return None
    duration_ms = board.times.rounds.ms
    served = np.minimum(shapes.batch, ready)
    service, age = stream_sums(board, shapes.width_at, served, duration_ms)
    priced = terms(
        duration_ms,
        service,
        age,
        board.waiting_price,
        served=served,
        eligible=shapes.batch_below < served,
        gap=None if board.gap_cost is None else board.gap_cost.take(shapes.index),
    )
    return RoundPool(priced, board)


def stream_sums(board: Board, width_at: NDArray[np.intp], lanes: Ints, duration_ms: Floats) -> tuple[Floats, Floats]:
    """Priced service and age term of the best `lanes` [n] ready streams in graphs of width and `duration_ms` [n].

    An unknown graph (duration 0) takes the streams of greatest service, and has no age term.
    """
    best = board.best
    places = width_at * best.service.shape[1] + lanes
    service = best.service.take(places)
    age = best.aged.take(places) + best.urgency.take(places) * duration_ms
    if not board.times.known:
        known = duration_ms > 0.0
        service = np.where(known, service, board.plain.service.take(places))
        age = np.where(known, age, 0.0)
    return service, age


def best_streams(board: Board, known: bool, width_at: int, count: int) -> list[RequestRow]:
    """The `count` ready streams that a graph of this width serves, best first."""
    ranking = board.best if known else board.plain
    return [board.streams.rows[place] for place in ranking.order[width_at, :count].tolist()]
