"""Between frames and buffers.

Owns the checks of a frame, and writing it to the step buffers and state rows. Does not run anything; `frame_results`
reads what came of it. Surprising rule: everything is checked before anything is written, so that a bad frame leaves no
trace.
"""

from __future__ import annotations

from flare.machines.graph import GraphShape, Source

from ..frames import Frame, History, LaneInput, LaneResult
from ..memory.pages import PAGE_TOKENS
from .buffers import NO_LANE, StepBuffers
from .extents import decodes, prompt_lanes
from .frame_results import FrameResults, LaneState, arrays, query_length
from .rows import NO_TOKEN, RUNNING, StateRows, check_binding


class FrameIo:
    """Writes frames and reads results for one set of rows and buffers of a model with `vocab` tokens."""

    def __init__(self, rows: StateRows, buffers: StepBuffers, pages: int, vocab: int) -> None:
        self._rows = rows
        self._row = arrays(rows)
        self._buffer = arrays(buffers)
        self._results = FrameResults(buffers)
        self._pages = pages
        self._vocab = vocab

    def check(self, frame: Frame) -> None:
        """Raise ValueError, naming the field, if the frame cannot run as it is."""
        shape, where = frame.shape, f"frame {frame.fence}"
        if not 1 <= len(frame.lanes) <= shape.batch:
            raise ValueError(f"{where}: {len(frame.lanes)} lanes for the {shape.batch} rows of {shape.name}")
        if len({lane.handle.slot for lane in frame.lanes}) != len(frame.lanes):
            raise ValueError(f"{where}: two lanes name the same slot")
        for lane in frame.lanes:
            self._check_lane(frame, lane)
        prompts = [len(lane.tokens) for lane in frame.lanes if lane.tokens is not None]
        if len(prompts) > prompt_lanes(shape):
            raise ValueError(
                f"{where}: {len(prompts)} prompts for the {prompt_lanes(shape)} prompt rows of {shape.name}"
            )
        targets = sum(lane.width for lane in frame.lanes if lane.tokens is None)
        if shape.packed_targets and targets > shape.packed_targets and not frame.allocates:
            raise ValueError(f"{where}: {targets} targets for the {shape.packed_targets} of {shape.name}")
        if sum(prompts) > shape.prefill_tokens:
            raise ValueError(f"{where}: {sum(prompts)} tokens for the {shape.prefill_tokens} of {shape.name}")

    def write(self, frame: Frame) -> None:
        """Bind fresh rows and fill the input buffers. The frame has been checked."""
        buffer, first = self._buffer, 0
        prompts = [index for index, lane in enumerate(frame.lanes) if lane.tokens is not None]
        buffer.prefill_row[:] = NO_LANE
        buffer.prefill_row[: len(prompts)] = prompts
        for index, lane in enumerate(frame.lanes):
            if lane.binding is not None:
                self._rows.bind(lane.handle.slot, lane.handle.generation, lane.binding)
            buffer.slot[index] = lane.handle.slot
            buffer.start[index] = lane.start
            buffer.emits[index] = lane.emits
            buffer.rows[index] = query_length(lane)
            self._write_history(index, lane)
            end = first + query_length(lane)
            if lane.tokens is not None:
                buffer.tokens[first:end] = lane.tokens
                buffer.targets[first : end - 1] = lane.tokens[1:]
                buffer.targets[end - 1] = -1 if lane.target is None else lane.target
            elif lane.proposals is not None:
                buffer.tokens[first + 1 : end] = lane.proposals
            first = end

    def read(self, frame: Frame, *, survival: bool = False) -> tuple[LaneResult, ...]:
        """The results of the frame that has just run over these rows; see `FrameResults.read`."""
        row, slots = self._row, [lane.handle.slot for lane in frame.lanes]
        columns = (row.committed, row.ended, row.logprobs, row.prompt_logprobs)
        states = [LaneState(*(int(column[slot]) for column in columns)) for slot in slots]
        return self._results.read(frame, states, survival=survival)

    def _check_lane(self, frame: Frame, lane: LaneInput) -> None:
        slot, row = lane.handle.slot, self._row
        where = f"frame {frame.fence}, slot {slot}"
        if not 0 <= slot < len(row.ended):
            raise ValueError(f"{where}: slot is outside [0, {len(row.ended)})")
        if lane.binding is not None:
            check_binding(lane.binding, self._pages, row.page_table.shape[1], self._vocab)
            pages = len(lane.binding.pages)
        else:
            pages = int(row.page_count[slot])
            if row.generation[slot] != lane.handle.generation:
                raise ValueError(f"{where}: generation {lane.handle.generation} was never bound")
        if lane.stage is not None:
            raise ValueError(f"{where}: stage is for state graphs")
        if lane.tokens is None:
            self._check_decode(where, frame.shape, lane, pages)
        else:
            self._check_tokens(where, frame.shape, lane, pages)
        if lane.history is not None:
            self._check_history(where, lane.history)

    def _check_history(self, where: str, history: History) -> None:
        """Ids index the logits unchecked in the program, so that they are checked here."""
        seen, banned = history.token_ids, history.banned
        if len(seen) > self._buffer.history_tokens.shape[1]:
            raise ValueError(f"{where}: history has {len(seen)} tokens; more than a context holds")
        if len(history.output_counts) != len(seen):
            raise ValueError(f"{where}: history has {len(seen)} tokens and {len(history.output_counts)} counts")
        if len(banned) > self._buffer.banned.shape[1]:
            raise ValueError(f"{where}: history.banned has {len(banned)} tokens; too many")
        if len(seen) and not 0 <= int(seen.min()) <= int(seen.max()) < self._vocab:
            raise ValueError(f"{where}: history.token_ids must be in [0, {self._vocab})")
        if any(not 0 <= token < self._vocab for token in banned):
            raise ValueError(f"{where}: history.banned must be in [0, {self._vocab})")

    def _check_decode(self, where: str, shape: GraphShape, lane: LaneInput, pages: int) -> None:
        row, slot = self._row, lane.handle.slot
        if not decodes(shape):
            raise ValueError(f"{where}: tokens are expected by {shape.name}")
        given = -1 if lane.proposals is None else len(lane.proposals)
        most = min(shape.width, shape.draft_depth + 1)
        if not 1 <= lane.width <= most:
            raise ValueError(f"{where}: width is {lane.width}; {shape.name} verifies 1 to {most} positions")
        if (lane.width - 1 if shape.source is Source.COPY and lane.width > 1 else -1) != given:
            raise ValueError(f"{where}: {max(given, 0)} proposals for a width of {lane.width} in {shape.name}")
        if lane.proposals is not None and not 0 <= lane.proposals.min() <= lane.proposals.max() < self._vocab:
            raise ValueError(f"{where}: proposals must be in [0, {self._vocab})")
        if lane.binding is not None or row.pending[slot] == NO_TOKEN:
            raise ValueError(f"{where}: no token is pending; its prompt is not complete")
        if row.ended[slot] != RUNNING:
            return
        if lane.width > max(1, row.remaining[slot]):
            raise ValueError(f"{where}: width is {lane.width}; the row may draw {row.remaining[slot]} more tokens")
        end = row.committed[slot] + lane.width - 1
        if end > pages * PAGE_TOKENS:
            raise ValueError(f"{where}: pages hold {pages * PAGE_TOKENS} tokens; position {end} has none")

    def _check_tokens(self, where: str, shape: GraphShape, lane: LaneInput, pages: int) -> None:
        tokens = lane.tokens
        assert tokens is not None
        if not prompt_lanes(shape):
            raise ValueError(f"{where}: tokens are not expected by {shape.name}")
        if len(tokens) == 0:
            raise ValueError(f"{where}: tokens must not be empty")
        fresh, slot = lane.binding is not None, lane.handle.slot
        if lane.start != (0 if fresh else self._row.committed[slot]):
            raise ValueError(f"{where}: start is {lane.start}; the row stands elsewhere")
        if not fresh and self._row.pending[slot] != NO_TOKEN:
            raise ValueError(f"{where}: tokens follow a prompt that is complete")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab:
            raise ValueError(f"{where}: tokens must be in [0, {self._vocab})")
        if lane.target is not None and not 0 <= lane.target < self._vocab:
            raise ValueError(f"{where}: target must be in [0, {self._vocab})")
        if lane.start + len(tokens) > pages * PAGE_TOKENS:
            raise ValueError(f"{where}: pages hold {pages * PAGE_TOKENS} tokens; {lane.start + len(tokens)} are needed")

    def _write_history(self, index: int, lane: LaneInput) -> None:
        buffer, history = self._buffer, lane.history
        seen = 0 if history is None else len(history.token_ids)
        banned = () if history is None else history.banned
        buffer.seen[index] = seen
        buffer.banned_count[index] = len(banned)
        buffer.banned_rows[index] = 0 if history is None else history.banned_for
        if history is not None and seen:
            buffer.history_tokens[index, :seen] = history.token_ids
            buffer.history_counts[index, :seen] = history.output_counts
        if banned:
            buffer.banned[index, : len(banned)] = banned
