"""Who stands before which stage, and what the end of their waiting is worth.

Owns the rows that a stage graph can serve: those behind stages, by the next of them, and those that have ended. Does
not own candidates (`stages`, `pairs`). Surprising rule: a row with one stage left belongs to pairs, where what it
enables is known; only one with more is priced by its own way (`chains`).
"""

from __future__ import annotations

from typing import NamedTuple

from ..graph import SNAPSHOT_KINDS, GraphKind
from .board import Board
from .chains import Valued, valued_rows
from .lanes import serving_place
from .prompt import Prompts
from .reference import StageTimes, terminal_sigma_ms
from .streams import Streams
from .view import LaneWork, RequestRow


class Before(NamedTuple):
    """Places of the board's rows that have one kind of stage left and no other, each part in serving order."""

    streams: list[int]
    prompts: list[int]
    scored: list[int]


NOBODY = Before([], [], [])


class Blocked(NamedTuple):
    """The rows of a board that stage graphs serve. `counts` says how many rows a kind has anything to do for."""

    board: Board
    times: StageTimes
    valued: Valued
    terminal_urgency: float
    before: dict[GraphKind, Before]
    counts: dict[GraphKind, int]

    @staticmethod
    def of(board: Board) -> Blocked | None:
        """Sort out the rows of `board`; None if stage graphs have nothing to do."""
        parts: tuple[Streams | Prompts, ...] = (board.streams, board.prompts, board.scored)
        if not board.terminals and all(rows.ready == len(rows.rows) for rows in parts):
            return None
        times = StageTimes.of(board)
        terminal_urgency = board.scaled.terminal_age_price * (terminal_sigma_ms(board) or 0.0)
        valued = valued_rows(board, times, terminal_urgency)
        before: dict[GraphKind, Before] = {}
        counts = dict.fromkeys(SNAPSHOT_KINDS, len(board.terminals))
        for part, rows in enumerate(parts):
            for place in range(rows.ready, len(rows.rows)):
                stages = rows.rows[place].stages
                if len(stages) == 1:
                    kind = stages[0]
                    group = before.get(kind)
                    if group is None:
                        group = before[kind] = Before([], [], [])
                    group[part].append(place)
                    counts[kind] = counts.get(kind, 0) + 1
        for row in valued.rows:
            if row.stages:
                counts[row.stages[0]] = counts.get(row.stages[0], 0) + 1
        return Blocked(board, times, valued, terminal_urgency, before, counts)

    def retiring(self, kind: GraphKind) -> int:
        """How many ended rows a graph of `kind` could retire."""
        return len(self.board.terminals) if kind in SNAPSHOT_KINDS else 0

    def last(self, kind: GraphKind) -> list[RequestRow]:
        """The rows of which `kind` is the only stage left, in serving order."""
        board, before = self.board, self.before.get(kind, NOBODY)
        rows = [board.streams.rows[place] for place in before.streams]
        rows += [board.prompts.rows[place] for place in before.prompts]
        rows += [board.scored.rows[place] for place in before.scored]
        return sorted(rows, key=serving_place)


def stage_lane(row: RequestRow) -> LaneWork:
    """The lane of a row in a graph that moves its state: no token is consumed or given."""
    return LaneWork(row.slot, row.generation, row.position, 0, emits=False, delivers=False, expected_tokens=0.0)
