"""A host that drives a device by hand: it gives slots, pages and fences, and waits for completions.

Owns what the engine owns in a server. Does not own the checks of behaviour (`conformance`). Surprising rule:
pages are never taken back, so a device under test needs enough of them for all that one test admits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flare.graphs.device import Device
from flare.graphs.frames import Binding, Completion, Frame, History, LaneInput, LaneResult, Sampling, StageInput
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle
from flare.machines.request import EndReason, ImageWindow

PREFILL = GraphShape(GraphKind.PREFILL, 1, 64)
SCORED = GraphShape(GraphKind.SCORED_PREFILL, 1, 64)
DECODE = {batch: GraphShape(GraphKind.DECODE, batch) for batch in (1, 2, 4)}
CATALOG = (PREFILL, SCORED, *DECODE.values())
"""What every device prepares."""
GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 60.0


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt of ids below 100, which every vocabulary here has."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 100, length)]


@dataclass
class Row:
    """A request in a slot, as the host sees it."""

    handle: RequestHandle
    prompt: list[int]
    binding: Binding
    sent: int = 0
    bound: bool = False
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    ended: EndReason | None = None

    def take(self, result: LaneResult) -> None:
        """Check a result against what is known of the row, and count it in."""
        assert result.handle == self.handle
        assert result.committed >= self.committed
        self.tokens.extend(result.tokens)
        self.committed = result.committed
        self.ended = result.ended or self.ended


class Host:
    """Drives a device by hand: gives slots, pages and fences, and waits for completions."""

    def __init__(self, device: Device, catalog: Sequence[GraphShape] = CATALOG) -> None:
        self.device = device
        self.completions: queue.Queue[Completion] = queue.Queue()
        self.callback_threads: set[int] = set()
        self._fence = 0
        self._generations = [0] * device.request_slots
        self._free_pages = [PageId(page) for page in range(device.pages)]
        prepared: list[GraphShape] = []
        device.prepare(catalog, lambda shape, done, total: prepared.append(shape))
        assert sorted(prepared) == sorted(catalog)
        device.start(self._complete)

    def _complete(self, completion: Completion) -> None:
        self.callback_threads.add(threading.get_ident())
        self.completions.put(completion)

    def admit(
        self,
        slot: int,
        prompt: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        output_limit: int = 8,
        stop_tokens: tuple[int, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        initialize: bool = False,
        windows: tuple[ImageWindow, ...] = (),
        spans: tuple[tuple[int, int], ...] = (),
        pages: Sequence[PageId] | None = None,
    ) -> Row:
        """A fresh generation of a slot, with pages for all that it may produce."""
        given = self._take_pages(len(prompt) + output_limit) if pages is None else tuple(pages)
        binding = Binding(
            given, sampling, stop_tokens, output_limit, logprobs, prompt_logprobs, initialize, windows, spans
        )
        return Row(self._fresh(slot), list(prompt), binding)

    def rebind(self, row: Row, slot: int | None = None) -> None:
        """A fresh generation for the same request: in its slot with its pages, or in another slot with others."""
        if slot is not None:
            pages = self._take_pages(len(row.prompt) + row.binding.output_limit)
            row.binding = replace(row.binding, pages=pages)
        row.handle = self._fresh(row.handle.slot if slot is None else slot)
        row.bound = False

    def _fresh(self, slot: int) -> RequestHandle:
        self._generations[slot] += 1
        return RequestHandle(slot, self._generations[slot])

    def _take_pages(self, tokens: int) -> tuple[PageId, ...]:
        return tuple(self._free_pages.pop(0) for _ in range(-(-tokens // self.device.page_tokens)))

    def submit(self, shape: GraphShape, lanes: Sequence[LaneInput], *, allocates: bool = False) -> Fence:
        """Queue a frame under the next fence."""
        self._fence += 1
        fence = Fence(self._fence)
        self.device.submit(Frame(fence, shape, tuple(lanes), allocates))
        return fence

    def wait(self) -> Completion:
        """The next completion."""
        completion = self.completions.get(timeout=PATIENCE_S)
        assert completion.device_ns >= 0
        if completion.error is not None:
            assert completion.results == ()
        return completion

    def run(self, shape: GraphShape, lanes: Sequence[LaneInput], *, allocates: bool = False) -> Completion:
        """One frame, alone in the window."""
        fence = self.submit(shape, lanes, allocates=allocates)
        completion = self.wait()
        assert completion.fence == fence
        return completion

    def prefill(
        self, row: Row, *, chunk: int = 64, shape: GraphShape = PREFILL, history: History | None = None
    ) -> list[LaneResult]:
        """The whole prompt in chunks; the last emits unless the row may produce nothing."""
        results: list[LaneResult] = []
        while row.sent < len(row.prompt):
            results.extend(self.serve(shape, [(row, prompt_lane(row, chunk, history))]))
        return results

    def serve(self, shape: GraphShape, lanes: Sequence[tuple[Row, LaneInput]]) -> tuple[LaneResult, ...]:
        """One frame that must succeed; its results are counted in."""
        results = ok(self.run(shape, [lane for _, lane in lanes]))
        for (row, lane), result in zip(lanes, results, strict=True):
            row.take(result)
            row.bound = True
            tokens = lane.tokens if lane.stage is None else lane.stage.tokens
            row.sent += 0 if tokens is None else len(tokens)
        return results

    def decode(self, rows: Sequence[Row], steps: int = 1) -> None:
        """`steps` decode frames over the rows, one at a time."""
        shape = next(shape for batch, shape in DECODE.items() if batch >= len(rows))
        for _ in range(steps):
            self.serve(shape, [(row, decode_lane(row)) for row in rows])

    def generate(self, row: Row, steps: int, chunk: int = 64) -> list[int]:
        """Prefill and `steps` decode frames, alone."""
        self.prefill(row, chunk=chunk)
        self.decode([row], steps)
        return row.tokens


def decode_lane(row: Row, ahead: int = 0, width: int = 1) -> LaneInput:
    """A decode lane for a row with `ahead` frames queued before it; `width` targets, or what it may still produce."""
    left = max(1, row.binding.output_limit - len(row.tokens) - ahead)
    return LaneInput(row.handle, row.committed - 1 + ahead, emits=True, width=min(width, left))


def prompt_lane(row: Row, chunk: int, history: History | None = None) -> LaneInput:
    """The next `chunk` prompt tokens of a row, or what is left; the last emits unless the row may produce nothing."""
    end = min(row.sent + chunk, len(row.prompt))
    last = end == len(row.prompt)
    return LaneInput(
        row.handle,
        row.sent,
        emits=last and row.binding.output_limit > 0,
        tokens=np.array(row.prompt[row.sent : end], dtype=np.int32),
        target=None if last else row.prompt[end],
        binding=None if row.bound else row.binding,
        history=history if last else None,
    )


def stage_lane(row: Row, *, state_row: int | None = None, operation: int = 0, restored: int = 0) -> LaneInput:
    """The lane of a state operation; `restored` prompt tokens come from a cache."""
    tokens = np.array(row.prompt[:restored], dtype=np.int32) if restored else None
    stage = StageInput(state_row, operation, tokens)
    return LaneInput(row.handle, row.sent, emits=False, binding=None if row.bound else row.binding, stage=stage)


def ok(completion: Completion) -> tuple[LaneResult, ...]:
    """The results of a frame that must have succeeded."""
    assert completion.error is None, completion.error
    return completion.results


def banning(*tokens: int) -> History:
    """A history that forbids tokens and says nothing else."""
    none = np.zeros(0, dtype=np.int32)
    return History(none, none, banned=tokens)
