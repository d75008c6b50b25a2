"""Between frames and buffers.

Owns the checks of a frame, writing it to the step buffers and state rows, and reading its results. Does not run
anything. Surprising rule: everything is checked before anything is written, so that a bad frame leaves no trace.
"""

from __future__ import annotations

import torch

from flare.machines.graph import GraphKind

from ..frames import Ended, Frame, LaneInput, LaneResult, TokenScore
from ..memory.pages import PAGE_TOKENS
from .buffers import StepBuffers
from .rows import ENDED_LENGTH, ENDED_STOP, RUNNING, StateRows, check_binding

_ENDED = {RUNNING: None, ENDED_STOP: Ended.STOP, ENDED_LENGTH: Ended.LENGTH}


class FrameIo:
    """Writes frames and reads results for one set of rows and buffers of a model with `vocab` tokens."""

    def __init__(self, rows: StateRows, buffers: StepBuffers, pages: int, vocab: int) -> None:
        self._rows = rows
        self._buffers = buffers
        self._pages = pages
        self._vocab = vocab

    def check(self, frame: Frame) -> None:
        """Raise ValueError, naming the field, if the frame cannot run as it is."""
        shape = frame.shape
        if not 1 <= len(frame.lanes) <= shape.batch:
            raise ValueError(
                f"frame {frame.fence}: {len(frame.lanes)} lanes for the {shape.batch} rows of {shape.name}"
            )
        if len({lane.handle.slot for lane in frame.lanes}) != len(frame.lanes):
            raise ValueError(f"frame {frame.fence}: two lanes name the same slot")
        for lane in frame.lanes:
            self._check_lane(frame, lane)
        if shape.kind is not GraphKind.DECODE:
            tokens = sum(0 if lane.tokens is None else len(lane.tokens) for lane in frame.lanes)
            if tokens > shape.prefill_tokens:
                raise ValueError(f"frame {frame.fence}: {tokens} tokens for the {shape.prefill_tokens} of {shape.name}")

    def write(self, frame: Frame) -> None:
        """Bind fresh rows and fill the input buffers. The frame has been checked."""
        buffers, first = self._buffers, 0
        for index, lane in enumerate(frame.lanes):
            if lane.binding is not None:
                self._rows.bind(lane.handle.slot, lane.handle.generation, lane.binding)
            buffers.slot[index] = lane.handle.slot
            buffers.start[index] = lane.start
            buffers.emits[index] = lane.emits
            buffers.rows[index] = 0 if lane.tokens is None else len(lane.tokens)
            self._write_history(index, lane)
            if lane.tokens is not None:
                end = first + len(lane.tokens)
                buffers.tokens[first:end] = torch.from_numpy(lane.tokens)
                buffers.targets[first : end - 1] = buffers.tokens[first + 1 : end]
                buffers.targets[end - 1] = -1 if lane.target is None else lane.target
                first = end

    def read(self, frame: Frame) -> tuple[LaneResult, ...]:
        """The results of the frame that has just run."""
        scored = frame.shape.kind is GraphKind.SCORED_PREFILL
        results, first = [], 0
        for index, lane in enumerate(frame.lanes):
            slot = lane.handle.slot
            token = int(self._buffers.token[index])
            alternatives = int(self._rows.logprobs[slot])
            drawn = token >= 0
            results.append(
                LaneResult(
                    handle=lane.handle,
                    committed=int(self._rows.committed[slot]),
                    tokens=(token,) if drawn else (),
                    ended=_ENDED[int(self._rows.ended[slot])] if drawn else None,
                    scores=(self._score(index, alternatives),) if drawn and alternatives >= 0 else None,
                    prompt_scores=self._prompt_scores(slot, first, lane) if scored else None,
                )
            )
            first += 0 if lane.tokens is None else len(lane.tokens)
        return tuple(results)

    def _check_lane(self, frame: Frame, lane: LaneInput) -> None:
        slot, rows = lane.handle.slot, self._rows
        where = f"frame {frame.fence}, slot {slot}"
        if not 0 <= slot < len(rows.ended):
            raise ValueError(f"{where}: slot is outside [0, {len(rows.ended)})")
        if lane.binding is not None:
            check_binding(lane.binding, self._pages, rows.page_table.shape[1], self._vocab)
            pages = len(lane.binding.pages)
        else:
            pages = int(rows.page_count[slot])
            if int(rows.generation[slot]) != lane.handle.generation:
                raise ValueError(f"{where}: generation {lane.handle.generation} was never bound")
        decode = frame.shape.kind is GraphKind.DECODE
        if decode != (lane.tokens is None):
            raise ValueError(f"{where}: tokens are {'not ' if decode else ''}expected by {frame.shape.name}")
        if lane.tokens is not None:
            self._check_tokens(where, lane, pages)
        elif int(rows.ended[slot]) == RUNNING and int(rows.committed[slot]) > pages * PAGE_TOKENS:
            raise ValueError(
                f"{where}: pages hold {pages * PAGE_TOKENS} tokens; position {int(rows.committed[slot])} has none"
            )
        history = lane.history
        if history is not None and len(history.token_ids) > self._buffers.history_tokens.shape[1]:
            raise ValueError(f"{where}: history has {len(history.token_ids)} tokens; more than a context holds")
        if history is not None and len(history.banned) > self._buffers.banned.shape[1]:
            raise ValueError(f"{where}: history.banned has {len(history.banned)} tokens; too many")

    def _check_tokens(self, where: str, lane: LaneInput, pages: int) -> None:
        tokens = lane.tokens
        assert tokens is not None
        if len(tokens) == 0 or lane.start < 0:
            raise ValueError(f"{where}: tokens must not be empty, nor start negative")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab:
            raise ValueError(f"{where}: tokens must be in [0, {self._vocab})")
        if lane.target is not None and not 0 <= lane.target < self._vocab:
            raise ValueError(f"{where}: target must be in [0, {self._vocab})")
        if lane.start + len(tokens) > pages * PAGE_TOKENS:
            raise ValueError(f"{where}: pages hold {pages * PAGE_TOKENS} tokens; {lane.start + len(tokens)} are needed")

    def _write_history(self, index: int, lane: LaneInput) -> None:
        buffers, history = self._buffers, lane.history
        seen = 0 if history is None else len(history.token_ids)
        banned = () if history is None else history.banned
        buffers.seen[index] = seen
        buffers.banned_count[index] = len(banned)
        if history is not None and seen:
            buffers.history_tokens[index, :seen] = torch.from_numpy(history.token_ids)
            buffers.history_counts[index, :seen] = torch.from_numpy(history.output_counts)
        if banned:
            buffers.banned[index, : len(banned)] = torch.tensor(banned, dtype=torch.int32)

    def _score(self, index: int, alternatives: int) -> TokenScore:
        buffers = self._buffers
        return _token_score(
            buffers.logprob[index], buffers.top_tokens[index, :alternatives], buffers.top_logprobs[index, :alternatives]
        )

    def _prompt_scores(self, slot: int, first: int, lane: LaneInput) -> tuple[TokenScore, ...]:
        """Scores of the chunk's targets; the last row of a prompt has none."""
        assert lane.tokens is not None
        buffers = self._buffers
        alternatives = max(int(self._rows.prompt_logprobs[slot]), 0)
        end = first + len(lane.tokens) - (lane.target is None)
        return tuple(
            _token_score(
                buffers.row_logprob[row],
                buffers.row_top_tokens[row, :alternatives],
                buffers.row_top_logprobs[row, :alternatives],
            )
            for row in range(first, end)
        )


def _token_score(logprob: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> TokenScore:
    return TokenScore(float(logprob), tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True)))
