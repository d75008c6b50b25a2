"""Who shares the target rows of a ragged program, worked out a second time.

Owns the cohorts that such a program may serve, for the oracle. Does not own what they are worth. Surprising rule: where
prefixes are kept it takes all subsets; elsewhere it takes the search as it is documented, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from flare.machines.graph import GraphShape, Source
from flare.machines.selection.view import GraphRow, RequestRow, View

from .values import Lane, Values, chances, serving, targets


def allocates(view: View, shape: GraphShape) -> bool:
    """Whether the program itself shares out its rows."""
    return view.device_allocates and not view.keeps_prefixes and shape.ragged and shape.source is Source.DRAFT


def asked(view: View, lane: Lane, graph: GraphRow) -> int:
    """The tokens of a plan's lane: a ceiling where the program shares out its rows."""
    return targets(lane.row, graph.shape) if allocates(view, graph.shape) else lane.tokens


def likeliest(view: View, rows: Sequence[RequestRow], shape: GraphShape) -> list[int]:
    """The target rows of each row of a cohort: one, and as many more as the likeliest of their prefixes get."""
    lengths = dict.fromkeys([row.slot for row in rows], 1)
    for _ in range(shape.packed_targets - len(rows)):
        frontier = []
        for row in rows:
            plain, scored = chances(row, shape)
            joint = row.forecast or plain if allocates(view, shape) else scored
            depth = lengths[row.slot]
            if depth < targets(row, shape):
                likely = joint[depth - 1] if depth <= len(joint) else 0.0
                frontier.append((-likely, depth, row.slot))
        if not frontier:
            break
        lengths[min(frontier)[2]] += 1
    return [lengths[row.slot] for row in rows]


def cohorts(values: Values, graph: GraphRow) -> Iterator[tuple[Lane, ...]]:
    """Every cohort that a ragged program may serve, with the target rows of each lane."""
    shape, view, rows = graph.shape, values.view, sorted(values.decoders, key=serving)
    if view.keeps_prefixes:
        whole = [values.decode_lane(row, shape) for row in rows]
        for size in range(1, min(shape.batch, len(rows)) + 1):
            for chosen in combinations(whole, size):
                if sum(lane.tokens for lane in chosen) <= shape.packed_targets:
                    yield chosen
        return
    spent = values.spent(graph)

    def worth(row: RequestRow, count: int | None = None) -> float:
        lane = values.decode_lane(row, shape, count)
        value: float = lane.value(spent) if graph.duration_ns else lane.service
        return value

    orders = (
        sorted(rows, key=lambda row: -worth(row)),
        sorted(rows, key=lambda row: -worth(row, 1)),
        sorted(rows, key=lambda row: -(worth(row) / targets(row, shape))),
    )
    for order in orders:
        for size in range(1, min(shape.batch, len(rows)) + 1):
            lengths = likeliest(view, order[:size], shape)
            yield tuple(values.decode_lane(row, shape, n) for row, n in zip(order, lengths, strict=False))
