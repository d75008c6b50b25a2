"""Rounds whose rows share fewer target rows than their widths come to.

Owns whom a ragged program serves and the target rows that each gets (docs/scheduling.md, "Selection of rounds"). Does
not own what a lane is worth at its full ceiling (`streams`). Surprising rule: lanes are no longer independent, so the
best cohort is not simply the best lanes. Where prefixes are kept it is found exactly; else a bounded search tries the
first lanes of three orders. A rectangular program that a ragged one may make redundant is looked at here as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphShape, Source
from .board import Board
from .compiled import Offer
from .lanes import Bools, Floats, Ints
from .streams import target_positions
from .view import RequestRow, View


class Share(NamedTuple):
    """The cohort of one program in the order of slots, the target `rows` that each is expected to get, and what they
    are worth: `service + aged + urgency * T` for each. `redundant`: the smaller program that serves them as well."""

    members: tuple[RequestRow, ...]
    rows: tuple[int, ...]
    service: float
    aged: float
    redundant: GraphShape | None


class Search(NamedTuple):
    """The first k + 1 lanes of an order, [k, e + 1]: how many of the likeliest 0, 1, ... proposals are theirs, and what
    these add to their service."""

    reached: Ints
    gained: Floats


class Lanes(NamedTuple):
    """The ready streams [m] at one offer: the most target rows of each, and its `service` [m, r] with r + 1 of them.
    Then all their proposals [e], the likeliest to be reached first: whose each is, and what it adds to its service.
    `best_gains` [e + 1]: what the best 0, 1, ... of them add. `searches` keeps what was worked out for an order:
    programs differ in their targets alone."""

    offer_at: int
    ceilings: Ints
    service: Floats
    owner: NDArray[np.intp]
    gain: Floats
    best_gains: Floats
    searches: dict[bytes, Search]

    def search(self, order: NDArray[np.intp]) -> Search:
        """The first lanes of an order."""
        key = order.tobytes()
        if key not in self.searches:
            place = np.empty(len(order), np.intp)
            place[order] = np.arange(len(order))
            theirs = np.zeros((len(order), len(self.owner) + 1), np.bool_)
            theirs[:, 1:] = place.take(self.owner) <= np.arange(len(order))[:, None]
            # Cumulative sums add from the first proposal on, the same on every machine.
            gained = np.where(theirs, np.concatenate(((0.0,), self.gain)), 0.0).cumsum(axis=1)
            self.searches[key] = Search(theirs.cumsum(axis=1), gained)
        return self.searches[key]

    @staticmethod
    def of(board: Board, offer_at: int) -> Lanes:
        """The lanes of a board. No estimate rises with depth, so that a sorted list is what a greedy search takes."""
        offer, streams = board.compiled.offers[offer_at], board.streams
        rows = streams.rows[: streams.ready]
        steps = _table([row.copy_scored_survival if offer.copied else row.scored_survival for row in rows], offer.depth)
        # The exponent of scores changes no order. What has told nothing yet is taken to think as the host does.
        device = _device(board.view, offer)
        joint = _table([row.forecast or row.survival for row in rows], offer.depth) if device else steps
        ceilings = np.array([target_positions(row, offer) for row in rows])
        owner, depth = (np.arange(1, offer.depth + 1) < ceilings[:, None]).nonzero()
        first = np.lexsort((np.array([row.slot for row in rows]).take(owner), depth, -joint[owner, depth]))
        gain = streams.token[: len(rows), None] * steps
        service = streams.service[0, : len(rows), None] + np.hstack((np.zeros((len(rows), 1)), gain.cumsum(axis=1)))
        added = gain[owner, depth].take(first)
        best_gains = np.concatenate(((0.0,), np.sort(added)[::-1])).cumsum()
        return Lanes(offer_at, ceilings, service, owner.take(first), added, best_gains, {})


class Cohort(NamedTuple):
    """Places of lanes in some order and the target rows of each."""

    places: NDArray[np.intp]
    rows: Ints


def _table(survivals: Sequence[Sequence[float]], depth: int) -> Floats:
    return np.array([(*survival, *((0.0,) * depth))[:depth] for survival in survivals]).reshape(len(survivals), depth)


def _device(view: View, offer: Offer) -> bool:
    return view.device_allocates and not view.keeps_prefixes and not offer.copied


def allocates(view: View, shape: GraphShape) -> bool:
    """Whether a program shares out its target rows itself, below the ceilings of its lanes."""
    return shape.ragged and shape.source is Source.DRAFT and _device(view, Offer.of(shape))


class Sharing:
    """The programs of `Compiled.shared` on one board, on which there is a ready stream. Places are among the rounds."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lanes: dict[int, Lanes] = {}

    def share(self, place: int) -> Share:
        """The cohort of a program."""
        board, rounds = self._board, self._board.compiled.rounds
        shape, ms = rounds.shapes[place], float(board.times.rounds.spent_ms[place])
        smaller = [rounds.shapes[other] for other in board.compiled.shared[place]]
        return (_kept if self._keeps(shape) else _allocated)(board, self._at(place), shape, ms, smaller)

    def most(self, place: int, ms: float) -> float:
        """What no cohort of a program that takes `ms` is worth more than: the best lanes with a row each, and the best
        proposals that there are rows for, whosever they are. No bound at all where prefixes are kept."""
        board, shape = self._board, self._board.compiled.rounds.shapes[place]
        if self._keeps(shape):
            return math.inf
        streams, lanes = board.streams, self._at(place)
        lane = np.sort(streams.service[0, : streams.ready] + board.urgency * streams.age_ms[: streams.ready])
        counts = np.arange(1, min(shape.batch, len(lane)) + 1)
        proposals = np.minimum(shape.packed_targets - counts, len(lanes.best_gains) - 1)
        worth = lane[::-1].cumsum().take(counts - 1) + counts * (board.urgency * ms) + lanes.best_gains.take(proposals)
        return float(worth.max())

    def _keeps(self, shape: GraphShape) -> bool:
        return self._board.view.keeps_prefixes or not shape.ragged

    def _at(self, place: int) -> Lanes:
        offer_at = int(self._board.compiled.rounds.offer_at[place])
        if offer_at not in self._lanes:
            self._lanes[offer_at] = Lanes.of(self._board, offer_at)
        return self._lanes[offer_at]


