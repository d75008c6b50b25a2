"""Upper bounds on what a prerequisite and the graph that follows it can be worth, for all pairs of shapes at once.

Owns the bounds that spare most pairs from being worked out (docs/scheduling.md, "Stages and prerequisites"). Does not
own what a pair is really worth (`pairs`). Surprising rule: a bound may be too high, by lanes that compete for the same
row and by what redundancy bars, and never too low.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphKind
from .blocked import Before, Blocked
from .board import Board
from .cohort import Ranking, rank
from .compiled import Companion
from .lanes import Floats, Ints
from .prompt import Prompts

ROUNDING = 1e-12
"""By how much sums in another order may differ, relative to the two sides of a score."""

NO_LANES = rank(np.zeros((1, 0)), np.zeros(0), np.zeros(0))


@dataclass(frozen=True, slots=True)
class SequelWorth:
    """The ready lanes of every graph [s] that may follow, whatever comes before it: `base + slope * H`.

    `aged`: of measured graphs; else by priced service alone, for pairs with an unknown one. `newly_min` is how many
    newly ready streams there must be for no smaller graph to hold the same streams.
    """

    aged: bool
    ready: Ranking
    duration_ms: Floats
    newly_min: Ints
    base: Floats
    slope: Floats

    @staticmethod
    def of(board: Board, *, aged: bool) -> SequelWorth:
        """The worth of the sequels in the board's catalog."""
        sequels, streams = board.compiled.sequels, board.streams.ready
        ready = board.best if aged else board.plain
        lanes = np.minimum(sequels.rooms, streams)
        return SequelWorth(
            aged,
            ready,
            board.duration_ms.take(sequels.index),
            (np.maximum(sequels.batch_below - streams, 0) + 1) * (1 - sequels.enabled),
            (ready.service + ready.aged).take(sequels.width_at * (streams + 1) + lanes),
            ready.urgency[0].take(lanes),
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """One kind of prerequisite: its first graphs [f], those that they serve, and a bound [f, s] on every pair.

    `graphs` are places in the view's graphs, without those that a smaller one makes redundant. `newly` ranks the
    streams that become ready, `terminals` the rows that retire. The sequels begin at `start`. A bound is -inf where
    there is no pair; `slack` is by how much rounding may have lowered it.
    """

    worth: SequelWorth
    kind: GraphKind
    before: Before
    graphs: NDArray[np.intp]
    duration_ms: Floats
    batch: Ints
    newly: Ranking
    terminals: Ranking
    start: int
    bound: Floats
    slack: float

    @staticmethod
    def of(blocked: Blocked, worth: SequelWorth, kind: GraphKind, only: int | None) -> Bounds:
        """Bound the pairs of one kind; `only` admits a single first graph."""
        board, before, sequels = blocked.board, blocked.before[kind], blocked.board.compiled.sequels
        shapes = board.compiled.kinds[kind]
        admitted = shapes.batch_below < blocked.counts[kind]
        if only is not None:
            admitted &= shapes.index == only
        graphs, batch = shapes.index[admitted], shapes.batch[admitted]
        first_ms, part = board.duration_ms[graphs][:, None], _part(board, before)
        following_ms = worth.duration_ms[part]
        horizon_ms = first_ms + following_ms
        most_ms = horizon_ms.max(axis=0, initial=0.0)

        base, slope = worth.base[part], worth.slope[part]
        base = base + _prompts(board, before, part, most_ms, aged=worth.aged)
        newly = NO_LANES
        if before.streams:
            newly = _newly(blocked, kind, before, aged=worth.aged)
            count, rooms = len(before.streams), np.minimum(sequels.rooms, len(before.streams))[part]
            lanes = np.minimum(batch[:, None] - sequels.enabled[part], rooms)
            able = lanes >= worth.newly_min[part]
            lanes = np.maximum(lanes, 0)
            sums = (newly.service + newly.aged).take(sequels.width_at[part] * (count + 1) + lanes)
            base, slope = np.where(able, base + sums, -np.inf), slope + newly.urgency[0].take(lanes)
        terminals = _terminals(blocked, kind, aged=worth.aged)
        retired = len(terminals.order[0])
        if retired:
            saved = most_ms * most_ms * (0.5 * board.scaled.terminal_age_price if worth.aged else 0.0)
            until_first = terminals.urgency[0, -1] * first_ms.max(initial=0.0)
            base = base + (terminals.service[0, -1] + terminals.aged[0, -1] + until_first + retired * saved)

        known = None if board.duration_ms.all() else (first_ms > 0.0) & (following_ms > 0.0)
        if not worth.aged:
            bound, cost = base if known is None else np.where(known, -np.inf, base), 0.0
        else:
            price = 0.5 * board.waiting_price
            whole_ms = horizon_ms if known is None else np.where(known, horizon_ms, 1.0)
            bound, cost = base / whole_ms + slope - whole_ms * price, float(most_ms.max(initial=0.0)) * price
            if board.gaps is not None:  # somewhat less than the cost: it may be so great that all else is rounding
                bound = bound - board.gaps.cost(whole_ms) * (1.0 - ROUNDING)
            bound = bound if known is None else np.where(known, bound, -np.inf)
        slack = ROUNDING * (abs(float(bound.max(initial=0.0))) + 2.0 * cost)
        return Bounds(worth, kind, before, graphs, first_ms[:, 0], batch, newly, terminals, part.start, bound, slack)


def _part(board: Board, before: Before) -> slice:
    """The sequels that rows of these phases can have any part in."""
    sequels = board.compiled.sequels
    start = 0 if before.streams else sequels.first[Companion.PROMPT]
    stop = len(sequels.index) if before.scored else sequels.first[Companion.SCORED_PROMPT]
    return slice(start, stop if before.prompts or before.scored else sequels.first[Companion.PROMPT])


def _newly(blocked: Blocked, kind: GraphKind, before: Before, *, aged: bool) -> Ranking:
    streams, price = blocked.board.streams, blocked.board.scaled.decode_age_price
    urgency = price * (blocked.times.sigma_ms((kind,)) or 0.0) if aged else 0.0
    places = before.streams
    return rank(streams.service[:, places], np.full(len(places), urgency), streams.age_ms[places])


def _terminals(blocked: Blocked, kind: GraphKind, *, aged: bool) -> Ranking:
    count = blocked.retiring(kind)
    if not count:
        return NO_LANES
    urgency = blocked.terminal_urgency if aged else 0.0
    age_ms = np.array([row.age_ms for row in blocked.board.terminals])
    return rank(np.full((1, count), blocked.board.scaled.terminal_value), np.full(count, urgency), age_ms)


def _prompts(board: Board, before: Before, part: slice, horizon_ms: Floats, *, aged: bool) -> Floats:
    """A bound [s] on the prompt lane of every sequel of `part` at `horizon_ms` [s]; 0 where there is none to be."""
    sequels = board.compiled.sequels
    bounds = np.zeros(len(horizon_ms))
    companions: tuple[tuple[Companion, Prompts, list[int]], ...] = (
        (Companion.READY_PROMPT, board.prompts, list(range(board.prompts.ready))),
        (Companion.PROMPT, board.prompts, before.prompts),
        (Companion.SCORED_PROMPT, board.scored, before.scored),
    )
    ends = (*sequels.first[1:], len(sequels.index))
    for companion, prompts, places in companions:
        where = slice(max(sequels.first[companion], part.start), min(ends[companion], part.stop))
        if where.start >= where.stop:
            continue
        here = slice(where.start - part.start, where.stop - part.start)
        if not places:
            bounds[here] = -np.inf
            continue
        capacity_at = sequels.capacity_at[where]
        lanes = prompts.service.take(places, axis=0).take(capacity_at, axis=1)
        if aged and prompts.urgency > 0.0:
            tokens = prompts.tokens.take(places, axis=0).take(capacity_at, axis=1)
            lanes = lanes + prompts.urgency * tokens * (prompts.age_ms.take(places)[:, None] + horizon_ms[here])
        bounds[here] = lanes.max(axis=0)
    return bounds
