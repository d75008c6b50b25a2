"""Requests served by one program, separately or in mixed frames, with the logits that each token was drawn from.

Owns the two ways of serving and what they must agree on. Does not own programs. Surprising rule: both ways draw the
same tokens only as far as their logits agree, so tokens are forced: a row's next token is given, whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from flare.graphs.cpu.native import NativeStep
from flare.graphs.frames import LaneInput
from flare.graphs.programs.reference import ReferenceStep
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import RequestHandle
from tests.graphs.programs_driver import Driver


@dataclass
class Request:
    """A text in a slot, `prompt` tokens of it consumed as a prompt and the rest decoded one by one."""

    slot: int
    text: Sequence[int]
    prompt: int
    at: int = 0
    handle: RequestHandle = field(default_factory=lambda: RequestHandle(0, 0))
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        """Whether its prompt is consumed."""
        return self.at >= self.prompt


class Service:
    """Serves requests on a driver and keeps the logits of every token drawn."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._drawn = _recorder(driver)

    def serve(self, shape: GraphShape, lanes: Sequence[tuple[Request, int]]) -> None:
        """One frame of these requests in this order, each with so many tokens of its prompt (decoding rows: 1)."""
        inputs, drawing = [], []
        for request, tokens in lanes:
            if request.decoding:
                self.driver.program.rows.pending[request.slot] = request.text[request.at]
                inputs.append(LaneInput(request.handle, request.at, True))
            else:
                inputs.append(self._prompt_lane(request, min(tokens, request.prompt - request.at)))
            if inputs[-1].emits:
                drawing.append((request, inputs[-1].tokens is not None))
            request.at += 1 if inputs[-1].tokens is None else len(inputs[-1].tokens)
        self.driver.run(shape, inputs)
        if isinstance(self.driver.program, NativeStep):  # projects the rows of prompts before all others
            drawing.sort(key=lambda drawn: not drawn[1])
        for (request, _), logits in zip(drawing, self._drawn(len(drawing)), strict=True):
            request.logits.append(logits)

    def _prompt_lane(self, request: Request, tokens: int) -> LaneInput:
        binding = None
        if request.at == 0:
            request.handle, binding = self.driver.bind(request.slot)
        end = request.at + tokens
        ids = np.array(request.text[request.at : end], np.int32)
        last = end == request.prompt
        return LaneInput(request.handle, request.at, last, ids, None if last else request.text[end], binding)


def separately(driver: Driver, requests: Sequence[Request], chunk: int) -> None:
    """Each request alone: its prompt in chunks, then the rest of its text in decode steps of one row."""
    service = Service(driver)
    for request in requests:
        while request.at < len(request.text):
            kind = GraphKind.DECODE if request.decoding else GraphKind.PREFILL
            capacity = 0 if request.decoding else driver.prompt_rows
            service.serve(GraphShape(kind, 1, capacity), [(request, chunk)])


def in_mixed_frames(driver: Driver, requests: Sequence[Request], chunks: Callable[[], int], prompt_rows: int) -> None:
    """All requests in mixed frames: decoding rows go on in each, beside the chunks of up to `prompt_rows` prompts."""
    service = Service(driver)
    shape = GraphShape(GraphKind.MIXED, driver.slots, driver.prompt_rows, prompt_rows)
    while left := [request for request in requests if request.at < len(request.text)]:
        prompts = [request for request in left if not request.decoding][:prompt_rows]
        lanes = [(request, chunks()) for request in left if request.decoding or any(request is p for p in prompts)]
        service.serve(shape, lanes[: driver.slots])


def differences(one: Sequence[Request], other: Sequence[Request]) -> float:
    """The largest difference between the logits of the same tokens."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        assert len(a.logits) == len(b.logits) == len(a.text) - a.prompt + 1
        for x, y in zip(a.logits, b.logits, strict=True):
            largest = max(largest, float((x - y).abs().max()))
    return largest


def _recorder(driver: Driver) -> Callable[[int], list[torch.Tensor]]:
    """A function that gives the logits of the rows projected last, of which there are so many."""
    program = driver.program
    if isinstance(program, NativeStep):
        native = program
        return lambda count: [row.clone() for row in native.logits[:count, : driver.config.vocab]]
    assert isinstance(program, ReferenceStep)
    decoder = program.decoder
    kept: list[torch.Tensor] = []
    project = decoder.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out = project(hidden)
        kept.extend(out.clone())
        return out

    def last(count: int) -> list[torch.Tensor]:
        drawn = kept[-count:] if count else []
        kept.clear()
        return drawn

    decoder.logits = logits  # type: ignore[method-assign]
    return last