def _value(board: Board, service: Floats, ms: float) -> Floats:
    """Worth of lanes by their `service` [m] in a graph that takes `ms`; an unknown one (0) by their service alone."""
    ready = board.streams.ready
    return service + board.urgency * (board.streams.age_ms[:ready] + ms) if ms else service


# Prefixes as the rows of a program have room for


def _kept(board: Board, lanes: Lanes, shape: GraphShape, ms: float, smaller: Sequence[GraphShape]) -> Share:
    """The best cohort of whole prefixes of those that no smaller program could serve, or the best of all, redundant."""
    order = (board.best if ms else board.plain).order[lanes.offer_at]
    ceilings = lanes.ceilings.take(order)
    most, targets = min(shape.batch, len(order)), shape.packed_targets
    if ceilings.min() == ceilings.max():
        most = min(most, targets // int(ceilings[0]))
    first = Cohort(order[:most], ceilings[:most])
    fits, covered = int(first.rows.sum()) <= targets, _smaller(first.rows, smaller) is not None
    # What is smaller holds every part of a cohort that it holds, and all cohorts are parts of the first then.
    whole = most == len(order) or ceilings.min() == ceilings.max()
    if fits and (whole or not covered):
        return _share(board, lanes, first, smaller)
    value = _value(board, board.streams.service[lanes.offer_at, : len(order)], ms).take(order)
    targets = min(targets, int(np.sort(ceilings)[-most:].sum()))
    chosen = _exact(value, ceilings, most, targets, smaller)
    # Without any left that is not redundant, which one is shown does not matter.
    chosen = _exact(value, ceilings, most, targets, ()) if chosen is None else chosen
    assert chosen is not None, "the targets of a program hold the pending tokens of its rows"
    return _share(board, lanes, Cohort(order.take(chosen), ceilings.take(chosen)), smaller)


def _exact(
    value: Floats, ceilings: Ints, most: int, targets: int, smaller: Sequence[GraphShape]
) -> NDArray[np.intp] | None:
    """The lanes of the greatest sum of `value` that `most` rows and `targets` hold and nothing smaller does; of equal
    sums the most lanes, of equally many those that come first. None without any.

    Lane by lane, last to first: `best` [c, r] is the greatest value of c lanes with r target rows, of the lanes so far.
    """
    best = np.full((most + 1, targets + 1), -np.inf)
    best[0, 0] = 0.0
    taken = np.zeros((len(value), *best.shape), np.bool_)
    for lane in range(len(value) - 1, -1, -1):
        rows = int(ceilings[lane])
        if rows <= targets:
            joined = best[:-1, : targets + 1 - rows] + value[lane]
            here = taken[lane, 1:, rows:]
            np.logical_and(joined >= best[1:, rows:], joined > -np.inf, out=here)
            best[1:, rows:][here] = joined[here]
    best[0, 0] = -np.inf
    best[_covered(np.arange(most + 1)[:, None], np.arange(targets + 1), smaller)] = -np.inf
    if best.max() == -np.inf:
        return None
    cells = [(-count, rows) for count, rows in np.argwhere(best == best.max()).tolist()]
    fewest = min(cells)[0]
    chosen = [_traced(taken, ceilings, -count, rows) for count, rows in cells if count == fewest]
    return np.array(min(chosen), np.intp)


def _traced(taken: Bools, ceilings: Ints, count: int, rows: int) -> list[int]:
    chosen = []
    for lane in range(len(ceilings)):
        if taken[lane, count, rows]:
            chosen.append(lane)
            count, rows = count - 1, rows - int(ceilings[lane])
    return chosen


# Prefixes as likely as the rows of a program have room for


def _allocated(board: Board, lanes: Lanes, shape: GraphShape, ms: float, smaller: Sequence[GraphShape]) -> Share:
    """The best of the first 1, 2, ... lanes in each of three orders, each cohort with the likeliest of its proposals:
    of those that no smaller program could serve, or of all."""
    one, ceiling = (board.streams.service[place, : board.streams.ready] for place in (0, lanes.offer_at))
    ranking = board.best if ms else board.plain
    per_row = (-(_value(board, ceiling, ms) / lanes.ceilings)).argsort(kind="stable")
    counts = np.arange(1, min(shape.batch, len(one)) + 1)
    spare = (shape.packed_targets - counts)[:, None]
    worth, rows, cohorts = [], [], []
    # Where orders are alike, so are their cohorts.
    orders = {order.tobytes(): order for order in (ranking.order[lanes.offer_at], ranking.order[0], per_row)}
    for order in orders.values():
        reached, gained = lanes.search(order)
        last = np.count_nonzero(reached[: len(counts)] <= spare, axis=1) - 1
        worth.append(_value(board, one, ms).take(order).cumsum()[: len(counts)] + gained[counts - 1, last])
        rows.append(counts + reached[counts - 1, last])
        cohorts += [(order[:count], end) for count, end in zip(counts.tolist(), last.tolist(), strict=True)]
    value = np.concatenate(worth)
    free = ~_covered(np.tile(counts, len(orders)), np.concatenate(rows), smaller)
    if free.any():
        value[~free] = -np.inf
    best = [cohorts[at] for at in np.flatnonzero(value == value.max()).tolist()]
    found = []
    # Different orders may come to the same cohort.
    for places, end in {(frozenset(places.tolist()), end): (places, end) for places, end in best}.values():
        lengths = 1 + np.bincount(lanes.owner[:end], minlength=len(one)).take(places)
        found.append(_share(board, lanes, Cohort(places, lengths), smaller))
    return min(found, key=_tie)


def _tie(share: Share) -> tuple[int, list[int], int, list[int]]:
    """The place of a cohort among equals: "Tie order" from the number of requests on."""
    fences, slots = sorted([row.last_fence for row in share.members]), [row.slot for row in share.members]
    return -len(slots), fences, -sum(share.rows), slots


# Both


def _share(board: Board, lanes: Lanes, cohort: Cohort, smaller: Sequence[GraphShape]) -> Share:
    """A cohort spelled out and summed up."""
    streams = board.streams
    lanes_of = zip(cohort.places.tolist(), cohort.rows.tolist(), strict=True)
    members = sorted([(streams.rows[place].slot, place, rows) for place, rows in lanes_of])
    service = aged = 0.0
    for _, place, rows in members:
        service += float(lanes.service[place, rows - 1])
        aged += board.urgency * float(streams.age_ms[place])
    return Share(
        tuple([streams.rows[place] for _, place, _ in members]),
        tuple([rows for _, _, rows in members]),
        service,
        aged,
        _smaller(cohort.rows, smaller),
    )


def _smaller(rows: Ints, smaller: Sequence[GraphShape]) -> GraphShape | None:
    """The smallest program that serves lanes of so many target rows as well; None without any."""
    total = int(rows.sum())
    return min((s for s in smaller if len(rows) <= s.batch and total <= s.packed_targets), default=None)


def _covered(counts: Ints, rows: Ints, smaller: Sequence[GraphShape]) -> Bools:
    """Whether one of the smaller programs serves so many lanes with so many target rows in all."""
    found = np.zeros(np.broadcast_shapes(counts.shape, rows.shape), np.bool_)
    for shape in smaller:
        found |= (counts <= shape.batch) & (rows <= shape.packed_targets)
    return found
