"""Random lives of all kinds of request, driven by `select` over a catalog of all kinds of graph.

Owns the random events; the simulated device's rows carry out every frame and refuse what must not be. Surprising rule:
nothing is expected of the choice; only that it can always be committed, that the device accepts it, that every
invariant holds after every event, and that each output is the one that its request would have had alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from flare.graphs.frames import Binding, Frame, LaneInput, LaneResult, Sampling, StageInput
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.rows import SimRows
from flare.graphs.sim.tokens import TokenSource, mix
from flare.machines.events import (
    CancelRequest,
    CompleteFrame,
    CompletionRecord,
    Deliver,
    Dispatch,
    Effect,
    HostStop,
    PreemptRequest,
    RequestLost,
    RequestMoved,
    Retired,
    SubmitFrame,
)
from flare.machines.execution import Request
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.ids import Fence, PageId, RequestHandle, RequestId
from flare.machines.lifecycle import RequestState
from flare.machines.request import ImageWindow, RequestSpec
from flare.machines.selection.select import select

from .rig import COSTS_MS, MIXED, MS, ROUND, STAGED, WIDE_MIXED, Rig

PAGES, PAGE_TOKENS, STOP = 48, 4, 1_000
TOKENS = TokenSource(seed=3, eos_at=lambda prompt, tokens, index: mix(prompt + tokens * 31 + index) % 20 == 0)
ACCEPTANCE = RandomAcceptance(seed=5, mean=0.6, spread=0.4)
SCORED_ROWS = GraphShape(GraphKind.SCORED_PREFILL, 2, 32)
LARGE = (
    *(GraphShape(kind, 1) for kind in (GraphKind.SNAPSHOT, GraphKind.TERMINAL_SNAPSHOT, GraphKind.VISION)),
    *(rectangular(GraphKind.SPECULATIVE, batch, 1) for batch in (1, 4)),
    GraphShape(GraphKind.PREFILL, 4, 64),
    SCORED_ROWS,
)
COSTS_MS |= {shape: 3 + shape.prefill_tokens // 8 for shape in LARGE}
CATALOG = (*STAGED, ROUND, MIXED, WIDE_MIXED, *LARGE)
SEEN = {
    *("cancelled", "stopped", "preempted", "parked", "failed", "lost", "retired", "delivered", "complete", "overlaps"),
    *(kind.value for kind in GraphKind),
}


class Client:
    """What the host keeps of one request, and what it would have drawn alone."""

    def __init__(self, request: RequestId, spec: RequestSpec) -> None:
        self.spec = spec
        self.prompt = np.arange(spec.prompt_tokens, dtype=np.int32) * 7 + request
        self.output: list[int] = []
        self.ended = False
        self.alone: list[int] = []
        rows, shape = SimRows(1, 1, 64, TOKENS), GraphShape(GraphKind.PREFILL, 1, 64)
        plain = Binding((PageId(0),), Sampling(seed=1), (STOP,), spec.max_tokens)
        lane = LaneInput(RequestHandle(0, 1), 0, True, tokens=self.prompt, binding=plain)
        while len(self.alone) < spec.max_tokens and STOP not in self.alone:
            self.alone.extend(rows.run(Frame(Fence(1), shape, (lane,)))[0].tokens)
            shape, lane = GraphShape(GraphKind.DECODE, 1), LaneInput(lane.handle, spec.prompt_tokens, True)

    def lane(self, dispatch: Dispatch, *, prefills: bool) -> LaneInput:
        work, stage, spec = dispatch.work, dispatch.stage, self.spec
        binding = None
        if dispatch.pages is not None:
            limit, scores = spec.max_tokens, 0 if spec.scored else None
            more = (None, scores, spec.initialize, spec.windows, spec.spans)
            binding = Binding(dispatch.pages, Sampling(seed=1), (STOP,), limit, *more)
        handle = RequestHandle(work.slot, work.generation)
        if stage is not None:
            restored = self.prompt[: stage.restored_tokens] if stage.restored_tokens else None
            state = StageInput(stage.state_row, stage.operation, restored, stage.retires)
            return LaneInput(handle, work.start, False, binding=binding, stage=state)
        end = work.start + work.tokens
        tokens = self.prompt[work.start : end] if prefills else None
        target = int(self.prompt[end]) if prefills and end < len(self.prompt) else None
        width = 1 if prefills else work.tokens
        return LaneInput(handle, work.start, work.emits, tokens=tokens, target=target, binding=binding, width=width)

    def take(self, result: LaneResult, *, ended: bool) -> None:
        assert not self.ended, "delivered after its end"
        before = len(self.output)
        self.output += result.tokens
        assert list(result.tokens) == self.alone[before : before + len(result.tokens)]
        self.ended = ended
        assert not ended or self.output == self.alone


class Life:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        known = CATALOG if self.rng.random() < 0.5 else ()
        slots, state_rows = self.rng.choice((1, 2, 4)), self.rng.choice((1, 1, 3))
        self.rig = Rig(catalog=CATALOG, known=known, slots=slots, pages=PAGES, state_rows=state_rows)
        self.rows = SimRows(slots, PAGES, PAGE_TOKENS, TOKENS, ACCEPTANCE, state_rows)
        self.clients: dict[RequestId, Client] = {}
        self.known: dict[RequestId, Request] = {}
        self.frames: deque[Frame] = deque()
        self.counts: Counter[str] = Counter()

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.randint(1, 30)
        starts = sorted(rng.sample(range(0, 30, 6), rng.choice((0, 0, 1, 2, 3))))
        windows = tuple(ImageWindow(s, min(s + 5, prompt), rng.randint(1, 3)) for s in starts if s < prompt)
        scored = rng.random() < 0.2
        free = [at for at in range(1, prompt) if all(not w.start < at < w.end for w in windows)]
        request = self.rig.arrive(
            prompt,
            0 if scored and rng.random() < 0.5 else rng.randint(1, 12),
            client=rng.choice("ab"),
            scored=scored,
            needs_feedback=rng.random() < 0.2,
            initialize=rng.random() < 0.3,
            windows=windows,
            spans=tuple((w.start, w.end) for w in windows if rng.random() < 0.5),
            restored_tokens=rng.choice(free) if free and not scored and rng.random() < 0.3 else 0,
            checkpoints=tuple(sorted(rng.sample(free, min(len(free), rng.choice((0, 0, 1, 2)))))),
        )
        self.known[request.id] = request
        self.clients[request.id] = Client(request.id, request.spec)

    def disturb(self) -> None:
        """Cancel, stop or preempt anyone at any time."""
        request = self.rng.choice(list(self.known))
        match self.rng.randrange(4):
            case 0:
                self.counts["cancelled"] += 1
                self.heed(self.rig.scheduler.apply(CancelRequest(request), self.rig.now_ns))
                self.known.pop(request)
            case 1:
                self.counts["stopped"] += self.known[request].stoppable
                self.heed(self.rig.scheduler.apply(HostStop(request), self.rig.now_ns))
            case _:
                effects = self.rig.scheduler.apply(PreemptRequest(request), self.rig.now_ns)
                self.counts["preempted"] += bool(effects)
                self.heed(effects)
        self.rig.scheduler.check()

    def heed(self, effects: list[Effect], results: tuple[LaneResult, ...] = ()) -> None:
        by_handle = {result.handle: result for result in results}
        for effect in effects:
            match effect:
                case Deliver(request, handle, _, ended):
                    self.counts["delivered"] += 1
                    self.clients[request].take(by_handle[handle], ended=ended is not None)
                case Retired(request):
                    self.counts["complete"] += self.clients[request].ended
                    self.counts["retired"] += 1
                    self.known.pop(request)
                case RequestLost(request):
                    self.counts["lost"] += 1
                    self.known.pop(request)
                case RequestMoved(_, _, _, RequestState.PREEMPTED.value, _):
                    self.counts["parked"] += 1
                case _:
                    pass

    def decide(self) -> None:
        scheduler = self.rig.scheduler
        while scheduler.accepts and scheduler.has_runnable:
            view = scheduler.view(self.rig.now_ns)
            plan = select(view, scheduler.compiled).plan
            if plan is None:
                assert scheduler.in_flight, "nothing is chosen, and nothing is in flight"
                return
            self.counts[plan.shape.kind.value] += 1
            self.counts["overlaps"] += bool(scheduler.in_flight)
            effects = scheduler.commit(plan, view, self.rig.now_ns)
            scheduler.check()
            (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
            requests = [scheduler.requests[lane.request] for lane in submit.lanes]
            lanes = [
                self.clients[request.id].lane(lane, prefills=request.prefills)
                for request, lane in zip(requests, submit.lanes, strict=True)
            ]
            self.frames.append(Frame(submit.fence, plan.shape, tuple(lanes)))

    def complete(self) -> None:
        """The oldest frame ends: as the device says, or (now and then) it fails."""
        frame = self.frames.popleft()
        self.rig.now_ns += round(COSTS_MS[frame.shape] * self.rng.uniform(0.5, 1.5) * MS)
        device_ns = COSTS_MS[frame.shape] * MS if self.rng.random() < 0.9 else 0
        error = "broken" if self.rng.random() < 0.03 else None
        self.counts["failed"] += error is not None
        results = () if error else self.rows.run(frame)
        records = tuple(CompletionRecord(result.handle, result.committed, result.ended) for result in results)
        event = CompleteFrame(frame.fence, device_ns, records, error)
        effects = self.rig.scheduler.apply(event, self.rig.now_ns)
        self.rig.scheduler.check()
        self.heed(effects, results)

    def run(self, events: int) -> None:
        scheduler = self.rig.scheduler
        for _ in range(events):
            draw = self.rng.random()
            if draw < 0.15 and len(self.known) < 12:
                self.arrive()
            elif draw < 0.3 and self.known:
                self.disturb()
            elif self.frames:
                self.complete()
            if self.rng.random() < 0.9:
                self.decide()
        while not scheduler.idle:
            self.decide()
            self.complete()
        assert not self.known
        assert scheduler.pages.free == scheduler.pages.total
        assert scheduler.state_rows.free == scheduler.state_rows.total


def test_every_life_comes_to_its_end() -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        life = Life(seed)
        try:
            life.run(80)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        counts += life.counts
    assert counts.keys() >= SEEN, SEEN - counts.keys()
