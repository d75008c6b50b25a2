"""The CUDA device.

Owns the order in which a frame's copies, events and replay are asked for, the two seats of frames in flight, and what
a failure means for them. Does not own the step (`step`), CUDA's calls (`runtime`) or the thread (`waiter`). Surprising
rule: `submit` never waits for the card. All that a frame needs of the frames before it is on the card already; so the
host checks frames against what it assumes of rows (`mirror`), and learns what they gave from the waiter alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from flare.machines.graph import GraphShape, Source
from flare.machines.ids import Fence, PageId, RequestHandle

from ..device import DeviceLost, OnCompletion, OnProgress
from ..frames import Binding, Completion, Frame, LaneInput, Sampling
from ..memory.pages import PAGE_TOKENS
from ..models.config import ModelConfig
from ..models.draft import DraftModel
from ..models.source import WeightSource
from ..programs.extents import decodes, packed_rows, prompt_lanes
from ..programs.rows import StateRows
from ..weights.errors import ModelError
from . import failures
from .attention import Attention, choose_attention
from .failures import GIB
from .mirror import Mirror
from .pages import CudaPages
from .plan import CudaPlan, DType, layout_of, plan_memory, torch_dtype
from .runtime import CudaError, Runtime
from .seats import Flight, Seat
from .staging import Layout, Records
from .step import CudaStep
from .waiter import Waiter

FRAMES_IN_FLIGHT = 2
_TIMED_RUNS = 10

Play = Callable[[], None]
"""Replays one graph on the stream."""


class CudaDevice:
    """A `Device` that runs a decoder of the Llama family on one card.

    `catalog` holds the graphs that will be prepared, which decide how much memory is left for pages: `kv_bytes`, or if
    that is None, what `gpu_memory_utilization` of the card leaves. `eager` runs every body kernel by kernel, without
    graphs. `warn` is called with sentences for people, `log` with lines about graphs, memory and choices.

    Raises ValueError, naming the argument, for what cannot work, and `DeviceFailure` for what the card does not hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        runtime: Runtime,
        catalog: Sequence[GraphShape],
        request_slots: int,
        max_model_len: int,
        gpu_memory_utilization: float,
        kv_bytes: int | None,
        dtype: DType,
        eager: bool,
        warn: Callable[[str], None],
        log: Callable[[str], None],
        draft: DraftModel | None = None,
        rejects: bool = False,
    ) -> None:
        for name, value in (("request_slots", request_slots), ("max_model_len", max_model_len)):
            if value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        if not 0.0 < gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization: {gpu_memory_utilization} is not in (0, 1]")
        self._config = config
        self._weights = weights
        self._runtime = runtime
        self._request_slots = request_slots
        self._max_model_len = max_model_len
        self._eager = eager
        self._warn = warn
        self._log = log
        self._draft = draft
        self._rejects = rejects
        facts = runtime.facts()
        self._dtype = torch_dtype(dtype, facts)
        self._plan: CudaPlan = plan_memory(
            config,
            catalog,
            request_slots=request_slots,
            max_model_len=max_model_len,
            dtype=self._dtype,
            kv_bytes=kv_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            total_bytes=facts.total_bytes,
            free_bytes=runtime.free_bytes(),
            draft=None if draft is None else draft.config,
            rejects=rejects,
        )
        self._catalog = tuple(catalog)
        self._plays: dict[GraphShape, Play] = {}
        self._seats: deque[Seat] = deque()
        self._mirror = Mirror(request_slots, max_model_len)
        self._waiter: Waiter[Flight] | None = None
        self._lost: str | None = None
        self._closed = False

    @property
    def request_slots(self) -> int:
        """State rows: a lane's slot is below this."""
        return self._request_slots

    @property
    def pages(self) -> int:
        """Pages of the KV cache."""
        return self._plan.pages

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds."""
        return PAGE_TOKENS

    def prepare(self, catalog: Sequence[GraphShape], progress: OnProgress) -> None:
        """See `Device.prepare`. Graphs are captured from the largest on, so that all fit into the memory of the first.

        Raises ValueError for a graph that this device has no program for, `ModelError` for weights that give no
        numbers, and `DeviceFailure` where the card fails or its memory does not suffice.
        """
        for shape in catalog:
            if not (decodes(shape) or prompt_lanes(shape)):
                raise ValueError(f"catalog: the CUDA device has no program for {shape.name}")
            if shape.draft_depth and shape.source is Source.DRAFT and self._draft is None:
                raise ValueError(f"catalog: {shape.name} makes proposals, and there is no draft")
        if not set(catalog) <= set(self._catalog):
            raise ValueError("catalog: it holds graphs that memory was not planned for")
        free_bytes = self._runtime.free_bytes
        with failures.telling_memory("loading the model", free_bytes):
            step = self._load(catalog)
            self._runtime.settle()
        ordered = sorted(catalog, key=_size, reverse=True)
        began, free = time.monotonic(), free_bytes()
        for done, shape in enumerate(ordered, start=1):
            with failures.telling_memory(f"capturing {shape.name}, graph {done} of {len(ordered)}", free_bytes):
                self._plays[shape] = self._prepared(shape.name, step(shape))
            progress(shape, done, len(ordered))
        self._tell(len(ordered), time.monotonic() - began, free - free_bytes())
        with failures.telling_memory("running the first frame", free_bytes):
            self._check_numbers([shape for shape in ordered if prompt_lanes(shape) and not decodes(shape)])

    def start(self, on_completion: OnCompletion) -> None:
        """See `Device.start`."""
        if not self._plays or self._waiter is not None:
            raise DeviceLost("the CUDA device must be prepared, and started once")
        self._waiter = Waiter(self._complete, on_completion)

    def submit(self, frame: Frame) -> None:
        """See `Device.submit`. Never waits for the card."""
        if self._waiter is None or not self._waiter.alive:
            raise DeviceLost("the CUDA device is closed" if self._closed else "the CUDA device is not running")
        if self._lost is not None:
            raise DeviceLost(self._lost)
        self._waiter.put(self._board(frame))

    def close(self) -> None:
        """See `Device.close`."""
        if self._closed:
            return
        self._closed = True
        if self._waiter is not None:
            self._waiter.close()
        self._plays.clear()
        self._seats.clear()
        self._runtime.close()

    # Preparing

    def _load(self, catalog: Sequence[GraphShape]) -> Callable[[GraphShape], Callable[[], None]]:
        """Allocate everything and read the weights: makes the bodies of graphs."""
        runtime, slots, longest = self._runtime, self._request_slots, self._max_model_len
        draft = None if self._draft is None else self._draft.config
        layout = layout_of(
            self._config, catalog, request_slots=slots, max_model_len=longest, draft=draft, rejects=self._rejects
        )
        with torch.device(runtime.torch_device):
            self._inputs = torch.zeros(layout.input_bytes, dtype=torch.uint8)
            self._outputs = torch.zeros(layout.output_bytes, dtype=torch.uint8)
            records = layout.records(self._inputs, self._outputs, on_card=True)
            rows = StateRows.allocate(slots + 1, longest)
        self._seats.extend(self._seat(layout) for _ in range(FRAMES_IN_FLIGHT))
        self._inputs.copy_(self._seats[0].inputs)
        return self._make_step(records, rows)

    def _seat(self, layout: Layout) -> Seat:
        return Seat(self._runtime, layout, self._mirror, pages=self.pages, vocab=self._config.vocab)

    def _make_step(self, records: Records, rows: StateRows) -> Callable[[GraphShape], Callable[[], None]]:
        """Load the model: makes the bodies of graphs over these records and rows."""
        config, draft, device = self._config, self._draft, self._runtime.torch_device
        positions = rows.page_table.shape[1] * PAGE_TOKENS
        attention = self._attention(positions)
        with torch.device(device):
            kv = CudaPages.allocate(config, self.pages, PAGE_TOKENS, self._dtype)
            draft_kv = None
            if draft is not None:
                draft_kv = CudaPages.allocate(draft.config, self.pages, PAGE_TOKENS, self._dtype)
        return CudaStep(
            config,
            self._weights,
            rows=rows,
            buffers=records.buffers,
            binds=records.binds,
            scalars=records.scalars,
            kv=kv,
            device=device,
            dtype=self._dtype,
            positions=positions,
            attention=attention,
            draft=draft,
            draft_kv=draft_kv,
            rejects=self._rejects,
        ).body

    def _attention(self, positions: int) -> Attention:
        """The fastest that works here."""
        return choose_attention(
            self._config,
            device=self._runtime.torch_device,
            dtype=self._dtype,
            page_tokens=PAGE_TOKENS,
            positions=positions,
            timer=self._time,
            log=self._log,
        )

    def _prepared(self, name: str, body: Callable[[], None]) -> Play:
        """A body made ready to be replayed."""
        runtime = self._runtime
        if self._eager:
            return partial(runtime.run, body)
        began, free = time.monotonic(), runtime.free_bytes()
        graph = runtime.capture(body)
        took, used = time.monotonic() - began, free - runtime.free_bytes()
        self._log(f"captured {name} in {took:.2f} s, {used / (1 << 20):.1f} MiB")
        return partial(runtime.launch, graph)

    def _tell(self, graphs: int, seconds: float, used: int) -> None:
        """What all graphs together have taken."""
        planned = self._plan.capture_bytes
        self._log(f"{graphs} graphs ready in {seconds:.1f} s, {used / GIB:.2f} GiB of {planned / GIB:.2f} GiB planned")
        if used > planned:
            self._warn(
                f"graphs take {used / GIB:.2f} GiB, more than the {planned / GIB:.2f} GiB that were set aside; "
                "a start may fail where memory is scarce: lower --gpu-memory-utilization then"
            )

    def _time(self, body: Callable[[], None]) -> float:
        """Seconds of one run of a body, as it will be served."""
        runtime = self._runtime
        runtime.settle()
        play = partial(runtime.run, body) if self._eager else partial(runtime.launch, runtime.capture(body))
        began, ended = runtime.event(timed=True), runtime.event(timed=True)
        play()
        runtime.record(began)
        for _ in range(_TIMED_RUNS):
            play()
        runtime.record(ended)
        runtime.wait(ended)
        return runtime.elapsed_ns(began, ended) / _TIMED_RUNS / 1e9

    def _check_numbers(self, shapes: Sequence[GraphShape]) -> None:
        """Run the smallest prompt graph once, on a row and a page that nobody owns yet."""
        if not shapes:
            return
        lane = LaneInput(
            RequestHandle(0, -2),
            0,
            True,
            np.zeros(1, np.int32),
            binding=Binding((PageId(0),), Sampling(temperature=0.0), (), 1),
        )
        flight = self._board(Frame(Fence(0), shapes[-1], (lane,)))
        completion = self._complete(flight)
        if self._lost is not None or flight.error is not None:
            raise failures.unfit(f"the first frame failed: {completion.error}")
        if completion.error is not None:
            raise ModelError("the weights give logits that are not finite: take an undamaged model")

    # Serving

    def _board(self, frame: Frame) -> Flight:
        """Check a frame, give it a seat, and ask for all of it."""
        self._mirror.settle()
        flight = Flight(frame, self._mirror.living(frame))
        if not flight.sent.lanes:
            return flight
        try:
            self._check(flight.sent)
        except ValueError as error:
            flight.error = str(error)
            return flight
        flight.seat = seat = self._seats.popleft()
        sends = seat.write(flight.sent)
        flight.assumed = self._mirror.assume(flight.sent)
        flight.error = self._enqueue(frame.shape, seat, sends, seat.fetches(flight.sent, flight.assumed))
        if flight.error is not None:
            self._mirror.failed(frame)
        return flight

    def _check(self, frame: Frame) -> None:
        """Raises ValueError for a frame that cannot run."""
        if frame.shape not in self._plays:
            raise ValueError(f"frame {frame.fence}: graph {frame.shape.name} was not prepared")
        if not self._seats:
            raise ValueError(f"frame {frame.fence}: {FRAMES_IN_FLIGHT} frames are in flight already")
        self._seats[0].io.check(frame)

    def _enqueue(self, shape: GraphShape, seat: Seat, sends: int, fetches: int) -> str | None:
        """Ask for a frame's copies, events and replay in their order; what went wrong, if something did."""
        runtime = self._runtime
        try:
            runtime.copy(self._inputs[:sends], seat.inputs[:sends])
            runtime.record(seat.began)
            self._plays[shape]()
            runtime.record(seat.ended)
            runtime.copy(seat.outputs[:fetches], self._outputs[:fetches])
            runtime.record(seat.done)
        except CudaError as error:
            if error.lost:
                return self._lose(error)
            try:
                runtime.record(seat.done)  # what was asked for before may still use the seat
            except CudaError as second:
                return self._lose(second)
            return failures.frame_failed(error)
        return None

    def _complete(self, flight: Flight) -> Completion:
        """Wait for a frame, on the waiter's thread, and give its seat back."""
        if flight.seat is None:
            results = flight.results() if flight.error is None else ()
            return Completion(flight.frame.fence, 0, results, flight.error)
        completion = self._outcome(flight, flight.seat)
        if completion.error is not None and flight.error is None:
            self._mirror.failed(flight.frame)
        self._seats.append(flight.seat)
        return completion

    def _outcome(self, flight: Flight, seat: Seat) -> Completion:
        """What a frame gave once it has ended. A wait that fails is a lost card: nobody knows what still runs."""
        frame, fence = flight.sent, flight.sent.fence
        try:
            if self._lost is None:
                self._runtime.wait(seat.done)
        except CudaError as error:
            self._lose(error)
        if self._lost is not None:
            return Completion(fence, 0, (), self._lost, lost=True)
        if flight.error is not None:
            return Completion(fence, 0, (), flight.error)
        try:
            device_ns = self._runtime.elapsed_ns(seat.began, seat.ended)
            states = seat.states(flight.assumed)
            results = seat.read(frame, states, survival=self._rejects)
        except CudaError as error:
            said = self._lose(error) if error.lost else failures.frame_failed(error)
            return Completion(fence, 0, (), said, lost=error.lost)
        except Exception as error:  # noqa: BLE001 - its requests hear of it, and the others go on
            return Completion(fence, 0, (), f"{type(error).__name__}: {error}")
        self._mirror.told(flight.assumed, seat.drawn(frame), states)
        return Completion(fence, device_ns, flight.results(results), confidence=seat.confidence(frame))

    def _lose(self, error: CudaError) -> str:
        """From now on nothing runs. The first word stands."""
        if self._lost is None:
            self._lost = failures.lost(error)
        return self._lost


def _size(shape: GraphShape) -> tuple[int, int, int]:
    """By what a graph's working memory grows."""
    return packed_rows(shape), shape.batch * max(shape.width, shape.draft_depth + 1), shape.batch
