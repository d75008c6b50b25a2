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

from ..graph import GraphKind
from ..ids import RequestHandle
from .board import Board
from .compiled import Compiled, Shapes
from .interval import reference_interval
from .lanes import Ints
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
    """What each stage takes those that need it, where it is measured, and the round at the end of a stream's way.

    `needed` counts the blocked rows that have a kind among their stages. What was worked out is kept in `_known_ms`.
    """

    board: Board
    needed: dict[GraphKind, int]
    _known_ms: dict[GraphKind, float | None]

    @staticmethod
    def of(board: Board) -> StageTimes:
        """The times for the blocked rows of `board`."""
        needed: dict[GraphKind, int] = {}
        for rows in (board.streams, board.prompts, board.scored):
            for row in rows.rows[rows.ready :]:
                stages = row.stages
                for kind in stages if len(stages) == 1 else set(stages):
                    needed[kind] = needed.get(kind, 0) + 1
        return StageTimes(board, needed, {})

    def stage_ms(self, kind: GraphKind) -> float | None:
        """T of the measured graph of `kind` with the least T/min(B, k), for the k rows that need one; None without."""
        if kind not in self._known_ms:
            self._known_ms[kind] = self._least_ms(self.board.compiled.kinds[kind], self.needed[kind])
        return self._known_ms[kind]

    def delivery_ms(self) -> float | None:
        """The same of the graphs that give output, for all streams."""
        if GraphKind.DECODE not in self._known_ms:
            shapes, streams = self.board.compiled.rounds, self.board.streams
            self._known_ms[GraphKind.DECODE] = self._least_ms(shapes, len(streams.rows))
        return self._known_ms[GraphKind.DECODE]

    def total_ms(self, stages: Sequence[GraphKind]) -> float | None:
        """All of `stages`, one after another; None if one is not measured."""
        total = 0.0
        for kind in stages:
            stage_ms = self.stage_ms(kind)
            if stage_ms is None:
                return None
            total += stage_ms
        return total

    def sigma_ms(self, stages: Sequence[GraphKind]) -> float | None:
        """The reference interval of a stream behind `stages`: K times its own way to its next delivery."""
        total, delivery_ms = self.total_ms(stages), self.delivery_ms()
        return None if total is None or delivery_ms is None else self.board.age_bearing * (total + delivery_ms)

    def _least_ms(self, shapes: Shapes, family: int) -> float | None:
        """T of the measured shape with the least T/min(B, k) for k = `family`, of equal ones the shortest."""
        times = self.board.duration_ms.take(shapes.index)
        shares = times / np.minimum(shapes.batch, family)
        if not times.all():
            shares[times == 0.0] = np.inf
        least = shares.min(initial=np.inf)
        return None if least == np.inf else float(times[shares == least].min())


def terminal_sigma_ms(board: Board) -> float | None:
    """The reference interval of terminal rows: a family of the snapshot kinds."""
    if not board.terminals:
        return None
    shapes = board.compiled.retiring
    return reference_interval(
        board.duration_ms.take(shapes.index), shapes.batch, len(board.terminals), board.age_bearing
    )


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
