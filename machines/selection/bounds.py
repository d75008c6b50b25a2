"""Upper bounds on what a prerequisite and the graph that follows it can be worth, for all pairs of shapes at once.

Owns the bounds that spare most pairs from being worked out (docs/scheduling.md, "Stages and prerequisites"). Does not
own what a pair is really worth (`pairs`). Surprising rule: a bound may be too high, by lanes that compete for the same
row and by what redundancy bars, and never too low.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
class Shared:
    """What the pairs of all prerequisites have in common: the sequels [s] with their ready lanes alone, worth `base +
    slope * H`.

    `aged`: for pairs of measured graphs; else for those with an unknown one, which rank by priced service alone.
    """

    aged: bool
    known: bool
    following_ms: Floats
    ready: Ranking
    base: Floats
    slope: Floats

    @staticmethod
    def of(board: Board, *, aged: bool) -> Shared:
        """The sequels of the board's catalog."""
        sequels, streams = board.compiled.sequels, board.streams.ready
        ready = board.best if aged else board.plain
        lanes = np.minimum(sequels.rooms, streams)
        return Shared(
            aged,
            bool(board.duration_ms.all()),
            board.duration_ms.take(sequels.index),
            ready,
            (ready.service + ready.aged).take(sequels.width_at * (streams + 1) + lanes),
            ready.urgency[0].take(lanes),
        )


@dataclass(frozen=True, slots=True)
class Prerequisite:
    """One kind of first graph [f]: those that have it as their only stage left, whom else it serves, and a bound [f, s]
    on every pair.

    `graphs` are places in the view's graphs. `newly` ranks the streams that become ready, `terminals` the rows that
    retire. The sequels begin at `start`. A bound is -inf where there is no pair; rounding may have lowered it by
    `ROUNDING` of its size and of `cost_max`, the greatest waiting cost.
    """

    kind: GraphKind
    before: Before
    graphs: list[int]
    newly: Ranking
    terminals: Ranking
    start: int
    bound: Floats
    cost_max: float

    @staticmethod
    def of(blocked: Blocked, shared: Shared, kind: GraphKind, graphs: list[int]) -> Prerequisite:
        """Bound the pairs that begin with `graphs`, which are of one kind; at least one."""
        board, before = blocked.board, blocked.before[kind]
        part, first_ms = _part(board, before), board.duration_ms[graphs]
        following_ms, base, slope = shared.following_ms[part], shared.base[part], shared.slope[part]
        newly = terminals = NO_LANES
        until_ms = following_ms + max(first_ms.tolist())
        base = base + _prompts(board, before, part, until_ms, aged=shared.aged)
        if before.streams:
            newly = _newly(blocked, kind, before, aged=shared.aged)
            base, slope = _with_newly(board, before, newly, graphs, part, base, slope)
        if count := blocked.retiring(kind):
            terminals = _terminals(blocked, count, aged=shared.aged)
            price = 0.5 * board.scaled.terminal_age_price if shared.aged else 0.0
            worth = terminals.service[0, -1] + terminals.aged[0, -1] + terminals.urgency[0, -1] * until_ms
            base = base + worth + count * price * (until_ms * until_ms)
        bound, cost_max = _scores(board, shared, base, slope, first_ms[:, None], following_ms)
        return Prerequisite(kind, before, graphs, newly, terminals, part.start, bound, cost_max)


def first_graphs(blocked: Blocked, kind: GraphKind, *, fastest: bool) -> list[int]:
    """Places in the view of the graphs of a kind, without those that a smaller one makes redundant. Where all that they
    can do is to enable one prompt, which each has the row for, the `fastest` of them."""
    board, count, before = blocked.board, blocked.counts[kind], blocked.before[kind]
    shapes = board.compiled.kinds[kind]
    below = shapes.batch_below.tolist()
    graphs = [place for place, batch in zip(shapes.index.tolist(), below, strict=True) if batch < count]
    if not fastest or before.streams or blocked.retiring(kind):
        return graphs
    times = board.duration_ms[graphs].tolist()
    least_ms = min([ms for ms in times if ms > 0.0], default=0.0)
    return [place for place, ms in zip(graphs, times, strict=True) if ms == least_ms]


def _part(board: Board, before: Before) -> slice:
    """The sequels that rows of these phases can have any part in."""
    sequels = board.compiled.sequels
    start = 0 if before.streams else sequels.first[Companion.PROMPT]
    stop = len(sequels.index) if before.scored else sequels.first[Companion.SCORED_PROMPT]
    return slice(start, stop if before.prompts or before.scored else sequels.first[Companion.PROMPT])


