"""How often a ragged program's bounded search misses the best cohort: `python tools/ragged_misses.py`.

Owns random instances and the enumeration of every cohort with every way to share out the target rows. Surprising rule:
the search is held against what no rule allows it, since it shares rows out by probability alone: an allocation by value
is better wherever tokens have different prices.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.selection.board import Board
from flare.machines.selection.ragged import Sharing
from flare.machines.selection.view import GraphRow, Phase, PolicyRow, RequestRow, View

_MS_NS = 1_000_000
POLICY = PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0)


class Loss(NamedTuple):
    """The part of the greatest value that the search misses, and whether the program allocates itself."""

    share: float
    device: bool


def instance(seed: str, batch: int, width: int, *, equal: bool) -> View:
    """A ragged program, and up to twice its rows of requests that wait for it, with `equal` prices or not."""
    rng = random.Random(seed)
    targets = rng.randint(batch, batch * width - 1)
    shape = GraphShape(GraphKind.SPECULATIVE, batch, 0, 0, width, width - 1, targets, drafts=True)
    rows = []
    for slot in range(rng.randint(2, 2 * batch)):
        survival = tuple(accumulate([rng.random() for _ in range(width - 1)], lambda a, b: a * b))
        rows.append(
            RequestRow(
                slot=slot,
                generation=1,
                phase=Phase.DECODE,
                position=10,
                prompt_tokens=10,
                boundary=10,
                next_endpoint=10,
                output_left=rng.choice([1, 2, 100, 100, 100]),
                token_price=10.0 if equal else rng.uniform(0.0, 60.0),
                delivery_price=20.0 if equal else rng.uniform(0.0, 60.0),
                age_ms=20.0 if equal else rng.uniform(0.0, 80.0),
                last_fence=slot,
                needs_feedback=False,
                survival=survival,
                scored_survival=survival,
                forecast=tuple([0.5**d for d in range(1, width)]) if rng.random() < 0.3 else survival,
            )
        )
    graph = GraphRow(shape, 20 * _MS_NS, _MS_NS, _MS_NS, stale=False)
    return View(
        now_ns=_MS_NS,
        planning_ns=_MS_NS,
        overrun=False,
        policy=POLICY,
        log_scale=0.0,
        value_scale=1.0,
        graphs=(graph,),
        requests=tuple(rows),
        window=(),
        free_slots=0,
        free_pages=0,
        queued_requests=0,
        queued_tokens=0,
        device_allocates=rng.random() < 0.5,
    )


def greatest(worth: Sequence[Sequence[float]], batch: int, targets: int) -> float:
    """The greatest value of at most `batch` lanes with at most `targets` rows in all; `worth` is that of each lane by
    its number of rows, from 1 on."""
    best = {(0, 0): 0.0}
    for lane in worth:
        for (count, rows), value in list(best.items()):
            for length, more in enumerate(lane, 1):
                cell = count + 1, rows + length
                if cell[0] <= batch and cell[1] <= targets:
                    best[cell] = max(best.get(cell, 0.0), value + more)
    return max(best.values())


def loss(view: View) -> Loss:
    """What the search misses of the greatest value in a view of one ragged program and decoding requests."""
    board, shape, ms = Board.of(view), view.graphs[0].shape, view.graphs[0].duration_ns / _MS_NS
    (place,) = board.compiled.shared
    share = Sharing(board).share(place)
    found = share.service + share.aged + board.urgency * ms * len(share.members)
    lanes = []
    for place, row in enumerate(board.streams.rows):
        one = float(board.streams.service[0, place]) + board.urgency * (row.age_ms + ms)
        token = float(board.streams.token[place])
        ceiling = min(shape.width, row.output_left)
        lanes.append([one + token * more for more in (0.0, *accumulate(row.scored_survival))][:ceiling])
    return Loss(1.0 - found / greatest(lanes, shape.batch, shape.packed_targets), view.device_allocates)


def main() -> None:
    """Print how often and how much is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=400)
    count = parser.parse_args().instances
    print("batch width prices    allocates   misses   mean loss   greatest")
    for batch, width in ((2, 3), (4, 3), (4, 5), (6, 4)):
        for equal in (True, False):
            views = [instance(f"{batch}/{width}/{equal}/{n}", batch, width, equal=equal) for n in range(count)]
            for device in (False, True):
                losses = [loss(msgspec.structs.replace(view, device_allocates=device)).share for view in views]
                missed = [one for one in losses if one > 1e-12]
                print(
                    f"{batch:5} {width:5} {'equal' if equal else 'different':9} {'program' if device else 'host':9} "
                    f"{len(missed) / count:8.1%} {sum(losses) / count:11.2%} {max(losses):10.1%}"
                )


if __name__ == "__main__":
    main()
