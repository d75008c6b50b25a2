"""Rounds of output without a prompt: one round for each of the best rows that a batch holds.

Owns the candidates of the decode and speculative graphs, and those of mixed graphs that consume no prompt
(docs/scheduling.md, "Score"). Does not own how lanes are ranked (`cohort`), who shares the rows of a ragged program
(`ragged`) or the comparison with other kinds. Surprising rule: rows whose next step needs feedback compete with all
others; if they win, the window drains for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphShape
from .board import Board
from .compiled import Ints
from .copies import surplus_copies
from .lanes import Bools, Floats, Option, Terms, padding, terms
from .ragged import Share, Sharing, allocates
from .streams import round_lane
from .view import RequestRow

_ROUNDING = 1e-9
"""Relative difference of two sums of the same values in other orders, and more."""


class RoundPool(NamedTuple):
    """One candidate for each graph of `Compiled.rounds`; `shares` has the cohorts of `Compiled.shared`, `copies`
    what makes programs of copies redundant."""

    terms: Terms
    board: Board
    shares: dict[int, Share]
    copies: dict[int, GraphShape]

    @property
    def dispatched(self) -> NDArray[np.intp]:
        """Places in the view's graphs."""
        return self.board.compiled.rounds.index

    def option(self, index: int) -> Option:
        """The cohort of one candidate."""
        board, shapes = self.board, self.board.compiled.rounds
        graph = board.view.graphs[shapes.index[index]]
        offer_at = int(shapes.offer_at[index])
        offer = board.compiled.offers[offer_at]
        share = self.shares.get(index)
        if share is not None:
            own = allocates(board.view, graph.shape)
            work = zip(share.members, share.rows, strict=True)
            lanes = tuple([round_lane(row, offer, rows, allocates=own) for row, rows in work])
            unused = graph.shape.packed_targets - sum(share.rows)
            return Option(graph, share.members, lanes, unused, targets=share.rows, allocates=own)
        chosen = best_streams(board, graph.duration_ns > 0, offer_at, int(self.terms.served[index]))
        chosen.sort(key=lambda row: row.slot)
        lanes = tuple([round_lane(row, offer) for row in chosen])
        return Option(graph, tuple(chosen), lanes, padding(graph.shape, lanes))

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        shapes = self.board.compiled.rounds
        share, copies = self.shares.get(index), self.copies.get(index)
        smaller_one = copies if share is None or share.redundant is None else share.redundant
        if smaller_one is not None:
            return f"redundant: {smaller_one.name} does the same work"
        smaller = shapes.larger.than[shapes.larger.shape == index]
        enough = smaller[shapes.batch[smaller] >= self.terms.served[index]]
        if shapes.mixed[index]:
            return f"redundant: {min([shapes.shapes[place] for place in enough.tolist()]).name} does the same work"
        return f"redundant: batch {shapes.batch[enough].min()} serves the same requests"


def round_pool(board: Board, *, every: bool = True, above: float | None = None) -> RoundPool | None:
    """Candidates for the ready streams; None without any. Without `every`, those that cannot win are not worked out;
    with `above`, those that cannot score more."""
    shapes, ready = board.compiled.rounds, board.streams.ready
    if not ready or not len(shapes):
        return None
    served = np.minimum(shapes.batch, ready)
    eligible = shapes.batch_below < served
    shared: dict[int, Share] = {}
    if board.compiled.shared:
        sharing, all_places = Sharing(board), every and above is None
        places = list(board.compiled.shared) if all_places else _contenders(board, sharing, served, eligible, above)
        eligible[[place for place in board.compiled.shared if place not in places]] = False
        shared = {place: sharing.share(place) for place in places}
    duration_ms = _spent_ms(board, served, shared)
    service, age = stream_sums(board, shapes.offer_at, served, duration_ms)
    for place, share in shared.items():
        count, ms = len(share.members), float(duration_ms[place])
        service[place], served[place], eligible[place] = share.service, count, share.redundant is None
        age[place] = share.aged + float(board.best.urgency[0, count]) * ms if ms else 0.0
    copies = surplus_copies(board, served) if board.compiled.fewer_copies else {}
    eligible[list(copies)] = False
    gap = None
    if board.gaps is not None and board.gap_cost is not None:
        gap = board.gap_cost.take(shapes.index)
        if duration_ms is not board.times.rounds.spent_ms:
            gap = np.where(duration_ms > 0.0, board.gaps.cost(duration_ms), 0.0)
    priced = terms(duration_ms, service, age, board.waiting_price, served=served, eligible=eligible, gap=gap)
    return RoundPool(priced, board, shared, copies)


