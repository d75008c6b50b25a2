"""How long the graphs of a view take, by what they serve.

Owns the durations of each group of shapes, and the least of those that serve a lane alike: rounds of one offer, prompts
of one capacity; and the host gap of those that run alone (docs/scheduling.md, "Host gap"). Does not own what a lane is
worth. Surprising rule: here too an unknown duration is 0, but the least of none measured is infinite, so that a rate by
it is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from .compiled import Compiled, Shapes
from .lanes import NS_PER_MS, Floats
from .view import GraphRow

_duration_ns = attrgetter("duration_ns")


class Group(NamedTuple):
    """The durations `ms` [g] of a group of shapes, and the least of those that serve alike: of rounds [w], by offer; of
    prompts [n], by capacity. `spent_ms` [g] are those that scores reckon with."""

    shapes: Shapes
    ms: Floats
    least_ms: Floats
    spent_ms: Floats


class Times(NamedTuple):
    """The durations `ms` [G] of all graphs in the view's order; `known` if all are measured. `spent_ms` [G] adds the
    host gap to those that need an empty window, whomever they serve."""

    ms: Floats
    known: bool
    spent_ms: Floats
    rounds: Group
    prompts: Group
    scored: Group

    @staticmethod
    def of(compiled: Compiled, graphs: Sequence[GraphRow], gap_ms: float = 0.0) -> Times:
        """Read the durations of a view's graphs, which `compiled` is the catalog of; `gap_ms` is the host gap."""
        ms = np.fromiter(map(_duration_ns, graphs), np.float64, len(graphs)) / NS_PER_MS
        known = np.count_nonzero(ms) == len(ms)
        measured = np.empty(len(ms) + 1)
        measured[:-1] = ms if known else np.where(ms > 0.0, ms, np.inf)
        measured[-1] = np.inf
        least_ms = np.minimum.reduceat(measured.take(compiled.alike), compiled.alike_first)
        offers, capacities = len(compiled.offers), len(compiled.capacities)
        spent_ms = ms
        if gap_ms > 0.0:
            drained = np.array([graph.duration_ns > 0 and graph.drains for graph in graphs], np.bool_)
            spent_ms = np.where(drained, ms + gap_ms, ms)
        parts = (
            (compiled.rounds, least_ms[:offers]),
            (compiled.prompts, least_ms[offers : offers + capacities]),
            (compiled.scored, least_ms[offers + capacities :]),
        )
        groups = []
        for shapes, least in parts:
            own_ms = ms.take(shapes.index)
            groups.append(Group(shapes, own_ms, least, own_ms if spent_ms is ms else spent_ms.take(shapes.index)))
        return Times(ms, known, spent_ms, *groups)
