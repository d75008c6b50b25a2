"""Flare's own server in virtual time: the product's scheduler, selector and driver over the simulated device.

Owns virtual time and what the host keeps of each request, which is next to nothing: no text, and prompts that are all
slices of one array. Does not own any scheduling. Surprising rule: the host takes no time and completions arrive the
moment they are due, as for the rules that it is compared with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flare.config.schema import Policy
from flare.engine.driver import Driver
from flare.graphs.frames import Binding, Completion, Frame, LaneInput, LaneResult
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.costs import CostTable
from flare.machines.events import Arrive, Deliver, Dispatch, Effect, Published, RequestLost
from flare.machines.graph import GraphShape
from flare.machines.ids import Fence, RequestHandle, RequestId
from flare.machines.pages import PagePool
from flare.machines.request import RequestSpec
from flare.machines.selection.view import View
from flare.machines.waiting import WaitingQueue
from flare.scheduling import make_scheduler

from .arrivals import Arrivals
from .outcome import OnProgress, Outcome
from .speculation import NO_PROPOSER, Proposer, sampling_of

PAGE_TOKENS = 16
_REPORT_EVERY = 256


class _Job:
    """What the host keeps of a request that is not finished. `context` counts what its submitted frames will write:
    all `targets` of a round that is in flight, and of one that has ended those that were accepted."""

    __slots__ = ("consumed", "context", "outcome", "targets")

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.consumed = 0
        self.context = 0
        self.targets: deque[int] = deque()


class VirtualServer:
    """Serves a load of requests; `run` is called once.

    `jitter` gives the factor on the duration of each frame by its fence, and `proposer` says which proposals are right.
    `keeps_prefixes`: rounds always offer all that requests may use.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        policy: Policy,
        catalog: Sequence[GraphShape],
        costs: CostTable,
        *,
        slots: int,
        kv_tokens: int,
        jitter: Callable[[int], float] = lambda _fence: 1.0,
        proposer: Proposer = NO_PROPOSER,
        keeps_prefixes: bool = False,
    ) -> None:
        pages = kv_tokens // PAGE_TOKENS
        self._arrivals = arrivals
        self.scheduler = make_scheduler(
            policy,
            catalog,
            slots=slots,
            pages=PagePool(pages, PAGE_TOKENS),
            waiting=WaitingQueue(None, None),
            device_allocates=proposer.confidence is not None,
            keeps_prefixes=keeps_prefixes,
        )
        measured = costs.duration(self._context)
        self._core = SimCore(
            slots,
            pages,
            PAGE_TOKENS,
            lambda frame: max(1, round(measured(frame) * jitter(frame.fence))),
            acceptance=proposer.acceptance,
            confidence=proposer.confidence,
            strict=True,
        )
        self._core.prepare(catalog)
        self._driver = Driver(self.scheduler, self, self._submit)
        self._jobs: dict[RequestId, _Job] = {}
        self._by_handle: dict[RequestHandle, _Job] = {}
        # What is longer than the whole cache is refused.
        self._prompt: NDArray[np.int32] = np.zeros(min(arrivals.longest_prompt, kv_tokens) + 1, np.int32)
        self._now_ns = 0
        self.frames = 0

    def run(self, until_ns: int | None = None, progress: OnProgress = lambda _share: None) -> list[Outcome]:
        """Serve everything, or until an instant of virtual time; what became of each request."""
        completions: deque[Completion] = deque()
        while True:
            finish_ns, arrival_ns = self._core.next_finish_ns(), self._arrivals.next_ns()
            instants = [instant for instant in (finish_ns, arrival_ns) if instant is not None]
            if not instants or (until_ns is not None and min(instants) >= until_ns):
                break
            self._now_ns = now_ns = min(instants)
            self._arrive(now_ns)
            if finish_ns == now_ns:
                completions.append(self._core.finish(now_ns))
            self._driver.turn(completions, now_ns)
            if self.frames % _REPORT_EVERY == 0:
                progress(self._arrivals.share(now_ns))
        return self._arrivals.outcomes

    def _arrive(self, now_ns: int) -> None:
        for place, outcome in self._arrivals.take(now_ns):
            request, pages = outcome.request, self.scheduler.pages
            if pages.needed(request.prompt_tokens + request.output_tokens) > pages.total:
                outcome.refused = True
                self._arrivals.ended(now_ns, outcome)
                continue
            request_id = RequestId(place + 1)
            self._jobs[request_id] = _Job(outcome)
            spec = RequestSpec(request.client, request.prompt_tokens, request.output_tokens)
            self.execute(self.scheduler.apply(Arrive(request_id, spec), now_ns), (), now_ns)

    def _submit(self, frame: Frame) -> None:
        self.frames += 1
        self._core.submit(frame, self._now_ns)

    def _context(self, lane: LaneInput) -> int:
        return self._by_handle[lane.handle].context

    # The host of the driver

    def lane(self, dispatch: Dispatch, _shape: GraphShape) -> LaneInput:
        """The part of a frame that serves one request."""
        work, job = dispatch.work, self._jobs[dispatch.request]
        handle, request = RequestHandle(work.slot, work.generation), job.outcome.request
        binding = None
        if dispatch.pages is not None:
            self._by_handle[handle] = job
            binding = Binding(dispatch.pages, sampling_of(request), (), request.output_tokens)
        job.context += work.tokens
        if work.start >= request.prompt_tokens:
            job.targets.append(work.tokens)
            return LaneInput(handle, work.start, work.emits, binding=binding, width=work.tokens)
        end = work.start + work.tokens
        target = 0 if end < request.prompt_tokens else None
        return LaneInput(handle, work.start, work.emits, self._prompt[work.start : end], target, binding)

    def committed(self, effects: Sequence[Effect], view: View, now_ns: int) -> None:
        """Nothing is reported of plans."""

    def execute(self, effects: Sequence[Effect], results: Sequence[LaneResult], now_ns: int) -> None:
        """Note what was served, and publish every delivery at once. Raises RuntimeError for a failed frame."""
        for result in results:
            self._served(result, now_ns)
        for effect in effects:
            if isinstance(effect, Deliver):
                self._deliver(effect.request, effect.fence, now_ns, ended=effect.ended is not None)
            elif isinstance(effect, RequestLost):
                raise RuntimeError(f"the simulated device failed: {effect.error}")

    def _served(self, result: LaneResult, now_ns: int) -> None:
        job = self._by_handle[result.handle]
        prompt = result.committed - len(job.outcome.tokens) - len(result.tokens) - job.consumed
        if prompt > 0:
            job.consumed += prompt
            job.outcome.prompts.append((now_ns, prompt))
        else:
            job.context += len(result.tokens) - job.targets.popleft()
        job.outcome.tokens.extend([now_ns] * len(result.tokens))

    def _deliver(self, request_id: RequestId, fence: Fence, now_ns: int, *, ended: bool) -> None:
        self.execute(self.scheduler.apply(Published(request_id, fence), now_ns), (), now_ns)
        if ended:
            self._arrivals.ended(now_ns, self._jobs.pop(request_id).outcome)
            # Whom it made ask anew stands in line before the next decision, as before the rules' next iteration.
            self._arrive(now_ns)
