"""A small trace for tests: decisions about views of every kind, as a scheduler would have logged them."""

from __future__ import annotations

import random
from pathlib import Path

from flare.machines.events import SubmitFrame
from flare.machines.ids import Fence
from flare.machines.selection.select import select
from flare.machines.selection.view import View
from flare.trace import open_trace
from flare.trace_events import PlanCommitted, plan_committed
from tests.machines.build import decode_shape, decoder, graph, prefill_shape, prompt, queued, view

CATALOG = tuple(decode_shape(batch) for batch in (1, 2, 4, 8)) + tuple(prefill_shape(size) for size in (64, 128, 256))


def random_view(seed: int) -> View:
    """Up to six requests over the catalog, some graphs unknown or stale, now and then a frame in flight."""
    pick = random.Random(seed)
    graphs = [graph(shape, pick.choice((0.0, 3.0, 5.0, 9.5, 17.25)), stale=pick.random() < 0.1) for shape in CATALOG]
    requests = [
        decoder(slot, token_price=pick.uniform(0.1, 90), delivery_price=pick.uniform(1, 90), age_ms=pick.uniform(0, 80))
        if pick.random() < 0.6
        else prompt(slot, pick.randint(1, 500), token_price=pick.uniform(0.1, 90))
        for slot in range(pick.randint(1, 6))
    ]
    window = (queued(decode_shape(4), 0),) if pick.random() < 0.3 else ()
    return view(graphs, requests, window=window)


def committed(count: int) -> list[PlanCommitted]:
    """`count` plans that the selector chose, with their views."""
    plans: list[PlanCommitted] = []
    seed = 0
    while len(plans) < count:
        seen = random_view(seed)
        seed += 1
        plan = select(seen).plan
        if plan is not None:
            n = len(plans) + 1
            plans.append(plan_committed(n, SubmitFrame(Fence(n), plan, (), ()), seen, with_view=True))
    return plans


def write_trace(path: Path, events: list[PlanCommitted]) -> None:
    """A trace file of these events."""
    writer = open_trace(path)
    assert writer is not None
    for event in events:
        writer.emit(event)
    writer.close()