def _newly(blocked: Blocked, kind: GraphKind, before: Before, *, aged: bool) -> Ranking:
    streams, price, places = blocked.board.streams, blocked.board.scaled.decode_age_price, before.streams
    urgency = price * (blocked.times.sigma_ms((kind,)) or 0.0) if aged else 0.0
    return rank(streams.service[:, places], np.full(len(places), urgency), streams.age_ms[places])


def _terminals(blocked: Blocked, count: int, *, aged: bool) -> Ranking:
    urgency = blocked.terminal_urgency if aged else 0.0
    age_ms = np.array([row.age_ms for row in blocked.board.terminals])
    return rank(np.full((1, count), blocked.board.scaled.terminal_value), np.full(count, urgency), age_ms)


def _with_newly(
    board: Board, before: Before, newly: Ranking, graphs: list[int], part: slice, base: Floats, slope: Floats
) -> tuple[Floats, Floats]:
    """`base` and `slope` [f, s] with as many newly ready streams as fit."""
    sequels, count = board.compiled.sequels, len(before.streams)
    batch = np.array([board.compiled.shapes[place].batch for place in graphs])[:, None]
    lanes = np.minimum(batch - sequels.enabled[part], np.minimum(sequels.rooms[part], count))
    base = base + (newly.service + newly.aged).take(sequels.width_at[part] * (count + 1) + lanes)
    return base, slope + newly.urgency[0].take(lanes)


def _prompts(board: Board, before: Before, part: slice, until_ms: Floats, *, aged: bool) -> Floats:
    """A bound [s] on the prompt lane of every sequel of `part` at `until_ms` [s]; 0 for rounds, -inf where there is no
    row for it."""
    sequels = board.compiled.sequels
    if part.start == sequels.first[Companion.PROMPT] and part.stop == sequels.first[Companion.SCORED_PROMPT]:
        return _prompt(board.prompts, before.prompts, sequels.capacity_at[part], until_ms, aged=aged)
    bounds, ends = np.zeros(len(until_ms)), (*sequels.first[1:], len(sequels.index))
    companions: tuple[tuple[Companion, Prompts, list[int]], ...] = (
        (Companion.READY_PROMPT, board.prompts, list(range(board.prompts.ready))),
        (Companion.PROMPT, board.prompts, before.prompts),
        (Companion.SCORED_PROMPT, board.scored, before.scored),
    )
    for companion, prompts, rows in companions:
        start, stop = max(sequels.first[companion], part.start), min(ends[companion], part.stop)
        if start < stop:
            here = slice(start - part.start, stop - part.start)
            bounds[here] = _prompt(prompts, rows, sequels.capacity_at[start:stop], until_ms[here], aged=aged)
    return bounds


def _prompt(prompts: Prompts, rows: list[int], capacity_at: Ints, until_ms: Floats, *, aged: bool) -> Floats:
    """The greatest worth [s] of one of `rows` in capacities [s] at `until_ms` [s]; -inf without rows."""
    lanes = prompts.service[rows].take(capacity_at, axis=1)
    if aged and prompts.urgency > 0.0:
        tokens = prompts.tokens[rows].take(capacity_at, axis=1)
        lanes += prompts.urgency * tokens * (prompts.age_ms[rows][:, None] + until_ms)
    return np.asarray(lanes.max(axis=0, initial=-np.inf))


def _scores(
    board: Board, shared: Shared, base: Floats, slope: Floats, first_ms: Floats, following_ms: Floats
) -> tuple[Floats, float]:
    """The bounds [f, s] of lanes that are worth `base + slope * H` at most, and the greatest waiting cost."""
    if not shared.aged:
        known = (first_ms > 0.0) & (following_ms > 0.0)
        return np.where(known, -np.inf, base), 0.0
    horizon_ms = first_ms + following_ms
    if not shared.known:
        known = (first_ms > 0.0) & (following_ms > 0.0)
        horizon_ms[~known] = 1.0
    cost = horizon_ms * (0.5 * board.waiting_price)
    bound = base / horizon_ms + slope - cost
    if board.gaps is not None:  # somewhat less than the cost: it may be so great that all else is rounding
        bound -= board.gaps.cost(horizon_ms) * (1.0 - ROUNDING)
    if not shared.known:
        bound[~known] = -np.inf
    return bound, float(cost.max(initial=0.0))
