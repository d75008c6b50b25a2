"""A device driven by hand: requests in slots, frames one by one or queued.

Owns slots, pages, fences and the queue of completions. Does not own what frames hold (the sections do). Surprising
rule: each slot has pages of its own from the start, so that a fresh request of a slot takes over those of the last.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flare.graphs.device import Device
from flare.graphs.frames import Binding, Completion, Frame, LaneInput, LaneResult, Sampling
from flare.machines.graph import GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle

GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 120.0

Listener = Callable[[Completion, int], None]
"""Called on the device's thread with a completion and the time (`perf_counter_ns`)."""


@dataclass
class Text:
    """A request in a slot: how much of its prompt has been `sent`, and what it has given."""

    handle: RequestHandle
    prompt: NDArray[np.int32]
    binding: Binding
    sent: int = 0
    bound: bool = False
    committed: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def chunk(self, tokens: int) -> LaneInput:
        """The next so many prompt tokens, or what is left."""
        end = min(self.sent + tokens, len(self.prompt))
        last = end == len(self.prompt)
        return LaneInput(
            self.handle,
            self.sent,
            emits=last,
            tokens=self.prompt[self.sent : end],
            target=None if last else int(self.prompt[end]),
            binding=None if self.bound else self.binding,
        )

    def turn(self, *, ahead: int = 0, width: int = 1, proposals: Sequence[int] | None = None) -> LaneInput:
        """A round of output, with `ahead` rounds of one token queued before it."""
        given = None if proposals is None else np.array(proposals, np.int32)
        return LaneInput(self.handle, self.committed - 1 + ahead, emits=True, width=width, proposals=given)

    def take(self, lane: LaneInput, result: LaneResult) -> None:
        """Count a result in."""
        self.bound = True
        self.sent += 0 if lane.tokens is None else len(lane.tokens)
        self.committed = result.committed
        self.tokens.extend(result.tokens)
        self.ended = self.ended or result.ended is not None


class Player:
    """Drives `device`, which it prepares and starts."""

    def __init__(self, device: Device, catalog: Sequence[GraphShape], max_model_len: int) -> None:
        began = time.monotonic()
        self.device = device
        self.catalog = tuple(catalog)
        self.prepared_s: list[float] = []
        self.listener: Listener | None = None
        self._completions: queue.SimpleQueue[tuple[Completion, int]] = queue.SimpleQueue()
        self._fence = 0
        self._generation = 0
        self._pages = -(-max_model_len // device.page_tokens)
        if device.pages < self._pages * device.request_slots:
            raise ValueError(f"{device.pages} pages are too few for {device.request_slots} slots of {self._pages}")
        device.prepare(catalog, lambda *_: self.prepared_s.append(time.monotonic() - began))
        device.start(self._complete)

    def admit(
        self,
        slot: int,
        prompt: Sequence[int] | NDArray[np.int32],
        *,
        limit: int,
        sampling: Sampling = GREEDY,
        stop: tuple[int, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Text:
        """A fresh request of a slot."""
        self._generation += 1
        first = slot * self._pages
        pages = tuple(PageId(page) for page in range(first, first + self._pages))
        binding = Binding(pages, sampling, stop, limit, logprobs, prompt_logprobs)
        return Text(RequestHandle(slot, self._generation), np.asarray(prompt, np.int32), binding)

    def submit(self, shape: GraphShape, lanes: Sequence[LaneInput]) -> None:
        """Queue a frame."""
        self._fence += 1
        self.device.submit(Frame(Fence(self._fence), shape, tuple(lanes)))

    def wait(self) -> tuple[Completion, int]:
        """The next completion, and when it came. Raises RuntimeError for one that tells of an error."""
        completion, at_ns = self._completions.get(timeout=PATIENCE_S)
        if completion.error is not None:
            raise RuntimeError(completion.error)
        return completion, at_ns

    def play(self, shape: GraphShape, lanes: Sequence[tuple[Text, LaneInput]]) -> Completion:
        """One frame alone; its results are counted in."""
        self.submit(shape, [lane for _, lane in lanes])
        completion, _ = self.wait()
        for (text, lane), result in zip(lanes, completion.results, strict=True):
            text.take(lane, result)
        return completion

    def read(self, texts: Sequence[Text], shape: GraphShape) -> None:
        """Consume all prompts, one at a time, in graph `shape`."""
        for text in texts:
            while text.sent < len(text.prompt):
                self.play(shape, [(text, text.chunk(shape.prefill_tokens))])

    def _complete(self, completion: Completion) -> None:
        now_ns = time.perf_counter_ns()
        if self.listener is not None:
            self.listener(completion, now_ns)
        else:
            self._completions.put((completion, now_ns))


@contextmanager
def playing(device: Device, catalog: Sequence[GraphShape], max_model_len: int) -> Iterator[Player]:
    """A player, and the end of its device."""
    try:
        yield Player(device, catalog, max_model_len)
    finally:
        device.close()


def prompt_of(tokens: int, seed: int, vocab: int) -> NDArray[np.int32]:
    """A prompt by chance."""
    return np.random.default_rng(seed).integers(0, vocab, tokens).astype(np.int32)
