"""The request rows of the simulated device: what a frame does to each row, and what it must not do.

Owns the roles and extents of a frame, generations, and the ownership of pages, with the meanings of
`graphs/frames.py`. Does not own time. Surprising rule: a frame is all or nothing. Every lane is worked out before any
row changes, so that a refused frame leaves no trace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flare.machines.allocation import allocate
from flare.machines.graph import QUEUEABLE_KINDS, STAGE_KINDS, GraphKind, GraphShape, Source
from flare.machines.ids import PageId, RequestHandle

from ..frames import Frame, LaneInput, LaneResult
from .acceptance import Acceptance, Confidence, FixedAcceptance
from .prompts import Prompts
from .rounds import Rounds, acceptance_key
from .stages import Stages
from .state import FrameRefused, PageConflict, Progress, Row, fresh_row
from .tokens import TokenSource

_NOTHING_ACCEPTED = FixedAcceptance(0)


class Ran(NamedTuple):
    """What a frame gave: a result for each lane, and what the program thought of its proposals (`Completion`)."""

    results: tuple[LaneResult, ...]
    confidence: NDArray[np.float32] | None


class SimRows:
    """All rows of a device with `request_slots` slots, `pages` pages of `page_tokens` tokens and `state_rows` state
    rows. With `confidence` its programs tell what they think of their proposals, and can share out target rows."""

    def __init__(
        self,
        request_slots: int,
        pages: int,
        page_tokens: int,
        tokens: TokenSource,
        acceptance: Acceptance = _NOTHING_ACCEPTED,
        state_rows: int = 0,
        confidence: Confidence | None = None,
    ) -> None:
        self._rows: list[Row | None] = [None] * request_slots
        self._pages = pages
        self._page_tokens = page_tokens
        self._tokens = tokens
        self._rounds = Rounds(tokens, acceptance)
        self._prompts = Prompts(tokens, self._rounds)
        self._stages = Stages(state_rows)
        self._confidence = confidence
        self._owners: dict[PageId, RequestHandle] = {}

    def run(self, frame: Frame) -> tuple[LaneResult, ...]:
        """The results alone of `execute`."""
        return self.execute(frame).results

    def execute(self, frame: Frame) -> Ran:
        """Apply the frame. Raises `FrameRefused` or `PageConflict`, and then nothing has changed."""
        _check_frame(frame)
        if frame.allocates and self._confidence is None:
            raise FrameRefused(f"{frame.shape.name} does not share out its target rows")
        rows = [self._row(lane) for lane in frame.lanes]
        self._check_pages(frame, rows)
        if frame.shape.kind in STAGE_KINDS:
            return Ran(self._run_stages(frame, rows), None)
        beliefs = self._beliefs(frame, rows)
        steps = self._steps(frame, rows, _targets(frame, beliefs))
        for lane, row, (progress, _) in zip(frame.lanes, rows, steps, strict=True):
            if lane.binding is not None:
                self._bind(row)
            row.progress = progress
        return Ran(tuple([result for _, result in steps]), beliefs)

    def _run_stages(self, frame: Frame, rows: list[Row]) -> tuple[LaneResult, ...]:
        kind, lanes = frame.shape.kind, frame.lanes
        changes = [
            self._stages.step(kind, lane, row, self._rows[lane.handle.slot])
            for lane, row in zip(lanes, rows, strict=True)
        ]
        named = [change.state[0] for change in changes if change.state is not None]
        if len(set(named)) < len(named):
            raise FrameRefused(f"a state row appears in two lanes of one {kind} frame")
        for lane, row, change in zip(lanes, rows, changes, strict=True):
            if lane.binding is not None:
                self._bind(row)
            self._stages.apply(row, change)
        return tuple([change.result(lane) for lane, change in zip(lanes, changes, strict=True)])

    def _steps(self, frame: Frame, rows: list[Row], targets: list[int]) -> list[tuple[Progress, LaneResult]]:
        kind, decode, consume = frame.shape.kind, self._rounds.step, self._prompts.step
        lanes = zip(frame.lanes, rows, targets, strict=True)
        if kind in QUEUEABLE_KINDS:
            return [decode(lane, row, count) for lane, row, count in lanes]
        if kind is GraphKind.MIXED:
            return [
                decode(lane, row, count) if lane.tokens is None else consume(kind, lane, row)
                for lane, row, count in lanes
            ]
        return [consume(kind, lane, row) for lane, row, _ in lanes]

    def _beliefs(self, frame: Frame, rows: list[Row]) -> NDArray[np.float32] | None:
        """The confidence of a frame whose program proposes, if it tells any: zero for rows without proposals."""
        if self._confidence is None or not _proposes(frame.shape):
            return None
        planes = np.zeros((2, len(self._rows), frame.shape.draft_depth), np.float32)
        for lane, row in zip(frame.lanes, rows, strict=True):
            if lane.tokens is None and row.live:
                key, drawn = acceptance_key(row.progress, row), row.progress.outputs
                planes[0, lane.handle.slot] = self._confidence(key, drawn - 1, frame.shape.draft_depth)
        np.cumprod(planes[0], axis=1, out=planes[1])
        return planes

    def _row(self, lane: LaneInput) -> Row:
        """The row that a lane means: the one that stands, or a fresh one if the lane brings a binding."""
        slot, generation = lane.handle
        if not 0 <= slot < len(self._rows):
            raise FrameRefused(f"slot {slot} of {len(self._rows)}")
        standing = self._rows[slot]
        if lane.binding is None:
            if standing is None or standing.handle != lane.handle:
                now = "unbound" if standing is None else f"at generation {standing.handle.generation}"
                raise FrameRefused(f"stale handle: slot {slot} generation {generation}, but the slot is {now}")
            if standing.retired:
                raise FrameRefused(f"{lane.handle} was retired")
            return standing
        if standing is not None and generation <= standing.handle.generation:
            raise FrameRefused(f"slot {slot} is at generation {standing.handle.generation}; bound with {generation}")
        return fresh_row(lane.handle, lane.binding, self._tokens.rules(lane.binding), self._page_tokens)

    def _check_pages(self, frame: Frame, rows: list[Row]) -> None:
        taken: dict[PageId, RequestHandle] = {}
        robbed: dict[RequestHandle, RequestHandle] = {}
        for row in rows:
            if row.robbed_by is not None and row.live:
                raise PageConflict(f"fence {frame.fence}: {row.handle} lost a page to {row.robbed_by} and is served")
        for lane in frame.lanes:
            for page in lane.binding.pages if lane.binding is not None else ():
                if not 0 <= page < self._pages:
                    raise FrameRefused(f"page {page} of {self._pages} bound to {lane.handle}")
                if page in taken:
                    raise PageConflict(f"fence {frame.fence}: page {page} bound to {taken[page]} and {lane.handle}")
                taken[page] = lane.handle
                if page in self._owners:
                    robbed[self._owners[page]] = lane.handle
        for row in rows:
            if row.handle in robbed and row.live:
                raise PageConflict(f"fence {frame.fence}: {row.handle} is served as {robbed[row.handle]} takes a page")

    def _bind(self, row: Row) -> None:
        for page in row.binding.pages:
            owner = self._owners.get(page)
            if owner is not None:
                standing = self._rows[owner.slot]
                if standing is not None and standing.handle == owner:
                    standing.robbed_by = row.handle
            self._owners[page] = row.handle
        self._rows[row.handle.slot] = row


def _check_frame(frame: Frame) -> None:
    """The roles of the lanes and their sums against the extents of the graph."""
    shape, lanes = frame.shape, frame.lanes
    if not 1 <= len(lanes) <= shape.batch:
        raise FrameRefused(f"{len(lanes)} lanes in a frame of {shape.name}, which has {shape.batch} rows")
    if len({lane.handle.slot for lane in lanes}) < len(lanes):
        raise FrameRefused("a slot appears in two lanes of one frame")
    prompts = [lane for lane in lanes if lane.tokens is not None]
    prompt_tokens = sum([len(lane.tokens) for lane in prompts if lane.tokens is not None])
    if prompt_tokens > shape.prefill_tokens:
        raise FrameRefused(f"{prompt_tokens} prompt tokens in a frame of {shape.name}")
    if shape.kind is GraphKind.MIXED and len(prompts) > shape.prompt_rows:
        raise FrameRefused(f"{len(prompts)} prompts in a frame of {shape.name}, which takes {shape.prompt_rows}")
    if shape.kind in STAGE_KINDS:
        return
    if frame.allocates and not (shape.kind is GraphKind.SPECULATIVE and shape.ragged and _proposes(shape)):
        raise FrameRefused(f"a frame of {shape.name} has no target rows to share out")
    targets = 0
    for lane in lanes:
        if lane.stage is not None:
            raise FrameRefused(f"{lane.handle} asks for a state operation in a frame of {shape.name}")
        width = lane.width
        if not 1 <= width <= (shape.width if lane.tokens is None else 1):
            raise FrameRefused(f"{width} targets for {lane.handle} in a frame of {shape.name}")
        targets += width if lane.tokens is None else 0
        given = 0 if lane.proposals is None else len(lane.proposals)
        if given != (width - 1 if shape.source is Source.COPY else 0):
            raise FrameRefused(f"{given} copied proposals for {lane.handle} in a frame of {shape.name}")
    if shape.drafts and targets > shape.packed_targets and not frame.allocates:
        raise FrameRefused(f"{targets} targets in a frame of {shape.name}, which packs {shape.packed_targets}")


def _proposes(shape: GraphShape) -> bool:
    """Whether the program makes proposals itself."""
    return shape.draft_depth > 0 and shape.source is Source.DRAFT


def _targets(frame: Frame, beliefs: NDArray[np.float32] | None) -> list[int]:
    """How many positions of each lane are verified."""
    lanes = frame.lanes
    if frame.allocates and beliefs is not None:
        order = sorted(range(len(lanes)), key=lambda place: lanes[place].handle.slot)
        joint = [beliefs[1, lanes[place].handle.slot].tolist() for place in order]
        shares = allocate(joint, [lanes[place].width for place in order], frame.shape.packed_targets)
        by_place = dict(zip(order, shares, strict=True))
        return [by_place[place] for place in range(len(lanes))]
    return [lane.width for lane in lanes]