def _contenders(board: Board, sharing: Sharing, served: Ints, eligible: Bools, above: float | None) -> list[int]:
    """Those of `Compiled.shared` that may win, or score more than `above`, or be measured anew in place of the winner.

    No cohort is worth more than the best lanes with all that they can use, nor than `Sharing.most`, and none is kept
    that a smaller program of as many rows as there are streams serves.
    """
    compiled, ready = board.compiled, board.streams.ready
    places, shapes = list(compiled.shared), compiled.rounds
    if board.view.host_gap_ms:
        return places
    ms = board.times.rounds.ms
    known = ms > 0.0
    service, age = stream_sums(board, shapes.offer_at, served, ms)
    worth, per_ms = service + age, np.divide(1.0, ms, where=known, out=np.zeros(len(ms)))
    lost = ms * (0.5 * board.waiting_price)
    if board.gap_cost is not None:
        lost += board.gap_cost.take(shapes.index)
    score = worth * per_ms - lost
    others = eligible & known
    others[places] = False
    least = float(score[others].max(initial=-np.inf)) if above is None else above
    least -= abs(least) * _ROUNDING if least > -np.inf else 0.0
    rows, refreshes = board.view.graphs, board.view.refresh_funded and above is None
    found = []
    for place in places:
        smaller = [shapes.shapes[other] for other in compiled.shared[place]]
        if any(shape.batch >= ready and not shape.ragged for shape in smaller):
            continue
        wins = not known[place] or (
            score[place] >= least and sharing.most(place, float(ms[place])) * per_ms[place] - lost[place] >= least
        )
        if wins or (refreshes and rows[shapes.index[place]].stale):
            found.append(place)
    return found


def _spent_ms(board: Board, served: Ints, shared: dict[int, Share]) -> Floats:
    """How long [g] the rounds take in their scores: with the host gap also where one of the rows needs feedback."""
    group, gap_ms = board.times.rounds, board.view.host_gap_ms
    if not gap_ms:
        return group.spent_ms
    feedback = np.array([row.needs_feedback for row in board.streams.rows[: board.streams.ready]])
    if not feedback.any():
        return group.spent_ms
    # Only measured graphs have a gap, so this ranking is theirs.
    first = feedback.take(board.best.order).cumsum(axis=1) > 0
    drained = first[group.shapes.offer_at, served - 1]
    for place, share in shared.items():
        drained[place] = any(row.needs_feedback for row in share.members)
    return np.where(drained & (group.ms > 0.0) & (group.spent_ms == group.ms), group.ms + gap_ms, group.spent_ms)


def stream_sums(board: Board, offer_at: NDArray[np.intp], lanes: Ints, duration_ms: Floats) -> tuple[Floats, Floats]:
    """Priced service and age term of the best `lanes` [n] ready streams in graphs of an offer and `duration_ms` [n].

    An unknown graph (duration 0) takes the streams of greatest service, and has no age term.
    """
    best = board.best
    places = offer_at * best.service.shape[1] + lanes
    service = best.service.take(places)
    age = best.aged.take(places) + best.urgency.take(places) * duration_ms
    if not board.times.known:
        known = duration_ms > 0.0
        service = np.where(known, service, board.plain.service.take(places))
        age = np.where(known, age, 0.0)
    return service, age


def best_streams(board: Board, known: bool, offer_at: int, count: int) -> list[RequestRow]:
    """The `count` ready streams that a graph of this offer serves, best first."""
    ranking = board.best if known else board.plain
    return [board.streams.rows[place] for place in ranking.order[offer_at, :count].tolist()]
