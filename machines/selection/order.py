"""The total order of candidates: which wins, down to the last tie.

Owns docs/scheduling.md, "Tie order". Does not own scores. Surprising rule: scores are compared as they are; two that
differ in the last bit are no tie.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from .lanes import Option, Terms


class Pool(Protocol):
    """The candidates of one kind: priced terms [n], and the graph and cohort of each."""

    @property
    def terms(self) -> Terms:
        """Columns of all candidates."""
        ...

    def option(self, index: int) -> Option:
        """The graph and cohort of one candidate."""
        ...

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        ...


class Standing(NamedTuple):
    """A candidate's place in the total order; the smallest is the best. Greater-is-better columns are negated."""

    known: bool
    value: float
    duration_ms: float
    served: int
    last_fences: tuple[int, ...]
    padding: int
    slots: tuple[int, ...]
    shape: tuple[str, int, int]


_LOSSES = (
    "measured, while an unmeasured graph competes",
    "lower value",
    "equal value, longer",
    "equal value, serves fewer",
    "equal value, its requests were served more recently",
    "equal value, more padding",
    "equal value, higher slots",
    "equal value, later in the catalog's order",
)


def standing(terms: Terms, index: int, option: Option) -> Standing:
    """The place of one candidate."""
    shape = option.graph.shape
    return Standing(
        bool(terms.duration_ms[index] > 0.0),
        -float(terms.score[index]),
        float(terms.duration_ms[index]),
        -int(terms.served[index]),
        tuple(sorted([row.last_fence for row in option.requests])),
        int(terms.padding[index]),
        tuple([row.slot for row in option.requests]),
        (shape.kind, shape.batch, shape.prefill_tokens),
    )


def champion(pool: Pool) -> int | None:
    """The best eligible candidate of a pool; None if it has none."""
    terms = pool.terms
    alive = np.flatnonzero(terms.eligible)
    if not alive.size:
        return None
    # Columns first: cohorts are spelled out only for what is still equal after them.
    for column in (terms.duration_ms > 0.0, -terms.score, terms.duration_ms, -terms.served):
        values = column[alive]
        alive = alive[values == values.min()]
        if alive.size == 1:
            return int(alive[0])
    return min(alive.tolist(), key=lambda index: standing(terms, index, pool.option(index)))


def why_lost(loser: Standing, winner: Standing) -> str:
    """The first column in which two candidates differ, in words."""
    for column, mine, best in zip(_LOSSES, loser, winner, strict=True):
        if mine != best:
            return column
    raise ValueError("a candidate does not lose against itself")
