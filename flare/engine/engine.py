"""The engine: events into the scheduler, its effects out to the device and the clients.

Owns the event loop's side of serving: accepted jobs and the hand-over from the device's thread. Does not decide
anything about scheduling, nor the order within an instant (`driver`). Surprising rule: there is no lock, since all
state is touched on the event loop alone; the device's thread only hands its completion over.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import anyio
import structlog
from anyio.abc import TaskStatus

from flare.clock import Clock, monotonic_ns
from flare.graphs.device import Device, DeviceLost
from flare.graphs.frames import Completion, LaneInput, LaneResult
from flare.machines.events import (
    Arrive,
    CancelRequest,
    CopyOffered,
    Deliver,
    Dispatch,
    Effect,
    HostStop,
    Published,
    RequestLost,
    RequestMoved,
    Retired,
    SubmitFrame,
)
from flare.machines.graph import GraphShape, Source
from flare.machines.ids import Fence, RequestId
from flare.machines.lifecycle import Admitted, RequestState
from flare.machines.request import EndReason
from flare.machines.scheduler import Scheduler
from flare.machines.selection.view import View
from flare.request import GenerationRequest
from flare.server import engine_api
from flare.server.engine_api import Health
from flare.tokens.assembler import TextAssembler

from .driver import Driver
from .job import Job
from .reporting import Reporter
from .stream import Stream

RETRY_AFTER_S_MAX = 60
_FINISHES_REMEMBERED = 32
_FRAME_FAILED = "The frame that served the request failed. The server's log says why."
_ENGINE_DIED = "The engine has died. The server's log says why."


class Engine:
    """Serves requests on one device. Methods are called on the event loop; all but `run` and `drain` return at once.

    `assembler` makes a request's text assembler; `eos_ids` end a request unless it ignores them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        reporter: Reporter,
        *,
        assembler: Callable[[GenerationRequest], TextAssembler],
        eos_ids: Collection[int],
        clock: Clock = monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._device = device
        self._driver = Driver(scheduler, self, device.submit)
        self._reporter = reporter
        self._metrics = reporter.metrics
        self._assembler = assembler
        self._eos_ids = eos_ids
        self._clock = clock
        copying = [shape.draft_depth for shape in scheduler.catalog if shape.source is Source.COPY]
        self._copies_max = max(copying, default=0)
        self._ids = itertools.count(1)
        self._jobs: dict[RequestId, Job] = {}
        self._completions: deque[Completion] = deque()
        self._finishes: deque[int] = deque(maxlen=_FINISHES_REMEMBERED)
        self._health = Health.LOADING
        self._wake = anyio.Event()
        self._idle = anyio.Event()
        self._log = structlog.get_logger()

    # The API that the HTTP layer sees

    @property
    def health(self) -> Health:
        """Where the engine stands now."""
        return self._health

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Stream]:
        """Accept all requests or none. Raises `QueueFull` or `NotServing`."""
        if self._health is not Health.SERVING:
            self._metrics.rejected(self._health.value)
            raise engine_api.NotServing(f"the server is {self._health.value}")
        scheduler = self._scheduler
        if scheduler.refuses([(len(request.prompt), request.max_tokens) for request in requests]):
            self._metrics.rejected("queue_full")
            raise engine_api.QueueFull(self._retry_after_s())
        now_ns = self._clock()
        return [self._accept(request, now_ns) for request in requests]

    def graphs(self) -> list[dict[str, object]]:
        """The catalog with measured durations, as JSON objects."""
        now_ns = self._clock()
        return [
            {
                "graph": row.shape.name,
                "kind": row.shape.kind.value,
                "batch": row.shape.batch,
                "prefill_tokens": row.shape.prefill_tokens,
                "duration_ms": row.duration_ns / 1e6 if row.duration_ns else None,
                "age_s": (now_ns - row.observed_at_ns) / 1e9 if row.duration_ns else None,
                "stale": row.stale,
                "executions": self._metrics.executions(row.shape.name),
            }
            for row in self._scheduler.durations.rows(now_ns)
        ]

    def _accept(self, request: GenerationRequest, now_ns: int) -> Stream:
        request_id = RequestId(next(self._ids))
        stream = Stream(lambda: self._cancel(request_id))
        job = Job(request_id, request, stream, self._assembler(request), self._eos_ids, now_ns, self._copies_max)
        effects = self._scheduler.apply(Arrive(request_id, job.spec), now_ns)
        self._jobs[request_id] = job
        self.execute(effects, (), now_ns)
        self._wake.set()
        return stream

    def _cancel(self, request_id: RequestId) -> None:
        if self._jobs.pop(request_id, None) is None:
            return
        self._metrics.request_aborted()
        now_ns = self._clock()
        self.execute(self._scheduler.apply(CancelRequest(request_id), now_ns), (), now_ns)
        self._wake.set()

    def _retry_after_s(self) -> int:
        """Time until the queue is likely to have room: what waits, at the rate at which requests end now."""
        finishes = self._finishes
        if len(finishes) < 2:
            return 1
        period_s = (finishes[-1] - finishes[0]) / (len(finishes) - 1) / 1e9
        return min(RETRY_AFTER_S_MAX, max(1, math.ceil(period_s * self._scheduler.waiting.requests)))

    # The loop

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. A fault of ours ends it: every client is told, and health is `DEAD`."""
        loop = asyncio.get_running_loop()

        def hand_over(completion: Completion) -> None:
            loop.call_soon_threadsafe(self._completed, completion)

        self._device.start(hand_over)
        self._health = Health.SERVING
        task_status.started()
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                self._turn()
        except DeviceLost as error:
            self._die(f"the device is lost: {error}")
            raise
        except Exception as error:
            self._die(f"internal error: {error!r}")
            raise

    async def drain(self, timeout_s: float) -> None:
        """Accept no more; wait for what is accepted, then end the rest with `ServerStopping`."""
        if self._health is Health.SERVING:
            self._health = Health.DRAINING
        with anyio.move_on_after(timeout_s):
            while not self._scheduler.idle and self._health is not Health.DEAD:
                self._idle = anyio.Event()
                await self._idle.wait()
        for job in list(self._jobs.values()):
            job.stream.fail(engine_api.ServerStopping("the server is stopping"))
            self._cancel(job.id)

    def _completed(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._wake.set()

    def _turn(self) -> None:
        """Work off one instant."""
        self._driver.turn(self._completions, self._clock())
        self._metrics.set_gauges(*self._scheduler.load())
        if self._scheduler.idle:
            self._finishes.clear()  # time without work says nothing of the rate at which requests end
            self._idle.set()

    # The host of the driver

    def lane(self, dispatch: Dispatch, shape: GraphShape) -> LaneInput:
        """The part of a frame of graph `shape` that serves one request."""
        return self._jobs[dispatch.request].lane(dispatch, copies=shape.source is Source.COPY)

    def committed(self, effects: Sequence[Effect], view: View, now_ns: int) -> None:
        """Report a plan that was committed."""
        self._reporter.effects(effects, now_ns)
        for effect in effects:
            if isinstance(effect, SubmitFrame):
                self._reporter.committed(effect, view)

    def execute(self, effects: Sequence[Effect], results: Sequence[LaneResult], now_ns: int) -> None:
        """Carry out effects in their order; `results` are those of the completion that they come from."""
        self._reporter.effects(effects, now_ns)
        by_handle = {result.handle: result for result in results}
        for effect in effects:
            match effect:
                case Deliver(request_id, handle, fence, ended):
                    self._deliver(self._jobs.get(request_id), by_handle[handle], ended, fence, now_ns)
                case RequestMoved(request_id, _, RequestState.QUEUED.value, _, Admitted.__name__):
                    job = self._jobs[request_id]
                    job.admitted_at_ns = now_ns
                    self._metrics.request_admitted((now_ns - job.arrived_at_ns) / 1e9)
                case Retired(request_id):
                    self._retire(self._jobs.get(request_id), now_ns)
                case RequestLost(request_id, error):
                    failed = self._jobs.pop(request_id, None)
                    if failed is not None:
                        self._metrics.request_failed()
                        failed.stream.fail(engine_api.RequestFailed(_FRAME_FAILED))
                        self._log.error("request.failed", request=failed.request.name, error=error)
                case _:
                    pass

    def _deliver(self, job: Job | None, result: LaneResult, ended: EndReason | None, fence: Fence, now_ns: int) -> None:
        if job is None:
            return
        delta, stopped = job.take(result, ended)
        if delta is None:
            return
        if job.offer:
            self.execute(self._scheduler.apply(CopyOffered(job.id, len(job.offer)), now_ns), (), now_ns)
        self._count_tokens(job, now_ns)
        if self._scheduler.retires:
            delta = job.hold_finish(delta)
        job.stream.push(delta)
        if job.published(delta):
            self.execute(self._scheduler.apply(Published(job.id, fence), now_ns), (), now_ns)
        if stopped and ended is None:
            self.execute(self._scheduler.apply(HostStop(job.id), now_ns), (), now_ns)
        if delta.finish_reason is not None:
            self._finish(job, delta.finish_reason, now_ns)

    def _retire(self, job: Job | None, now_ns: int) -> None:
        """The finish that waited for the request's retirement is published."""
        if job is not None and job.finish is not None and job.finish.finish_reason is not None:
            job.stream.push(job.finish)
            self._finish(job, job.finish.finish_reason, now_ns)

    def _count_tokens(self, job: Job, now_ns: int) -> None:
        if job.first_at_ns:
            self._metrics.token_gap((now_ns - job.last_at_ns) / 1e9)
        else:
            job.first_at_ns = now_ns
            self._metrics.first_token((now_ns - job.arrived_at_ns) / 1e9, (now_ns - job.admitted_at_ns) / 1e9)
        job.last_at_ns = now_ns

    def _finish(self, job: Job, reason: EndReason, now_ns: int) -> None:
        del self._jobs[job.id]
        self._finishes.append(now_ns)
        self._metrics.request_finished(
            reason,
            prompt_tokens=len(job.request.prompt),
            generation_tokens=job.produced,
            e2e_seconds=(now_ns - job.arrived_at_ns) / 1e9,
            decode_seconds=(now_ns - job.first_at_ns) / 1e9,
        )

    def _die(self, reason: str) -> None:
        self._health = Health.DEAD
        self._log.error("engine.dead", reason=reason)
        for job in self._jobs.values():
            self._metrics.request_failed()
            job.stream.fail(engine_api.RequestFailed(_ENGINE_DIED))
        self._jobs.clear()
        self._metrics.set_gauges(0, 0, 0.0)
        self._idle.set()
