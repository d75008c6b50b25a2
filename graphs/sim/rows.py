"""The request rows of the simulated device: what a frame does to each row, and what it must not do.

Owns generations, positions, output limits, ends and the ownership of pages, with the meanings of
`graphs/frames.py`. Does not own time. Surprising rule: a frame is all or nothing. Every lane is worked out before any
row changes, so that a refused frame leaves no trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flare.machines.graph import GraphKind
from flare.machines.ids import PageId, RequestHandle
from flare.machines.request import EndReason

from ..frames import Binding, Frame, History, LaneInput, LaneResult, TokenScore
from .tokens import DrawRules, TokenSource, hash_tokens

_MASK = (1 << 64) - 1


class FrameRefused(Exception):
    """The frame cannot be run; its message becomes the error of the completion."""


class PageConflict(Exception):
    """A lane would write pages that have since been bound to another live row: the host gave a page twice."""


class Progress(NamedTuple):
    """How far a row has come. `prompt_done`: it decodes from here, or has ended."""

    consumed: int = 0
    prompt_hash: int = 0
    prompt_done: bool = False
    outputs: int = 0
    ended: EndReason | None = None


_FRESH = Progress()
_NONE: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Row:
    handle: RequestHandle
    binding: Binding
    rules: DrawRules
    progress: Progress = _FRESH
    robbed_by: RequestHandle | None = None


class SimRows:
    """All state rows of a device with `request_slots` slots and `pages` pages of `page_tokens` tokens."""

    def __init__(self, request_slots: int, pages: int, page_tokens: int, tokens: TokenSource) -> None:
        self._rows: list[_Row | None] = [None] * request_slots
        self._pages = pages
        self._page_tokens = page_tokens
        self._tokens = tokens
        self._owners: dict[PageId, RequestHandle] = {}

    def run(self, frame: Frame) -> tuple[LaneResult, ...]:
        """Apply the frame. Raises `FrameRefused` or `PageConflict`, and then nothing has changed."""
        self._check_frame(frame)
        rows = [self._row(lane) for lane in frame.lanes]
        self._check_pages(frame, rows)
        steps = [self._step(frame.shape.kind, lane, row) for lane, row in zip(frame.lanes, rows, strict=True)]
        for lane, row, (progress, _) in zip(frame.lanes, rows, steps, strict=True):
            if lane.binding is not None:
                self._bind(row)
            row.progress = progress
        return tuple(result for _, result in steps)

    def _check_frame(self, frame: Frame) -> None:
        shape, lanes = frame.shape, frame.lanes
        if not 1 <= len(lanes) <= shape.batch:
            raise FrameRefused(f"{len(lanes)} lanes in a frame of {shape.name}, which has {shape.batch} rows")
        if len({lane.handle.slot for lane in lanes}) < len(lanes):
            raise FrameRefused("a slot appears in two lanes of one frame")
        prompt_tokens = sum(len(lane.tokens) for lane in lanes if lane.tokens is not None)
        if prompt_tokens > shape.prefill_tokens:
            raise FrameRefused(f"{prompt_tokens} prompt tokens in a frame of {shape.name}")

    def _row(self, lane: LaneInput) -> _Row:
        """The row that a lane means: the one that stands, or a fresh one if the lane brings a binding."""
        slot, generation = lane.handle
        if not 0 <= slot < len(self._rows):
            raise FrameRefused(f"slot {slot} of {len(self._rows)}")
        standing = self._rows[slot]
        if lane.binding is None:
            if standing is None or standing.handle != lane.handle:
                now = "unbound" if standing is None else f"at generation {standing.handle.generation}"
                raise FrameRefused(f"stale handle: slot {slot} generation {generation}, but the slot is {now}")
            return standing
        if standing is not None and generation <= standing.handle.generation:
            raise FrameRefused(f"slot {slot} is at generation {standing.handle.generation}; bound with {generation}")
        return _Row(lane.handle, lane.binding, self._tokens.rules(lane.binding))

    def _check_pages(self, frame: Frame, rows: list[_Row]) -> None:
        taken: dict[PageId, RequestHandle] = {}
        robbed: dict[RequestHandle, RequestHandle] = {}
        for row in rows:
            if row.robbed_by is not None and row.progress.ended is None:
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
            if row.handle in robbed and row.progress.ended is None:
                raise PageConflict(f"fence {frame.fence}: {row.handle} is served as {robbed[row.handle]} takes a page")

    def _bind(self, row: _Row) -> None:
        for page in row.binding.pages:
            owner = self._owners.get(page)
            if owner is not None:
                standing = self._rows[owner.slot]
                if standing is not None and standing.handle == owner:
                    standing.robbed_by = row.handle
            self._owners[page] = row.handle
        self._rows[row.handle.slot] = row

    def _step(self, kind: GraphKind, lane: LaneInput, row: _Row) -> tuple[Progress, LaneResult]:
        match kind:
            case GraphKind.DECODE:
                return self._decode(lane, row)
            case GraphKind.PREFILL:
                return self._prefill(lane, row, scored=False)
            case GraphKind.SCORED_PREFILL:
                return self._prefill(lane, row, scored=True)

    def _prefill(self, lane: LaneInput, row: _Row, *, scored: bool) -> tuple[Progress, LaneResult]:
        before, tokens = row.progress, lane.tokens
        if tokens is None or len(tokens) == 0:
            raise FrameRefused(f"prefill of {lane.handle} without tokens")
        if before.prompt_done:
            raise FrameRefused(f"prefill of {lane.handle}, whose prompt is complete")
        if lane.start != before.consumed:
            raise FrameRefused(f"prefill of {lane.handle} from {lane.start}, but the row stands at {before.consumed}")
        if lane.emits and lane.target is not None:
            raise FrameRefused(f"prefill of {lane.handle} emits, yet names a target beyond the prompt's end")
        end = lane.start + len(tokens)
        self._check_room(row, end)
        prompt_hash = (before.prompt_hash + hash_tokens(tokens, lane.start)) & _MASK
        prompt_done = lane.emits or (scored and lane.target is None)
        progress = Progress(end, prompt_hash, prompt_done)
        prompt_scores = self._prompt_scores(lane, row) if scored else None
        if lane.emits:
            return self._emit(row, progress, lane.history, prompt_scores)
        return progress, LaneResult(lane.handle, end, prompt_scores=prompt_scores)

    def _decode(self, lane: LaneInput, row: _Row) -> tuple[Progress, LaneResult]:
        before = row.progress
        if lane.tokens is not None:
            raise FrameRefused(f"decode of {lane.handle} with prompt tokens")
        if not before.prompt_done:
            raise FrameRefused(f"decode of {lane.handle} before its prompt is complete")
        if before.ended is None and before.outputs == 0:
            raise FrameRefused(f"decode of {lane.handle}, which has no pending token")
        if before.ended is not None:
            return before, LaneResult(lane.handle, before.consumed + before.outputs)
        self._check_room(row, before.consumed + before.outputs)
        return self._emit(row, before, lane.history, None)

    def _check_room(self, row: _Row, end: int) -> None:
        room = len(row.binding.pages) * self._page_tokens
        if end > room:
            raise FrameRefused(f"{row.handle} would write position {end - 1}; its pages hold {room} tokens")

    def _emit(
        self, row: _Row, before: Progress, history: History | None, prompt_scores: tuple[TokenScore, ...] | None
    ) -> tuple[Progress, LaneResult]:
        """Draw the next output token of a row whose prompt is complete."""
        binding, outputs = row.binding, before.outputs + 1
        if outputs > binding.output_limit:
            raise FrameRefused(f"{row.handle} may produce {binding.output_limit} tokens")
        if row.rules.uses_counts and (history is None or int(history.output_counts.sum()) != before.outputs):
            raise FrameRefused(f"{row.handle} has penalties and {before.outputs} outputs; its history does not say so")
        banned = frozenset(history.banned) if history is not None else _NONE
        token = self._tokens.draw(row.rules, before.prompt_hash, before.consumed, before.outputs, banned)
        if token is None:
            raise FrameRefused(f"every token is forbidden to {row.handle}")
        ended = None
        if token in binding.stop_tokens:
            ended = EndReason.STOP
        elif outputs == binding.output_limit:
            ended = EndReason.LENGTH
        scores = None
        if binding.logprobs is not None:
            scores = (self._tokens.score(token, before.consumed + before.outputs, binding.logprobs),)
        progress = Progress(before.consumed, before.prompt_hash, True, outputs, ended)
        committed = before.consumed + outputs
        return progress, LaneResult(row.handle, committed, (token,), ended, scores, prompt_scores)

    def _prompt_scores(self, lane: LaneInput, row: _Row) -> tuple[TokenScore, ...]:
        alternatives = row.binding.prompt_logprobs
        if alternatives is None or lane.tokens is None:
            raise FrameRefused(f"scored prefill of {lane.handle}, whose binding asks for no prompt log-probabilities")
        scored = [int(token) for token in lane.tokens[1:]]
        if lane.target is not None:
            scored.append(lane.target)
        return tuple(
            self._tokens.score(token, lane.start + 1 + index, alternatives) for index, token in enumerate(scored)
        )
