"""What the host knows of the card's state rows when a frame is submitted.

Owns copies of the columns that frames are checked against: of rows that the card alone advances, while frames are on
their way. Does not own the checks. Surprising rule: a decoding row stands here as if every frame on its way gave it all
that it may, so that no later frame reaches beyond the row's pages whatever comes of them; once a frame has ended, what
it did not give is taken back. All methods belong to the thread that submits, but `told` and `failed`, which only leave
a note for it.

A row that was in a failed frame is not known any more, and its request is over. Frames that were planned before its
host heard of that still name it; they run without it, so that they give to all others what is theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flare.machines.ids import RequestHandle

from ..frames import Frame, LaneInput
from ..programs.frame_results import LaneState
from ..programs.rows import RUNNING, StateRows

SOME_TOKEN = 0
"""In `pending`: a token that the card knows."""


class Assumed(NamedTuple):
    """What a lane was assumed to draw (`tokens`), and the alternatives asked of its row."""

    handle: RequestHandle
    tokens: int
    logprobs: int
    prompt_logprobs: int


class _Told(NamedTuple):
    """What a lane drew in place of what was assumed, and whether its row ended."""

    lane: Assumed
    tokens: int
    ended: int


class Mirror:
    """The rows of `request_slots` slots. `rows` is what frames are checked against, and bindings are written to."""

    def __init__(self, request_slots: int, max_model_len: int) -> None:
        self.rows = StateRows.allocate(request_slots, max_model_len)
        rows = self.rows
        self._generation, self._ended, self._pending = rows.generation.numpy(), rows.ended.numpy(), rows.pending.numpy()
        self._committed, self._remaining = rows.committed.numpy(), rows.remaining.numpy()
        self._logprobs, self._prompt_logprobs = rows.logprobs.numpy(), rows.prompt_logprobs.numpy()
        self._notes: deque[_Told | RequestHandle] = deque()
        self._failed: set[RequestHandle] = set()

    def settle(self) -> None:
        """Work off what has become known of frames that have ended."""
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, RequestHandle):
                self._failed.add(note)
                continue
            slot, generation = note.lane.handle
            if self._generation[slot] == generation:
                missing = note.lane.tokens - note.tokens
                self._committed[slot] -= missing
                self._remaining[slot] += missing
                if note.ended != RUNNING:
                    self._ended[slot] = note.ended

    def living(self, frame: Frame) -> Frame:
        """The frame without the rows that were in a failed one."""
        if not self._failed:
            return frame
        lanes = tuple([lane for lane in frame.lanes if lane.handle not in self._failed])
        return replace(frame, lanes=lanes) if len(lanes) < len(frame.lanes) else frame

    def assume(self, frame: Frame) -> list[Assumed]:
        """Advance the rows as far as a frame may, which has been checked and whose rows are bound."""
        return [self._assume(lane) for lane in frame.lanes]

    def told(self, assumed: Sequence[Assumed], drawn: Sequence[int], states: Sequence[LaneState]) -> None:
        """What a frame gave. From any thread."""
        self._notes.extend(
            _Told(lane, tokens, state.ended) for lane, tokens, state in zip(assumed, drawn, states, strict=True)
        )

    def failed(self, frame: Frame) -> None:
        """A frame has failed, and what it did to its rows is not known. From any thread."""
        self._notes.extend(lane.handle for lane in frame.lanes)

    def _assume(self, lane: LaneInput) -> Assumed:
        slot = lane.handle.slot
        if lane.binding is not None and self._failed:
            self._failed = {handle for handle in self._failed if handle.slot != slot}
        if lane.tokens is not None:
            self._committed[slot] = lane.start + len(lane.tokens)
            most = int(lane.emits)
            if lane.emits:
                self._pending[slot] = SOME_TOKEN
        else:
            most = lane.width if self._ended[slot] == RUNNING else 0
        tokens = min(most, max(0, int(self._remaining[slot])))
        self._committed[slot] += tokens
        self._remaining[slot] -= tokens
        return Assumed(lane.handle, tokens, int(self._logprobs[slot]), int(self._prompt_logprobs[slot]))
