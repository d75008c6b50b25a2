"""Time `select` on the sizes that a full server gives it: `python tools/bench_select.py`.

Owns the measurement alone. Surprising rule: the time of a decision includes turning the view's rows into arrays, since
that is what it costs; taking the view, commit and completion are the scheduler's part and are measured by themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from flare.config.loader import load_policy
from flare.machines.durations import DurationTable
from flare.machines.events import Arrive, CompleteFrame, CompletionRecord, Deliver, Published
from flare.machines.graph import STAGE_KINDS, GraphKind, GraphShape, rectangular
from flare.machines.ids import RequestHandle, RequestId
from flare.machines.pages import PagePool
from flare.machines.request import RequestSpec
from flare.machines.scheduler import Scheduler
from flare.machines.selection.board import Board
from flare.machines.selection.compiled import Compiled
from flare.machines.selection.reference import normalizers
from flare.machines.selection.select import decide, select
from flare.machines.selection.view import GraphRow, LaneWork, Phase, PolicyRow, RequestRow, View
from flare.machines.waiting import WaitingQueue
from flare.scheduling import policy_row

_SECOND_NS = 1_000_000_000
_Result = TypeVar("_Result")


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


_DOUBLED = (1, 2, 4, 8, 16, 32, 64)
_WIDE = tuple((b, w) for w in (1, 2, 4) for b in _DOUBLED) + tuple((b, 6) for b in (1, 2, 4, 8))
_ALL_KINDS = (
    *(GraphShape(GraphKind.DECODE, b) for b in (1, 2, 3, 4, 6, 8, 16, 24, 32, 64)),
    *(rectangular(GraphKind.SPECULATIVE, b, w) for b, w in _WIDE),
    *(GraphShape(GraphKind.PREFILL, 1, 64 * n) for n in (1, 2, 3, 4, 6, 8, 16, 24, 32, 64)),
    *(GraphShape(GraphKind.PREFILL, 4, 64 * n) for n in (2, 4, 8, 16, 32)),
    *(GraphShape(GraphKind.SCORED_PREFILL, 1, 64 * n) for n in (1, 2, 4, 8, 16, 32, 48, 64)),
    *(GraphShape(GraphKind.MIXED, b, 64 * n, 1) for b in (2, 4, 8, 16, 32, 64) for n in (1, 2, 4, 8, 16)),
    *(GraphShape(GraphKind.MIXED, 16, 64 * n, 4) for n in (8, 16)),
    *(rectangular(GraphKind.MIXED, b, w, 64 * n, 1) for b in (2, 4, 8, 16) for w in (2, 4) for n in (1, 4, 16)),
    *(GraphShape(kind, b) for kind in sorted(STAGE_KINDS) for b in (1, 2, 4, 8, 16, 32)),
)
"""150 graphs of all kinds."""


def _all_kinds() -> tuple[GraphRow, ...]:
    """A catalog of all kinds, measured; more rows, targets and tokens take longer."""
    return tuple([_graph(s, 6_000_000 + 150_000 * s.batch * s.width + 50_000 * s.prefill_tokens) for s in _ALL_KINDS])


def _request(slot: int, phase: Phase, stages: tuple[GraphKind, ...] = ()) -> RequestRow:
    prompt = 300 + 17 * slot
    decoding = phase is Phase.DECODE
    survival = tuple([(0.8 - slot / 200) ** d for d in range(1, 6)]) if decoding else ()
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
        age_ms=5.0 + (slot * 37 % 64) * 1.3,
        last_fence=slot * 11 % 23,
        needs_feedback=False,
        stages=stages,
        survival=survival,
        scored_survival=survival,
    )


def _blocked(slot: int, number: int) -> RequestRow:
    """One of the requests behind `initialize`, `restore` or `vision`; a third of them need another operation then."""
    kind = (GraphKind.INITIALIZE, GraphKind.RESTORE, GraphKind.VISION)[number % 3]
    decoding = kind is GraphKind.RESTORE and number % 2 == 0
    more = (GraphKind.VISION,) if kind is not GraphKind.INITIALIZE and number % 4 == 1 else ()
    return _request(slot, Phase.DECODE if decoding else Phase.PREFILL, (kind, *more))


def _view(graphs: tuple[GraphRow, ...], requests: list[RequestRow], policy: PolicyRow) -> View:
    return View(
        now_ns=10 * _SECOND_NS,
        planning_ns=10 * _SECOND_NS,
        overrun=False,
        policy=policy,
        log_scale=0.0,
        value_scale=1.0,
        graphs=graphs,
        requests=tuple(requests),
        window=(),
        free_slots=0,
        free_pages=0,
        queued_requests=0,
        queued_tokens=0,
    )


def _plain(decoding: int, prefilling: int) -> View:
    phases = [Phase.DECODE] * decoding + [Phase.PREFILL] * prefilling
    requests = [_request(slot, phase) for slot, phase in enumerate(phases)]
    return _view(_catalog(), requests, PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0))


def _full(policy: PolicyRow) -> View:
    """24 decoding, 8 prefilling, 2 terminal and 30 blocked requests, and a catalog of 150 graphs of all kinds."""
    phases = [Phase.DECODE] * 24 + [Phase.PREFILL] * 8 + [Phase.TERMINAL] * 2
    requests = [_request(slot, phase) for slot, phase in enumerate(phases)]
    requests += [_blocked(len(phases) + number, number) for number in range(30)]
    return _view(_all_kinds(), requests, policy)


def _speculating(*, ragged: bool) -> View:
    """64 decoding requests and rounds of up to eight targets: rectangular ones with a probe funded, or also some with
    half of the target rows, which the device shares out."""
    requests = [
        replace(row, optimistic=(0.9,) * 5, weights=(8.0,) * 5)
        for row in [_request(slot, Phase.DECODE) for slot in range(64)]
    ]
    shapes = [rectangular(GraphKind.SPECULATIVE, b, w) for b in _DOUBLED for w in (1, 2, 4, 8)]
    if ragged:
        shapes += [replace(s, packed_targets=s.packed_targets // 2) for s in shapes if s.width > 2]
    graphs = tuple([_graph(s, 6_000_000 + 150_000 * s.packed_targets) for s in shapes])
    view = _view(graphs, requests, PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0))
    return replace(view, device_allocates=ragged, probe_funded=not ragged)


def _report(name: str, times_us: list[float]) -> None:
    times_us.sort()
    most = times_us[len(times_us) * 99 // 100]
    print(f"{name:52} median {statistics.median(times_us):7.0f} us   p99 {most:7.0f} us")


def _measure(name: str, call: Callable[[], object], rounds: int) -> None:
    for _ in range(rounds // 10):
        call()
    times_us: list[float] = []
    for _ in range(rounds):
        _timed(times_us, call)
    _report(name, times_us)


def _timed(times_us: list[float], call: Callable[[], _Result]) -> _Result:
    start_ns = time.perf_counter_ns()
    result = call()
    times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    return result


def _record(scheduler: Scheduler, lane: LaneWork) -> CompletionRecord:
    """What a device says that has done its work and ends nothing."""
    handle = RequestHandle(lane.slot, lane.generation)
    (request,) = [request for request in scheduler.residents if request.handle == handle]
    units = 1 if request.produced else lane.tokens + lane.emits
    return CompletionRecord(handle, request.committed + units, None)


def _steps(rounds: int) -> None:
    """Whole steps of a scheduler with 64 requests that prefill and then decode, one frame at a time."""
    graphs = _catalog()
    durations = DurationTable([graph.shape for graph in graphs], 1_000 * _SECOND_NS)
    for graph in graphs:
        durations.observe(graph.shape, graph.duration_ns, 0)
    scheduler = Scheduler(
        [graph.shape for graph in graphs],
        PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0),
        slots=64,
        pages=PagePool(64, 64 * rounds),
        waiting=WaitingQueue(None, None),
        durations=durations,
        adaptation_ms=100.0,
    )
    for number in range(64):
        spec = RequestSpec(client="one", prompt_tokens=64, max_tokens=32 * rounds)
        scheduler.apply(Arrive(RequestId(number), spec), 0)
    parts: dict[str, list[float]] = {"view": [], "board": [], "decide": [], "commit": [], "completion": []}
    now_ns = 0
    for _ in range(rounds):
        view = _timed(parts["view"], partial(scheduler.view, now_ns))
        board = _timed(parts["board"], partial(Board.of, view, scheduler.compiled))
        plan = _timed(parts["decide"], partial(decide, board)).plan
        assert plan is not None, "64 requests always have something to do"
        _timed(parts["commit"], partial(scheduler.commit, plan, board, now_ns))
        now_ns += plan.duration_ns
        records = tuple([_record(scheduler, lane) for lane in plan.lanes])
        commit = scheduler.in_flight[0].commit
        assert commit is not None
        ended = CompleteFrame(commit.fence, plan.duration_ns, records)
        effects = _timed(parts["completion"], partial(scheduler.apply, ended, now_ns))
        for effect in effects:
            if isinstance(effect, Deliver):
                scheduler.apply(Published(effect.request, effect.fence), now_ns)
    for part, times_us in parts.items():
        _report(f"step with 64 requests, 60 graphs: {part}", times_us)


def main() -> None:
    """Print median and p99 of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2_000)
    rounds = parser.parse_args().rounds
    busy, mixed = _plain(64, 0), _plain(40, 24)
    full = _full(PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0))
    people = _full(policy_row(load_policy("interactive")))
    waiting = _full(PolicyRow(64.0, 16.0, 4.0, 0.3, 8.0, first_output_age_price=0.1))
    for name, view in (
        ("64 decoding, 60 graphs", busy),
        ("40 decoding + 24 prefilling, 60 graphs", mixed),
        ("24 + 8 + 2 terminal + 30 blocked, 150 graphs", full),
        ("the same, first outputs priced", waiting),
        ("the same, interactive policy", people),
        ("64 decoding, 28 rounds, a probe funded", _speculating(ragged=False)),
        ("64 decoding, 28 rounds and 14 ragged ones", _speculating(ragged=True)),
    ):
        compiled = Compiled.of([row.shape for row in view.graphs])
        _measure(f"select: {name}", partial(select, view, compiled), rounds)
    _measure("select and explain: 40 + 24", lambda: select(mixed, explain=True), rounds // 10)
    for name, view in (("40 + 24", mixed), ("24 + 8 + 2 + 30", full)):
        compiled = Compiled.of([row.shape for row in view.graphs])
        _measure(f"normalizers: {name}", partial(normalizers, Board.of(view, compiled)), rounds)
    _steps(rounds)
    encode, decode = msgspec.json.encode, msgspec.json.Decoder(View).decode
    _measure("view to JSON and back: 40 + 24", lambda: decode(encode(mixed)), rounds // 4)


if __name__ == "__main__":
    main()
