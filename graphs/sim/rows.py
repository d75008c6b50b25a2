"""The request rows of the simulated device: what a frame does to each row, and what it must not do.

Owns the roles and extents of a frame, generations, and the ownership of pages, with the meanings of
`graphs/frames.py`. Does not own time. Surprising rule: a frame is all or nothing. Every lane is worked out before any
row changes, so that a refused frame leaves no trace.
"""

from __future__ import annotations

from flare.machines.graph import QUEUEABLE_KINDS, STAGE_KINDS, GraphKind
from flare.machines.ids import PageId, RequestHandle

from ..frames import Frame, LaneInput, LaneResult
from .acceptance import Acceptance, FixedAcceptance
from .prompts import Prompts
from .rounds import Rounds
from .stages import Stages
from .state import FrameRefused, PageConflict, Progress, Row, fresh_row
from .tokens import TokenSource

_NOTHING_ACCEPTED = FixedAcceptance(0)


class SimRows:
    """All rows of a device with `request_slots` slots, `pages` pages of `page_tokens` tokens and `state_rows` state
    rows."""

    def __init__(
        self,
        request_slots: int,
        pages: int,
        page_tokens: int,
        tokens: TokenSource,
        acceptance: Acceptance = _NOTHING_ACCEPTED,
        state_rows: int = 0,
    ) -> None:
        self._rows: list[Row | None] = [None] * request_slots
        self._pages = pages
        self._page_tokens = page_tokens
        self._tokens = tokens
        self._rounds = Rounds(tokens, acceptance)
        self._prompts = Prompts(tokens, self._rounds)
        self._stages = Stages(state_rows)
        self._owners: dict[PageId, RequestHandle] = {}

    def run(self, frame: Frame) -> tuple[LaneResult, ...]:
        """Apply the frame. Raises `FrameRefused` or `PageConflict`, and then nothing has changed."""
        _check_frame(frame)
        rows = [self._row(lane) for lane in frame.lanes]
        self._check_pages(frame, rows)
        if frame.shape.kind in STAGE_KINDS:
            return self._run_stages(frame, rows)
        steps = self._steps(frame, rows)
        for lane, row, (progress, _) in zip(frame.lanes, rows, steps, strict=True):
            if lane.binding is not None:
                self._bind(row)
            row.progress = progress
        return tuple([result for _, result in steps])

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

    def _steps(self, frame: Frame, rows: list[Row]) -> list[tuple[Progress, LaneResult]]:
        kind, decode, consume = frame.shape.kind, self._rounds.step, self._prompts.step
        lanes = zip(frame.lanes, rows, strict=True)
        if kind in QUEUEABLE_KINDS:
            return [decode(lane, row) for lane, row in lanes]
        if kind is GraphKind.MIXED:
            return [decode(lane, row) if lane.tokens is None else consume(kind, lane, row) for lane, row in lanes]
        return [consume(kind, lane, row) for lane, row in lanes]

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
    targets = 0
    for lane in lanes:
        if lane.stage is not None:
            raise FrameRefused(f"{lane.handle} asks for a state operation in a frame of {shape.name}")
        width = lane.width
        if not 1 <= width <= (shape.width if lane.tokens is None else 1):
            raise FrameRefused(f"{width} targets for {lane.handle} in a frame of {shape.name}")
        targets += width if lane.tokens is None else 0
    if shape.drafts and targets > shape.packed_targets:
        raise FrameRefused(f"{targets} targets in a frame of {shape.name}, which packs {shape.packed_targets}")
