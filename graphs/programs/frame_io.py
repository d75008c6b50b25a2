"""Between frames and buffers.

Owns the checks of a frame, writing it to the step buffers and state rows, and reading its results. Does not run
anything. Surprising rule: everything is checked before anything is written, so that a bad frame leaves no trace.
"""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.request import EndReason

from ..frames import Frame, History, LaneInput, LaneResult, TokenScore
from ..memory.pages import PAGE_TOKENS
from .buffers import NO_LANE, StepBuffers
from .extents import decodes, prompt_lanes
from .rows import ENDED_LENGTH, ENDED_STOP, NO_TOKEN, NOT_FINITE, RUNNING, StateRows, check_binding

_ENDED = {RUNNING: None, ENDED_STOP: EndReason.STOP, ENDED_LENGTH: EndReason.LENGTH}


class FrameIo:
    """Writes frames and reads results for one set of rows and buffers of a model with `vocab` tokens."""

    def __init__(self, rows: StateRows, buffers: StepBuffers, pages: int, vocab: int) -> None:
        self._rows = rows
        self._row = _arrays(rows)
        self._buffer = _arrays(buffers)
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
            buffer.rows[index] = _query_length(lane)
            self._write_history(index, lane)
            end = first + _query_length(lane)
            if lane.tokens is not None:
                buffer.tokens[first:end] = lane.tokens
                buffer.targets[first : end - 1] = lane.tokens[1:]
                buffer.targets[end - 1] = -1 if lane.target is None else lane.target
            elif lane.proposals is not None:
                buffer.tokens[first + 1 : end] = lane.proposals
            first = end

    def read(self, frame: Frame, *, survival: bool = False) -> tuple[LaneResult, ...]:
        """The results of the frame that has just run, with the `survival` of what it verified if it drew by rejection.
        Raises FloatingPointError if the model gave no numbers."""
        scored = frame.shape.kind is GraphKind.SCORED_PREFILL
        buffer, results, first = self._buffer, [], 0
        for index, lane in enumerate(frame.lanes):
            slot, count, verified = lane.handle.slot, int(buffer.count[index]), int(buffer.verified[index])
            if buffer.token[index, 0] == NOT_FINITE:
                raise _not_finite(frame, slot)
            alternatives = int(self._row.logprobs[slot]) if count else -1
            result = LaneResult(
                handle=lane.handle,
                committed=int(self._row.committed[slot]),
                tokens=tuple(buffer.token[index, :count].tolist()),
                ended=_ENDED[int(self._row.ended[slot])] if count else None,
                scores=self._scores(index, count, alternatives) if alternatives >= 0 else None,
                prompt_scores=self._prompt_scores(slot, first, lane) if scored else None,
                verified=verified,
                survival=tuple(buffer.survival[index, : verified - 1].tolist()) if survival and verified > 1 else None,
            )
            if any(math.isnan(score.logprob) for score in result.prompt_scores or ()):
                raise _not_finite(frame, slot)
            results.append(result)
            first += _query_length(lane)
        return tuple(results)

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
        if not 1 <= lane.width <= (most := min(shape.width, shape.draft_depth + 1)):
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

    def _scores(self, index: int, count: int, alternatives: int) -> tuple[TokenScore, ...]:
        buffer = self._buffer
        tops = buffer.top_tokens[index, :count, :alternatives], buffer.top_logprobs[index, :count, :alternatives]
        return tuple([_token_score(*each) for each in zip(buffer.logprob[index, :count], *tops, strict=True)])

    def _prompt_scores(self, slot: int, first: int, lane: LaneInput) -> tuple[TokenScore, ...]:
        """Scores of the chunk's targets; the last row of a prompt has none."""
        assert lane.tokens is not None
        buffer = self._buffer
        alternatives = max(int(self._row.prompt_logprobs[slot]), 0)
        end = first + len(lane.tokens) - (lane.target is None)
        return tuple(
            _token_score(
                buffer.row_logprob[row],
                buffer.row_top_tokens[row, :alternatives],
                buffer.row_top_logprobs[row, :alternatives],
            )
            for row in range(first, end)
        )


def _arrays(record: StateRows | StepBuffers) -> SimpleNamespace:
    """The memory of a record's tensors as NumPy arrays, whose single elements are far cheaper to reach."""
    return SimpleNamespace(**{field.name: getattr(record, field.name).numpy() for field in fields(record)})


def _query_length(lane: LaneInput) -> int:
    """Packed rows of a lane: its prompt tokens, or its pending token and the proposals behind it."""
    return lane.width if lane.tokens is None else len(lane.tokens)


def _not_finite(frame: Frame, slot: int) -> FloatingPointError:
    return FloatingPointError(f"frame {frame.fence}, slot {slot}: the model's logits are not finite; is it damaged?")


def _token_score(logprob: np.float32, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> TokenScore:
    return TokenScore(float(logprob), tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True)))
