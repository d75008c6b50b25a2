"""Upper bounds on what a prerequisite and the graph that follows it can be worth, for all pairs of shapes at once.

Owns the bounds that spare most pairs from being worked out (docs/scheduling.md, "Stages and prerequisites"). Does not
own what a pair is really worth (`pairs`). Surprising rule: a bound may be too high, by lanes that compete for the same
row and by what redundancy bars, and never too low.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..graph import GraphKind
from .blocked import Before, Blocked
from .board import Board
from .cohort import Ranking, rank
from .compiled import Companion
from .lanes import Bools, Floats, Ints
from .prompt import Prompts

ROUNDING = 1e-12
"""By how much sums in another order may differ, relative to the two sides of a score."""

PREREQUISITES = (GraphKind.INITIALIZE, GraphKind.RESTORE, GraphKind.VISION, GraphKind.SNAPSHOT, GraphKind.RESUME)

NO_LANES = rank(np.zeros((1, 0)), np.zeros(0), np.zeros(0))

EVERYWHERE = np.ones((1, 1), np.bool_)


class Prerequisite(NamedTuple):
    """One kind of first graph: those that have it as their only stage left, and whom else it serves.

    `newly` ranks the streams that become ready, `terminals` the rows that retire.
    """

    kind: GraphKind
    before: Before
    newly: Ranking
    terminals: Ranking

    @staticmethod
    def of(blocked: Blocked, kind: GraphKind, *, aged: bool) -> Prerequisite:
        """Rank the lanes of a kind; by their service alone unless `aged`."""
        before, count = blocked.before[kind], blocked.retiring(kind)
        newly = _newly(blocked, kind, before, aged=aged) if before.streams else NO_LANES
        return Prerequisite(kind, before, newly, _terminals(blocked, count, aged=aged) if count else NO_LANES)


class Bounds(NamedTuple):
    """All pairs of first graphs [f] and sequels [s], each with a bound on its score.

    `aged`: pairs of measured graphs; else those with an unknown one, which rank by priced service alone. `firsts` are
    places in the view's graphs, with what each is a prerequisite of; the sequels begin at `start`. `ready` ranks the
    lanes that are ready anyway. A bound is -inf where there is no pair; rounding may have lowered it by `ROUNDING` of
    its size and of `cost_max`, the greatest waiting cost.
    """

    aged: bool
    ready: Ranking
    firsts: list[tuple[Prerequisite, int]]
    start: int
    bound: Floats
    cost_max: float

    @staticmethod
    def of(blocked: Blocked, *, aged: bool, fastest: bool, only: int | None) -> Bounds | None:
        """Bound the pairs of a board; None without any. See `_first_graphs` for `fastest`; `only` admits a single first
        graph."""
        parts: list[tuple[Prerequisite, list[int]]] = []
        for kind in PREREQUISITES:
            if kind in blocked.before:
                graphs = [g for g in _first_graphs(blocked, kind, fastest=fastest) if only is None or g == only]
                if graphs:
                    parts.append((Prerequisite.of(blocked, kind, aged=aged), graphs))
        if not parts:
            return None
        board, sequels = blocked.board, blocked.board.compiled.sequels
        part, ready = _part(board, [one.before for one, _ in parts]), board.best if aged else board.plain
        firsts = [(one, graph) for one, graphs in parts for graph in graphs]
        first_ms = board.times.spent_ms.take([graph for _, graph in firsts])[:, None]
        following_ms = board.times.spent_ms.take(sequels.index[part])
        horizon_ms = first_ms + following_ms
        lanes = np.minimum(sequels.rooms[part], board.streams.ready)
        beside = (ready.service + ready.aged).take(sequels.offer_at[part] * ready.service.shape[1] + lanes)
        base, slope = _prompts(board, [one.before for one, _ in parts], part, aged=aged)
        counts, start = [len(graphs) for _, graphs in parts], 0
        base = np.repeat(base + beside, counts, axis=0)
        slope = np.repeat(slope + ready.urgency[0].take(lanes), counts, axis=0)
        for one, graphs in parts:
            here = slice(start, start + len(graphs))
            if one.before.streams:
                _add_newly(board, one, graphs, part, base[here], slope[here])
            if one.terminals is not NO_LANES:
                base[here] += _retired(board, one.terminals, graphs, horizon_ms[here], aged=aged)
            start += len(graphs)
        known = EVERYWHERE if board.times.known else (first_ms > 0.0) & (following_ms > 0.0)
        bound, cost_max = _scores(board, base, slope, horizon_ms, known, aged=aged)
        return Bounds(aged, ready, firsts, part.start, bound, cost_max)

    def cell(self, place: int) -> tuple[Prerequisite, int, int]:
        """The prerequisite, the first graph and the sequel of a place among all bounds."""
        first, sequel = divmod(place, self.bound.shape[1])
        return *self.firsts[first], self.start + sequel


def _first_graphs(blocked: Blocked, kind: GraphKind, *, fastest: bool) -> list[int]:
    """Places in the view of the graphs of a kind, without those that a smaller one makes redundant. Where all that they
    can do is to enable one prompt, which each has the row for, the `fastest` of them."""
    board, count, before = blocked.board, blocked.counts[kind], blocked.before[kind]
    shapes = board.compiled.kinds[kind]
    below = shapes.batch_below.tolist()
    graphs = [place for place, batch in zip(shapes.index.tolist(), below, strict=True) if batch < count]
    if not fastest or before.streams or blocked.retiring(kind):
        return graphs
    times = board.times.spent_ms.take(graphs).tolist()
    least_ms = min([ms for ms in times if ms > 0.0], default=0.0)
    return [place for place, ms in zip(graphs, times, strict=True) if ms == least_ms]


def _part(board: Board, before: Sequence[Before]) -> slice:
    """The sequels that rows of these phases can have any part in."""
    first = board.compiled.sequels.first
    start = 0 if any(rows.streams for rows in before) else first[Companion.PROMPT]
    if any(rows.scored for rows in before):
        return slice(start, None)
    return slice(start, first[Companion.SCORED_PROMPT if any(rows.prompts for rows in before) else Companion.PROMPT])


def _newly(blocked: Blocked, kind: GraphKind, before: Before, *, aged: bool) -> Ranking:
    streams, price, places = blocked.board.streams, blocked.board.scaled.decode_age_price, before.streams
    urgency = price * (blocked.times.sigma_ms((kind,)) or 0.0) if aged else 0.0
    return rank(streams.service[:, places], np.full(len(places), urgency), streams.age_ms[places])


def _terminals(blocked: Blocked, count: int, *, aged: bool) -> Ranking:
    urgency = blocked.terminal_urgency if aged else 0.0
    age_ms = np.array([row.age_ms for row in blocked.board.terminals])
    return rank(np.full((1, count), blocked.board.scaled.terminal_value), np.full(count, urgency), age_ms)


def _add_newly(
    board: Board, one: Prerequisite, graphs: Sequence[int], part: slice, base: Floats, slope: Floats
) -> None:
    """Add to `base` and `slope` [f, s] as many newly ready streams as fit."""
    sequels, count = board.compiled.sequels, len(one.before.streams)
    lanes = np.minimum(_batches(board, graphs) - sequels.enabled[part], np.minimum(sequels.rooms[part], count))
    base += (one.newly.service + one.newly.aged).take(sequels.offer_at[part] * (count + 1) + lanes)
    slope += one.newly.urgency[0].take(lanes)


def _retired(board: Board, terminals: Ranking, graphs: Sequence[int], horizon_ms: Floats, *, aged: bool) -> Floats:
    """What the rows are worth that each graph retires beside one that it enables, [f, 1] or [f, s]."""
    counts = np.minimum(_batches(board, graphs) - 1, terminals.order.shape[1])
    worth = (terminals.service + terminals.aged).take(counts)
    if not aged:
        return worth
    first_ms = board.times.spent_ms.take(graphs)[:, None]
    worth += terminals.urgency.take(counts) * first_ms
    return worth + counts * ((horizon_ms * horizon_ms - first_ms * first_ms) * (0.5 * board.scaled.terminal_age_price))


def _batches(board: Board, graphs: Sequence[int]) -> Ints:
    return np.array([board.compiled.shapes[place].batch for place in graphs])[:, None]


def _prompts(board: Board, before: Sequence[Before], part: slice, *, aged: bool) -> tuple[Floats, Floats]:
    """`base` and `slope` [k, s] of the best prompt lane of every sequel of `part`, for the rows `before` each stage: 0
    for rounds, and a `base` of -inf where there is no row."""
    sequels = board.compiled.sequels
    ends = (*sequels.first, len(sequels.index))
    base, slope = np.full((len(before), ends[-1]), -np.inf), np.zeros((len(before), ends[-1]))
    ready: Sequence[int] = range(board.prompts.ready)
    companions: tuple[tuple[Companion, Prompts, list[Sequence[int]]], ...] = (
        (Companion.READY_PROMPT, board.prompts, [ready if rows.streams else () for rows in before]),
        (Companion.PROMPT, board.prompts, [rows.prompts for rows in before]),
        (Companion.SCORED_PROMPT, board.scored, [rows.scored for rows in before]),
    )
    for place, rows in enumerate(before):
        if rows.streams:
            base[place, : ends[Companion.READY_PROMPT]] = 0.0
    for companion, prompts, groups in companions:
        places, here = [place for place, group in enumerate(groups) if group], slice(*ends[companion : companion + 2])
        if places and here.start < here.stop:
            members = [row for group in groups for row in group]
            starts = [0, *accumulate([len(groups[place]) for place in places[:-1]])]
            best, capacity_at = prompts.service.take(members, axis=0), sequels.capacity_at[here]
            if aged and prompts.urgency > 0.0:
                tokens = prompts.urgency * prompts.tokens.take(members, axis=0)
                best += tokens * prompts.age_ms.take(members)[:, None]
                slope[places, here] = np.maximum.reduceat(tokens, starts, axis=0).take(capacity_at, axis=1)
            base[places, here] = np.maximum.reduceat(best, starts, axis=0).take(capacity_at, axis=1)
    return base[:, part], slope[:, part]


def _scores(
    board: Board, base: Floats, slope: Floats, horizon_ms: Floats, known: Bools, *, aged: bool
) -> tuple[Floats, float]:
    """The bounds [f, s] of lanes that are worth `base + slope * H` at most, and the greatest waiting cost. `known`:
    both graphs are measured."""
    if not aged:
        return np.where(known, -np.inf, base), 0.0
    if not board.times.known:
        horizon_ms[~known] = 1.0
    cost = horizon_ms * (0.5 * board.waiting_price)
    bound = base / horizon_ms + slope - cost
    if board.gaps is not None:  # somewhat less than the cost: it may be so great that all else is rounding
        bound -= board.gaps.cost(horizon_ms) * (1.0 - ROUNDING)
    if not board.times.known:
        bound[~known] = -np.inf
    return bound, float(cost.max(initial=0.0))
