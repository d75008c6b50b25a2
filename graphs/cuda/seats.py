"""What one frame in flight has for itself.

Owns a frame's pinned memory and events, how a frame is written to the former, how its results are read from there, and
the record of a frame on its way. Does not own the blocks on the card, which all frames share: the order of the stream
keeps them apart. Surprising rule: a seat is taken from the moment a frame is written until its results have been read,
because the card reads and writes pinned memory long after the calls that ask it to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flare.machines.graph import GraphKind, Source

from ..frames import Frame, LaneResult
from ..programs.frame_io import FrameIo
from ..programs.frame_results import FrameResults, LaneState
from .mirror import Assumed, Mirror
from .runtime import Runtime
from .staging import Inputs, Layout, Outputs


class Seat:
    """Pinned memory and events for one frame at a time, of a model with `vocab` tokens and so many `pages`."""

    def __init__(self, runtime: Runtime, layout: Layout, mirror: Mirror, *, pages: int, vocab: int) -> None:
        self.inputs, self.outputs = runtime.pinned(layout.input_bytes), runtime.pinned(layout.output_bytes)
        self.began, self.ended = runtime.event(timed=True), runtime.event(timed=True)
        self.done = runtime.event(timed=False)
        records = layout.records(self.inputs, self.outputs, on_card=False)
        self.io = FrameIo(mirror.rows, records.buffers, pages, vocab)
        self._layout = layout
        self._results = FrameResults(records.buffers)
        self._bound_rows = records.binds.rows
        self._bound_slot = records.binds.slot.numpy()
        self._nobody = self._bound_slot[:] = len(mirror.rows.ended)
        scalars = records.scalars
        self._lane_count, self._allocates = scalars.lane_count.numpy(), scalars.allocates.numpy()
        self._committed, self._ended = scalars.committed.numpy(), scalars.ended.numpy()
        self._count, self._confidence = records.buffers.count.numpy(), records.buffers.confidence.numpy()

    def write(self, frame: Frame) -> int:
        """Put a frame that has been checked into pinned memory; so many bytes of the inputs are to be sent."""
        self.io.write(frame)
        self._lane_count[0], self._allocates[0] = len(frame.lanes), frame.allocates
        self._bound_slot[:] = self._nobody
        fresh = [(lane.handle, lane.binding) for lane in frame.lanes if lane.binding is not None]
        for index, (handle, binding) in enumerate(fresh):
            self._bound_slot[index] = handle.slot
            self._bound_rows.bind(index, handle.generation, binding)
        return self._layout.inputs_to(*_needed(frame))

    def fetches(self, frame: Frame, assumed: Sequence[Assumed]) -> int:
        """How many bytes of the outputs a frame tells its results by."""
        if frame.shape.kind is GraphKind.SCORED_PREFILL:
            return self._layout.outputs_to(Outputs.PROMPT_SCORES)
        asked = any(lane.logprobs >= 0 for lane in assumed)
        return self._layout.outputs_to(Outputs.SCORES if asked else Outputs.TOKENS)

    def states(self, assumed: Sequence[Assumed]) -> list[LaneState]:
        """Where the rows of the lanes stand after the frame."""
        standing = zip(assumed, self._committed.tolist(), self._ended.tolist(), strict=False)
        return [LaneState(committed, ended, lane.logprobs, lane.prompt_logprobs) for lane, committed, ended in standing]

    def drawn(self, frame: Frame) -> list[int]:
        """How many tokens each lane drew."""
        counts: list[int] = self._count[: len(frame.lanes)].tolist()
        return counts

    def read(self, frame: Frame, states: Sequence[LaneState], *, survival: bool) -> tuple[LaneResult, ...]:
        """See `FrameResults.read`."""
        return self._results.read(frame, states, survival=survival)

    def confidence(self, frame: Frame) -> NDArray[np.float32] | None:
        """What the program thought of its proposals, if it made any."""
        shape = frame.shape
        if shape.source is not Source.DRAFT or not shape.draft_depth:
            return None
        return self._confidence[:, : self._nobody, : shape.draft_depth].copy()


@dataclass(slots=True)
class Flight:
    """A frame on its way, of which `sent` runs. `seat` None: it does not run; `error`: it will fail, and why."""

    frame: Frame
    sent: Frame
    seat: Seat | None = None
    error: str | None = None
    assumed: list[Assumed] = field(default_factory=list)

    def results(self, of_sent: Sequence[LaneResult] = ()) -> tuple[LaneResult, ...]:
        """A result for each lane; those that were not sent did nothing."""
        if len(of_sent) == len(self.frame.lanes):
            return tuple(of_sent)
        known = {result.handle: result for result in of_sent}
        return tuple(known.get(lane.handle) or LaneResult(lane.handle, lane.start) for lane in self.frame.lanes)


def _needed(frame: Frame) -> tuple[Inputs, int]:
    """The part of the inputs that a frame needs, and the lanes up to the last one with a history."""
    histories = [index for index, lane in enumerate(frame.lanes) if lane.history is not None]
    if any(len(lane.history.token_ids) for lane in frame.lanes if lane.history is not None):
        return Inputs.HISTORY, histories[-1] + 1
    if histories:
        return Inputs.BANS, 0
    if any(lane.binding is not None for lane in frame.lanes):
        return Inputs.BINDINGS, 0
    if any(lane.tokens is not None for lane in frame.lanes):
        return Inputs.PROMPTS, 0
    return (Inputs.TOKENS if frame.shape.source is Source.COPY else Inputs.LANES), 0
