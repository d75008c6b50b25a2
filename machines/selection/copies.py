"""Programs of copies that have room for more proposals than there are to supply.

Owns their part of dominance (docs/scheduling.md, "Selection of rounds"): what a host supplies is a fact before the
program runs, so that a narrower one, or one that is supplied with nothing, does the same work. Does not own the larger
and smaller shapes of one offer (`dominance`). Surprising rule: a program that is run in vain would not only waste its
padding: where lengths are data, it would be measured at less than it takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphShape
from .board import Board
from .compiled import Ints
from .streams import target_positions


def surplus_copies(board: Board, served: Ints) -> dict[int, GraphShape]:
    """Of the rounds [g], each of which serves its best `served` rows, those of copies whose lanes a smaller program
    serves alike, by place, with that program."""
    compiled, found = board.compiled, dict[int, GraphShape]()
    rounds, rows = compiled.rounds, board.streams.rows[: board.streams.ready]
    targets: dict[int, NDArray[np.int64]] = {}
    for place, fewer in compiled.fewer_copies.items():
        offer_at, count = int(rounds.offer_at[place]), int(served[place])
        if offer_at not in targets:
            targets[offer_at] = np.array([target_positions(row, compiled.offers[offer_at]) for row in rows])
        ranking = board.best if board.times.rounds.ms[place] > 0.0 else board.plain
        most = int(targets[offer_at].take(ranking.order[offer_at, :count]).max())
        smaller = [other for other in fewer if other.batch >= count and other.width >= most]
        if smaller:
            found[place] = min(smaller)
    return found
