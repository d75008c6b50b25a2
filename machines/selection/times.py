"""How long the graphs of a view take, by what they serve.

Owns the durations of each group of shapes, and the least of those that serve a lane alike: rounds of one width, prompts
of one capacity. Does not own what a lane is worth. Surprising rule: here too an unknown duration is 0, but the least of
none measured is infinite, so that a rate by it is 0.
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
    """The durations `ms` [g] of a group of shapes, and the least of those that serve alike: of rounds [w], by width; of
    prompts [n], by capacity."""

    shapes: Shapes
    ms: Floats
    least_ms: Floats


class Times(NamedTuple):
    """The durations `ms` [G] of all graphs in the view's order; `known` if all are measured."""

    ms: Floats
    known: bool
    rounds: Group
    prompts: Group
    scored: Group

    @staticmethod
    def of(compiled: Compiled, graphs: Sequence[GraphRow]) -> Times:
        """Read the durations of a view's graphs, which `compiled` is the catalog of."""
        ms = np.fromiter(map(_duration_ns, graphs), np.float64, len(graphs)) / NS_PER_MS
        known = np.count_nonzero(ms) == len(ms)
        measured = np.empty(len(ms) + 1)
        measured[:-1] = ms if known else np.where(ms > 0.0, ms, np.inf)
        measured[-1] = np.inf
        least_ms = np.minimum.reduceat(measured.take(compiled.alike), compiled.alike_first)
        widths, capacities = len(compiled.widths), len(compiled.capacities)
        parts = (
            (compiled.rounds, least_ms[:widths]),
            (compiled.prompts, least_ms[widths : widths + capacities]),
            (compiled.scored, least_ms[widths + capacities :]),
        )
        return Times(ms, known, *[Group(shapes, ms.take(shapes.index), least) for shapes, least in parts])
