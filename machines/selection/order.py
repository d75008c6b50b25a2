"""The total order of candidates: which wins, down to the last tie.

Owns docs/scheduling.md, "Tie order". Does not own scores. Surprising rule: scores are compared as they are; two that
differ in the last bit are no tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphShape
from .lanes import Bools, Option, Terms
from .view import RequestRow


class Pool(Protocol):
    """The candidates of one kind: priced terms [n], and the graph and cohort of each."""

    @property
    def terms(self) -> Terms:
        """Columns of all candidates; the duration of a sequence is that of both graphs."""
        ...

    @property
    def dispatched(self) -> NDArray[np.intp]:
        """The place [n] in the view's graphs of what each candidate would submit: of a sequence, its first graph."""
        ...

    def option(self, index: int) -> Option:
        """The graph and cohort of one candidate."""
        ...

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        ...


class Standing(NamedTuple):
    """A candidate's place in the total order; the smallest is the best. Greater-is-better columns are negated.

    Of a sequence, `served`, `last_fences` and `slots` are those of the requests of its first graph and of the ready
    ones of its second; `padding` is that of the first.
    """

    known: bool
    value: float
    duration_ms: float
    served: int
    last_fences: tuple[int, ...]
    padding: int
    slots: tuple[int, ...]
    shape: GraphShape
    following: tuple[GraphShape, tuple[int, ...], tuple[int, ...]] | tuple[()]


class Head(NamedTuple):
    """The best candidate of a pool, not yet spelled out: the first two columns of its standing, and where it is."""

    known: bool
    value: float
    pool: Pool
    candidate: int


class Leader(NamedTuple):
    """The first of some candidates, and its place among all."""

    place: Standing
    option: Option


_LOSSES = (
    "measured, while an unmeasured graph competes",
    "lower value",
    "equal value, longer",
    "equal value, serves fewer",
    "equal value, its requests were served more recently",
    "equal value, more padding",
    "equal value, higher slots",
    "equal value, larger shape",
    "equal value, later in the order of following graphs",
)
DISPLACED = "displaced by a stale graph that is measured again"
PROBED = "displaced by a round that offers more proposals, to learn how many are accepted"


def standing(terms: Terms, index: int, option: Option) -> Standing:
    """The place of one candidate."""
    requests: tuple[RequestRow, ...] = option.requests
    following: tuple[GraphShape, tuple[int, ...], tuple[int, ...]] | tuple[()] = ()
    if option.sequel is not None:
        rows = option.sequel.requests
        merged = {row.slot: row for row in (*requests, *rows)}
        requests = tuple([merged[slot] for slot in sorted(merged)])
        following = option.sequel.graph.shape, _fences(rows), _slots(rows)
    return Standing(
        bool(terms.duration_ms[index] > 0.0),
        -float(terms.score[index]),
        float(terms.duration_ms[index]),
        -int(terms.served[index]),
        _fences(requests),
        option.padding,
        _slots(requests),
        option.graph.shape,
        following,
    )


def _fences(requests: Sequence[RequestRow]) -> tuple[int, ...]:
    return tuple(sorted([row.last_fence for row in requests]))


def _slots(requests: Sequence[RequestRow]) -> tuple[int, ...]:
    return tuple([row.slot for row in requests])


def champion(pool: Pool, among: Bools | None = None) -> int | None:
    """The best eligible candidate of a pool, of those that `among` [n] admits; None if there is none."""
    terms = pool.terms
    admitted = terms.eligible if among is None else terms.eligible & among
    if np.count_nonzero(terms.duration_ms) < len(terms.duration_ms):
        unknown = admitted & (terms.duration_ms == 0.0)
        admitted = unknown if unknown.any() else admitted
    score = np.where(admitted, terms.score, -np.inf)
    place = int(score.argmax())
    best = score[place]
    if best == -np.inf:
        return None
    level = score == best
    if np.count_nonzero(level) == 1:
        return place
    # Columns first: cohorts are spelled out only for what is still equal after them.
    alive = np.flatnonzero(level)
    for column in (terms.duration_ms, -terms.served):
        values = column[alive]
        alive = alive[values == values.min()]
        if alive.size == 1:
            return int(alive[0])
    return min(alive.tolist(), key=lambda index: standing(terms, index, pool.option(index)))


def front(pools: Sequence[Pool], rivals: Sequence[Head] = (), dispatched: int | None = None) -> list[Head]:
    """Of the best candidates of all `pools` and of `rivals` those of the greatest value, the unknown ones first.

    `dispatched` admits those alone that would submit the graph at this place of the view.
    """
    heads = list(rivals)
    for pool in pools:
        index = champion(pool, None if dispatched is None else pool.dispatched == dispatched)
        if index is not None:
            terms = pool.terms
            heads.append(Head(bool(terms.duration_ms[index] > 0.0), -float(terms.score[index]), pool, index))
    best = min([head[:2] for head in heads], default=None)
    return [head for head in heads if head[:2] == best]


def leader(heads: Sequence[Head]) -> Leader | None:
    """The first of some candidates in the total order; None without any. Only these are spelled out."""
    leaders = []
    for head in heads:
        option = head.pool.option(head.candidate)
        leaders.append(Leader(standing(head.pool.terms, head.candidate, option), option))
    return min(leaders, key=lambda one: one.place, default=None)


def why_lost(loser: Standing, winner: Standing) -> str:
    """The first column in which two candidates differ, in words; one that stands before the winner was displaced."""
    if loser < winner:
        return DISPLACED
    for column, mine, best in zip(_LOSSES, loser, winner, strict=True):
        if mine != best:
            return column
    raise ValueError("a candidate does not lose against itself")
