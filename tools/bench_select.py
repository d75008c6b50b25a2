"""Time `select` on the sizes that a full server gives it: `python tools/bench_select.py`.

Owns the measurement alone. Surprising rule: the time includes turning the view's rows into arrays, since that is what a
decision costs; taking the view is the scheduler's part and is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.selection.reference import normalizers
from flare.machines.selection.select import select
from flare.machines.selection.view import GraphRow, Phase, PolicyRow, RequestRow, View

_SECOND_NS = 1_000_000_000


def _graph(shape: GraphShape, duration_ns: int) -> GraphRow:
    return GraphRow(shape, duration_ns, 9 * _SECOND_NS, 9 * _SECOND_NS, stale=False)


def _catalog() -> tuple[GraphRow, ...]:
    """60 graphs: decode batches 1 to 52, four prefill and four scored prefill capacities, all measured."""
    decode = [_graph(GraphShape(GraphKind.DECODE, b), 6_000_000 + 1_500_000 * b) for b in range(1, 53)]
    prompt = [
        _graph(GraphShape(kind, 1, tokens), 15_000_000 + 400_000 * tokens)
        for kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL)
        for tokens in (64, 128, 256, 512)
    ]
    return tuple(decode + prompt)


def _request(slot: int, phase: Phase) -> RequestRow:
    prompt = 300 + 17 * slot
    decoding = phase is Phase.DECODE
    return RequestRow(
        slot=slot,
        generation=1,
        phase=phase,
        position=prompt if decoding else 64 * (slot % 3),
        prompt_tokens=prompt,
        boundary=prompt,
        next_endpoint=prompt,
        output_left=100 + slot,
        token_price=None if slot % 16 == 15 else 20.0 + slot * 0.37,
        delivery_price=30.0 + (slot * 29 % 64) * 0.51 if decoding else None,
        age_ms=5.0 + (slot * 37 % 64) * 1.3 if decoding else 0.0,
        last_fence=slot * 11 % 23,
        needs_feedback=False,
    )


def _view(decoding: int, prefilling: int) -> View:
    phases = [Phase.DECODE] * decoding + [Phase.PREFILL] * prefilling
    return View(
        now_ns=10 * _SECOND_NS,
        planning_ns=10 * _SECOND_NS,
        overrun=False,
        policy=PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0),
        log_scale=0.0,
        value_scale=1.0,
        graphs=_catalog(),
        requests=tuple(_request(slot, phase) for slot, phase in enumerate(phases)),
        window=(),
        free_slots=0,
        free_pages=0,
        queued_requests=0,
        queued_tokens=0,
    )


def _measure(name: str, call: Callable[[], object], rounds: int) -> None:
    for _ in range(rounds // 10):
        call()
    times_us = []
    for _ in range(rounds):
        start_ns = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    times_us.sort()
    print(f"{name:44} median {statistics.median(times_us):7.0f} us   p99 {times_us[rounds * 99 // 100]:7.0f} us")


def main() -> None:
    """Print median and p99 of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2_000)
    rounds = parser.parse_args().rounds
    busy, mixed = _view(64, 0), _view(40, 24)
    _measure("select: 64 decoding, 60 graphs", lambda: select(busy), rounds)
    _measure("select: 40 decoding + 24 prefilling, 60 graphs", lambda: select(mixed), rounds)
    _measure("select and explain: 40 + 24", lambda: select(mixed, explain=True), rounds // 10)
    _measure("normalizers: 40 + 24", lambda: normalizers(mixed), rounds)
    encode, decode = msgspec.json.encode, msgspec.json.Decoder(View).decode
    _measure("view to JSON and back: 40 + 24", lambda: decode(encode(mixed)), rounds // 4)


if __name__ == "__main__":
    main()
