"""Candidates that consume prompts: prefill, scored prefill, and mixed graphs with decoding rows beside the prompt.

Owns the choice among cohorts of prompt rows and prepared capacities (docs/scheduling.md, "Score" and "Mixed graphs").
Does not own the work itself (`prompt`, `packing`) or how streams are ranked. Surprising rule: there is no
smallest-fitting filter; every measured capacity competes by the tokens that it would really consume, and only shapes
that could do no more than a smaller one are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .board import Board
from .compiled import Bools, Ints, Larger, Offer, Shapes
from .decode import best_streams, stream_sums
from .dominance import surplus
from .lanes import Option, Terms, padding, terms
from .packing import PromptCohorts
from .prompt import prompt_lane
from .streams import round_lane
from .times import Group


class PromptPool(NamedTuple):
    """Candidates [n]: cohorts of prompt rows in shapes, and streams in the rows that are left.

    `places` [n] counts through all pairs of a cohort [c] and a shape [g], cohorts first. `beside` [q, g] is the number
    of streams beside q + 1 prompt rows, `explored` [c, g] says which pairs exploration admits (None: all).
    """

    terms: Terms
    board: Board
    shapes: Shapes
    cohorts: PromptCohorts
    places: NDArray[np.intp]
    beside: Ints
    explored: Bools | None

    @property
    def dispatched(self) -> NDArray[np.intp]:
        """Places in the view's graphs."""
        return self.shapes.index[self.places % len(self.shapes)]

    def option(self, index: int) -> Option:
        """The prompt rows, the streams beside them and the graph of one candidate."""
        cohort, place = divmod(int(self.places[index]), len(self.shapes))
        graph = self.board.view.graphs[self.shapes.index[place]]
        members = self.cohorts.members(cohort, int(self.shapes.capacity_at[place]))
        work = [(row, prompt_lane(row, tokens)) for row, tokens in members]
        beside = int(self.beside[len(members) - 1, place])
        if beside:
            chosen = best_streams(self.board, graph.duration_ns > 0, int(self.shapes.offer_at[place]), beside)
            work += [(row, round_lane(row, Offer.of(graph.shape))) for row in chosen]
        work.sort(key=lambda one: one[0].slot)
        lanes = tuple([lane for _, lane in work])
        return Option(graph, tuple([row for row, _ in work]), lanes, padding(graph.shape, lanes))

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        cohort, place = divmod(int(self.places[index]), len(self.shapes))
        shapes = self.shapes
        if self.explored is not None and not self.explored[cohort, place]:
            reached = _reached(self.cohorts, shapes)[cohort]
            smaller = int(shapes.below[place])
            while shapes.below[smaller] >= 0 and reached[shapes.below[smaller]] == reached[place]:
                smaller = int(shapes.below[smaller])
            return f"unmeasured: capacity {shapes.prefill_tokens[smaller]} reaches the same endpoint"
        pairs = shapes.larger
        tokens = self.cohorts.tokens.take(shapes.capacity_at, axis=1)
        covers = _covers(self.cohorts, tokens, self.board.streams.ready, pairs)[cohort]
        if self.explored is not None:
            covers = covers & self.explored[cohort, pairs.than]
        smaller = int(pairs.than[(pairs.shape == place) & covers][0])
        if shapes.mixed[place]:
            return f"redundant: {shapes.shapes[smaller].name} does the same work"
        return f"redundant: capacity {shapes.prefill_tokens[smaller]} consumes the same tokens"


def prompt_pool(board: Board, group: Group, cohorts: PromptCohorts, *, every: bool) -> PromptPool | None:
    """Candidates of a prompt phase, served by the graphs of `group` alone; None without any. Those that do not compete
    are among them only if `every` is asked for."""
    shapes = group.shapes
    if not len(cohorts.rows) or not len(shapes):
        return None
    tokens = cohorts.tokens.take(shapes.capacity_at, axis=1)
    legal = (tokens > 0) & (cohorts.rows[:, None] <= shapes.rows)
    beside = np.minimum(shapes.beside[: cohorts.rows[-1]], board.streams.ready)
    explored = None if board.times.known else _explored(cohorts, shapes, group.ms > 0.0)
    eligible = _eligible(shapes, cohorts, tokens, board.streams.ready, explored)
    cohort, place = (legal if every else legal & eligible).nonzero()
    if not cohort.size:
        return None
    places = cohort * len(shapes) + place
    times, rows = group.spent_ms.take(place), cohorts.rows.take(cohort)
    chunks = cohort * cohorts.tokens.shape[1] + shapes.capacity_at.take(place)
    service, age = cohorts.service.take(chunks), np.zeros(len(places))
    if cohorts.aged is not None:
        age = cohorts.prompts.urgency * (cohorts.aged.take(chunks) + tokens.take(places) * times)
        age[times == 0.0] = 0.0
    teams = (rows - 1) * len(shapes) + place
    if np.count_nonzero(beside):
        stream_service, stream_age = stream_sums(board, shapes.offer_at, beside, group.spent_ms)
        service, age = service + stream_service.take(teams), age + stream_age.take(teams)
    priced = terms(
        times,
        service,
        age,
        board.waiting_price,
        served=rows + beside.take(teams),
        eligible=eligible.take(places),
        gap=None if board.gap_cost is None else board.gap_cost.take(shapes.index.take(place)),
    )
    return PromptPool(priced, board, shapes, cohorts, places, beside, explored)


def _reached(cohorts: PromptCohorts, shapes: Shapes) -> Ints:
    """How far [c, g] a shape takes the last row of a cohort towards its next endpoint; the others it takes whole."""
    return np.minimum(cohorts.last, cohorts.stop[:, None]).take(shapes.capacity_at, axis=1)


def _explored(cohorts: PromptCohorts, shapes: Shapes, known: Bools) -> Bools:
    """[c, g]: measured, or no smaller capacity of the same other extents gets as near to the endpoints.

    The next smaller one suffices: what a still smaller one reaches, it reaches as well.
    """
    reached = _reached(cohorts, shapes)
    further: Bools = reached[:, shapes.below] != reached
    return further | known | (shapes.below < 0)


def _eligible(shapes: Shapes, cohorts: PromptCohorts, tokens: Ints, ready: int, explored: Bools | None) -> Bools:
    """[c, g]: explored, and no smaller explored shape does the same work."""
    if explored is None:
        pairs = shapes.next_larger
        return ~surplus(len(shapes), pairs, _covers(cohorts, tokens, ready, pairs))
    # What exploration leaves out is no alternative to anything: a measured larger graph stays.
    pairs = shapes.larger
    covers = _covers(cohorts, tokens, ready, pairs) & explored[:, pairs.than]
    return explored & ~surplus(len(shapes), pairs, covers)


def _covers(cohorts: PromptCohorts, tokens: Ints, ready: int, pairs: Larger) -> Bools:
    """[c, e]: the smaller shape of a pair consumes the same prompt tokens [c, g], with room for the same rows."""
    same: Bools = tokens.take(pairs.than, axis=1) == tokens.take(pairs.shape, axis=1)
    room = pairs.most[: cohorts.rows[-1]] >= ready
    return same & (room if len(room) == 1 else room.take(cohorts.rows - 1, axis=0))
