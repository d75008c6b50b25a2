"""The yardsticks of a request, from the measured catalog: reference interval (sigma) and token normalizer (r).

Owns docs/scheduling.md, "Ages and reference intervals", for streams of all families, blocked ones too, and the
normalizers of "Prices". Does not own prices. Surprising rule: a stale graph still counts, and an unknown one never
does; with a part unmeasured there is no yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..graph import SNAPSHOT_KINDS, GraphKind
from ..ids import RequestHandle
from .board import Board
from .compiled import Compiled, Shapes
from .interval import reference_interval
from .lanes import Floats, Ints
from .prompt import Prompts, prompt_rates
from .streams import stream_rates
from .view import RequestRow, View


class Normalizer(NamedTuple):
    """The fastest expected token service of a request, tokens/ms, and its reference interval. None: not measured."""

    tokens_per_ms: float | None
    sigma_ms: float | None


UNMEASURED = Normalizer(None, None)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What a stage takes each of those that need it, in ms, where it is measured; and the round that ends a chain.

    `delivery_ms` is None where no graph that gives output is measured.
    """

    stage_ms: dict[GraphKind, float]
    delivery_ms: float | None
    age_bearing: int

    @staticmethod
    def of(board: Board) -> StageTimes:
        """The times for the blocked rows of `board`: each at the measured shape with the least T/min(B, k)."""
        needed: dict[GraphKind, int] = {}
        for rows in (board.streams, board.prompts, board.scored):
            for row in rows.rows[rows.ready :]:
                for kind in set(row.stages):
                    needed[kind] = needed.get(kind, 0) + 1
        times = {kind: _least(board.duration_ms, board.compiled.kinds[kind], k) for kind, k in needed.items()}
        return StageTimes(
            {kind: ms for kind, ms in times.items() if ms is not None},
            _least(board.duration_ms, board.compiled.rounds, len(board.streams.rows)),
            board.age_bearing,
        )

    def total_ms(self, stages: Sequence[GraphKind]) -> float | None:
        """All of `stages`, one after another; None if one is not measured."""
        total = 0.0
        for kind in stages:
            if kind not in self.stage_ms:
                return None
            total += self.stage_ms[kind]
        return total

    def sigma_ms(self, stages: Sequence[GraphKind]) -> float | None:
        """The reference interval of a stream behind `stages`: K times its own way to its next delivery."""
        total = self.total_ms(stages)
        return None if total is None or self.delivery_ms is None else self.age_bearing * (total + self.delivery_ms)


def _least(duration_ms: Floats, shapes: Shapes, family: int) -> float | None:
    """T of the measured shape with the least T/min(B, k) for k = `family`, of equal ones the shortest; None without."""
    if not family:
        return None
    places, batch = shapes.index.tolist(), shapes.batch.tolist()
    pairs = [(duration_ms[place], rows) for place, rows in zip(places, batch, strict=True) if duration_ms[place] > 0.0]
    return min([(float(ms) / min(rows, family), float(ms)) for ms, rows in pairs])[1] if pairs else None


def terminal_sigma_ms(board: Board) -> float | None:
    """The reference interval of terminal rows: a family of the snapshot kinds."""
    if not board.terminals:
        return None
    shapes = [board.compiled.kinds[kind] for kind in sorted(SNAPSHOT_KINDS)]
    duration_ms = board.duration_ms[np.concatenate([group.index for group in shapes])]
    batch = np.concatenate([group.batch for group in shapes])
    return reference_interval(duration_ms, batch, len(board.terminals), board.age_bearing)


def normalizers(view: View, compiled: Compiled | None = None) -> dict[RequestHandle, Normalizer]:
    """The normalizers that a commit freezes, for every request of `view`.

    A blocked row has those of its phase, a prompt row no reference interval, a terminal row nothing else; one that can
    be served no more has neither.
    """
    board = Board.of(view, compiled)
    found: dict[int, Normalizer] = {}
    for prompts, shapes in ((board.prompts, board.compiled.prompts), (board.scored, board.compiled.scored)):
        if prompts.rows:
            rates = prompt_rates(_expected(prompts)[:, shapes.capacity_at], board.duration_ms[shapes.index])
            for row, rate in zip(prompts.rows, rates.tolist(), strict=True):
                found[row.slot] = Normalizer(rate or None, None)
    streams = board.streams
    if streams.rows:
        rates = stream_rates(board.compiled, board.duration_ms, streams.rows)
        for row, rate, sigma_ms in zip(streams.rows, rates.tolist(), _stream_sigmas(board), strict=True):
            found[row.slot] = Normalizer(rate or None, sigma_ms)
    if board.terminals:
        terminal = Normalizer(None, terminal_sigma_ms(board))
        found |= {row.slot: terminal for row in board.terminals}
    return {RequestHandle(row.slot, row.generation): found.get(row.slot, UNMEASURED) for row in view.requests}


def _expected(prompts: Prompts) -> Ints:
    """Prompt tokens and the output token that ends a prompt, [m, n]."""
    return np.asarray(prompts.tokens + (prompts.tokens == prompts.finish[:, None]))


def _stream_sigmas(board: Board) -> list[float | None]:
    streams, rounds = board.streams, board.compiled.rounds
    ready = reference_interval(board.duration_ms[rounds.index], rounds.batch, streams.ready, board.age_bearing)
    blocked: Sequence[RequestRow] = streams.rows[streams.ready :]
    times = StageTimes.of(board) if blocked else None
    return [ready] * streams.ready + [times.sigma_ms(row.stages) for row in blocked if times is not None]
