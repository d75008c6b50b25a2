"""The yardsticks of a request, from the measured catalog: reference interval (sigma) and token normalizer (r).

Owns docs/scheduling.md, "Ages and reference intervals", for streams of all families, blocked ones too, and the
normalizers of "Prices". Does not own prices. Surprising rule: a stale graph still counts, and an unknown one never
does; with a part unmeasured there is no yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..graph import GraphKind
from ..ids import RequestHandle
from .board import Board
from .compiled import Shapes
from .interval import reference_interval
from .lanes import Floats


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
            shapes = self.board.compiled.kinds[kind]
            self._known_ms[kind] = _least_ms(self.board.times.ms.take(shapes.index), shapes, self.needed[kind])
        return self._known_ms[kind]

    def delivery_ms(self) -> float | None:
        """The same of the graphs that give output, for all streams."""
        if GraphKind.DECODE not in self._known_ms:
            rounds = self.board.times.rounds
            self._known_ms[GraphKind.DECODE] = _least_ms(rounds.ms, rounds.shapes, len(self.board.streams.rows))
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


def _least_ms(duration_ms: Floats, shapes: Shapes, family: int) -> float | None:
    """T of the measured shape with the least T/min(B, k) for k = `family`, of equal ones the shortest."""
    pairs = zip(duration_ms.tolist(), shapes.batch.tolist(), strict=True)
    shares = [(ms / (batch if batch < family else family), ms) for ms, batch in pairs if ms > 0.0]
    return min(shares, default=(0.0, None))[1]


def terminal_sigma_ms(board: Board) -> float | None:
    """The reference interval of terminal rows: a family of the snapshot kinds."""
    shapes = board.compiled.retiring
    return reference_interval(board.times.ms.take(shapes.index), shapes.batch, len(board.terminals), board.age_bearing)


def normalizers(board: Board) -> dict[RequestHandle, Normalizer]:
    """The normalizers that a commit freezes, for every request of a view.

    A blocked row has those of its phase, a prompt row no reference interval, a terminal row nothing else; one that can
    be served no more has neither.
    """
    found: dict[int, Normalizer] = {}
    for prompts in (board.prompts, board.scored):
        for row, rate in zip(prompts.rows, prompts.rates.tolist(), strict=True):
            found[row.slot] = Normalizer(rate or None, None)
    streams, times = board.streams, StageTimes.of(board)
    sigmas_ms = [board.sigma_ms] * streams.ready
    sigmas_ms += [times.sigma_ms(row.stages) for row in streams.rows[streams.ready :]]
    for row, rate, sigma_ms in zip(streams.rows, streams.rates.tolist(), sigmas_ms, strict=True):
        found[row.slot] = Normalizer(rate or None, sigma_ms)
    if board.terminals:
        found |= dict.fromkeys([row.slot for row in board.terminals], Normalizer(None, terminal_sigma_ms(board)))
    return {RequestHandle(row.slot, row.generation): found.get(row.slot, UNMEASURED) for row in board.view.requests}
