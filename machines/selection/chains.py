"""What a row is worth to the next stage graph that serves it, apart from what that graph enables at once.

Owns the individual continuation index of rows behind two or more stages, and the worth of rows that have ended
(docs/scheduling.md, "Chains of stages" and "Terminal retirement"). Does not own which rows share a graph. Surprising
rule: it looks ahead for each row alone, as if the rest of its way were its own; where a part of that way is not
measured, it is taken to cost nothing. A row that has ended is a chain whose way ends with the graph itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..graph import SNAPSHOT_KINDS, GraphKind
from .board import Board
from .compiled import Compiled, Shapes
from .lanes import Bools, Floats, serving_place
from .prompt import Prompts
from .reference import StageTimes
from .view import RequestRow


class Valued(NamedTuple):
    """Rows [m] that have ended, or have at least two stages left after which a prepared graph can serve them; in
    serving order.

    `service` (V) is the priced service at the end of the way, `further_ms` (F) the time from the end of the next graph
    to there, `urgency` c * sigma, `age_ms` the wait at the start.
    """

    rows: tuple[RequestRow, ...]
    service: Floats
    further_ms: Floats
    urgency: Floats
    age_ms: Floats

    def worth(self, duration_ms: Floats) -> tuple[Floats, Floats]:
        """Priced service and age part [f, m] of serving each row by a graph of `duration_ms` [f]: T/(T + F) of what its
        way earns; by an unknown graph (0) all of its service."""
        stage_ms = duration_ms[:, None]
        if duration_ms.all():
            total_ms = stage_ms + self.further_ms
            share = stage_ms / total_ms
            return self.service * share, self.urgency * (self.age_ms + total_ms) * share
        known = stage_ms > 0.0
        total_ms = np.where(known, stage_ms, 1.0) + self.further_ms
        share = np.where(known, stage_ms / total_ms, 1.0)
        return self.service * share, np.where(known, self.urgency * (self.age_ms + total_ms) * share, 0.0)

    def fits(self, compiled: Compiled) -> Bools:
        """Which of the catalog's stage graphs can serve which rows, [f, m]."""
        served = [_KINDS[row.stages[0]] if row.stages else _ENDED for row in self.rows]
        return _ABLE.take(compiled.stages.kind_at, axis=0).take(served, axis=1)

    def chains(self, kind: GraphKind, stage_ms: float) -> list[RequestRow]:
        """The rows with more stages to come of which `kind` is the next, best first for one that takes `stage_ms` (0:
        unknown)."""
        places = [place for place, row in enumerate(self.rows) if row.stages and row.stages[0] is kind]
        if len(places) > 1:
            service, age = self.worth(np.array([stage_ms]))
            worth = (service + age)[0].tolist()
            places.sort(key=lambda place: -worth[place])
        return [self.rows[place] for place in places]


_KINDS = {kind: place for place, kind in enumerate(GraphKind)}
_ENDED = len(_KINDS)
_ABLE = np.array([[*[other is kind for other in GraphKind], kind in SNAPSHOT_KINDS] for kind in GraphKind])
"""For each kind of graph: the rows whose next stage it is, and at the end whether it retires those that have ended."""

_Part = tuple[RequestRow, float, float, float, float]


def valued_rows(board: Board, times: StageTimes, terminal_urgency: float) -> Valued:
    """The rows of value to a stage graph alone; `terminal_urgency` is c * sigma of those that have ended."""
    value = board.scaled.terminal_value
    parts: list[_Part] = [(row, value, 0.0, terminal_urgency, row.age_ms) for row in board.terminals]
    parts += _stream_chains(board, times)
    parts += _prompt_chains(times, board.prompts, board.compiled.prompts, board.times.ms)
    parts += _prompt_chains(times, board.scored, board.compiled.scored, board.times.ms)
    parts.sort(key=lambda part: serving_place(part[0]))
    columns = np.array([part[1:] for part in parts], np.float64).reshape(-1, 4).T
    return Valued(tuple([part[0] for part in parts]), *columns)


def _stream_chains(board: Board, times: StageTimes) -> list[_Part]:
    streams, shapes = board.streams, board.compiled.rounds
    places = [place for place in range(streams.ready, len(streams.rows)) if len(streams.rows[place].stages) > 1]
    if not places or not len(shapes):
        return []
    inferences = _inference(streams.service.T[places].take(shapes.offer_at, axis=1), board.times.ms[shapes.index])
    price = board.scaled.decode_age_price
    found = []
    for place, (value, round_ms) in zip(places, inferences, strict=True):
        row = streams.rows[place]
        urgency = price * (times.sigma_ms(row.stages) or 0.0)
        found.append((row, value, _further_ms(row, times, round_ms), urgency, row.age_ms))
    return found


def _prompt_chains(times: StageTimes, prompts: Prompts, shapes: Shapes, duration_ms: Floats) -> list[_Part]:
    places = [place for place in range(prompts.ready, len(prompts.rows)) if len(prompts.rows[place].stages) > 1]
    if not places or not len(shapes):
        return []
    # What the largest capacity cannot serve, none can.
    most = prompts.tokens[:, shapes.capacity_at.max()].take(places).tolist()
    inferences = _inference(
        prompts.service.take(places, axis=0).take(shapes.capacity_at, axis=1), duration_ms[shapes.index]
    )
    found = []
    for place, tokens, (value, prompt_ms) in zip(places, most, inferences, strict=True):
        if tokens:
            row = prompts.rows[place]
            found.append((row, value, _further_ms(row, times, prompt_ms), 0.0, 0.0))
    return found


def _inference(service: Floats, duration_ms: Floats) -> list[tuple[float, float]]:
    """Service and duration of the measured graph [g] with the greatest service/T for each row of `service` [m, g],
    which is 0 where a graph cannot serve it. Where none is measured: the greatest service of any, and duration 0."""
    places = np.arange(len(service))
    if duration_ms.all():
        best = (service / duration_ms).argmax(axis=1)
        return list(zip(service[places, best].tolist(), duration_ms[best].tolist(), strict=True))
    rate = service / np.where(duration_ms > 0.0, duration_ms, np.inf)
    rate[:, duration_ms == 0.0] = -1.0
    best, greatest = rate.argmax(axis=1), service.max(axis=1)
    # With services of 0 every measured graph will do; else the best may be one that cannot serve the row at all.
    measured = (rate[places, best] > 0.0) | (greatest == 0.0)
    values = np.where(measured, service[places, best], greatest)
    return list(zip(values.tolist(), np.where(measured, duration_ms[best], 0.0).tolist(), strict=True))


def _further_ms(row: RequestRow, times: StageTimes, inference_ms: float) -> float:
    """F: the stages after the next, and the graph at the end; 0 if one of them is not measured."""
    total_ms = times.total_ms(row.stages[1:])
    return 0.0 if total_ms is None or not inference_ms else total_ms + inference_ms
