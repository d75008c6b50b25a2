"""The step in plain torch: correct on any machine, and what faster programs are compared with.

Owns the order of a step: forward, projection, scores, draw, advance. Surprising rule: prompt rows are scored in
bounded blocks, since the logits of a whole chunk would be larger than the model.
"""

from __future__ import annotations

import time

import torch

from ..memory.pages import PAGE_TOKENS, KvPages
from .buffers import NO_TOKEN, NOT_FINITE, StepBuffers
from .decoder import Decoder, Span
from .rows import ENDED_LENGTH, ENDED_STOP, RUNNING, StateRows
from .sampling import sample, score

SCORED_BLOCK = 16


class ReferenceStep:
    """A `StepProgram` over a torch decoder."""

    def __init__(self, decoder: Decoder, rows: StateRows, buffers: StepBuffers, kv: KvPages) -> None:
        self.decoder = decoder
        self.rows = rows
        self.buffers = buffers
        self.kv = kv

    @torch.inference_mode()
    def decode(self, lanes: int) -> int:
        """See `StepProgram.decode`."""
        began = time.perf_counter_ns()
        self.buffers.token[:lanes] = NO_TOKEN
        slots = self.buffers.slot[:lanes].tolist()
        active = [lane for lane, slot in enumerate(slots) if self.rows.ended[slot] == RUNNING]
        if active:
            spans = [
                self._span(i, 1, slots[lane], int(self.rows.committed[slots[lane]]) - 1)
                for i, lane in enumerate(active)
            ]
            tokens = torch.stack([self.rows.pending[slots[lane]] for lane in active]).long()
            hidden = self.decoder.forward(tokens, spans, self.kv)
            self._draw(active, hidden)
        return time.perf_counter_ns() - began

    @torch.inference_mode()
    def prefill(self, lanes: int, scored: bool) -> int:
        """See `StepProgram.prefill`."""
        began = time.perf_counter_ns()
        buffers, first = self.buffers, 0
        buffers.token[:lanes] = NO_TOKEN
        spans = []
        for lane in range(lanes):
            span = self._span(first, int(buffers.rows[lane]), int(buffers.slot[lane]), int(buffers.start[lane]))
            spans.append(span)
            first += span.rows
        hidden = self.decoder.forward(buffers.tokens[:first].long(), spans, self.kv)
        if scored:
            self._score(spans, hidden)
        emitting = []
        for lane, span in enumerate(spans):
            self.rows.committed[int(buffers.slot[lane])] = span.start + span.rows
            if buffers.emits[lane]:
                emitting.append(lane)
        if emitting:
            self._draw(emitting, hidden[[spans[lane].first + spans[lane].rows - 1 for lane in emitting]])
        return time.perf_counter_ns() - began

    def close(self) -> None:
        """Nothing to give back."""

    def _span(self, first: int, rows: int, slot: int, start: int) -> Span:
        return Span(first, rows, start, self.rows.page_table[slot, : (start + rows - 1) // PAGE_TOKENS + 1].long())

    def _draw(self, lanes: list[int], hidden: torch.Tensor) -> None:
        """Draw a token for each lane from its row of hidden states, and advance its state row."""
        rows, buffers = self.rows, self.buffers
        logits = self.decoder.logits(hidden)
        for index, lane in enumerate(lanes):
            slot = int(buffers.slot[lane])
            if not logits[index].isfinite().all():
                buffers.token[lane] = NOT_FINITE
                continue
            token = sample(logits[index], rows, buffers, lane)
            buffers.token[lane] = token
            wanted = int(rows.logprobs[slot])
            if wanted >= 0:
                scores = score(logits[index], token, wanted)
                buffers.logprob[lane] = scores.logprob
                buffers.top_tokens[lane, : len(scores.top_tokens)] = scores.top_tokens
                buffers.top_logprobs[lane, : len(scores.top_tokens)] = scores.top_logprobs
            rows.pending[slot] = token
            rows.committed[slot] += 1
            rows.remaining[slot] -= 1
            if token in rows.stop_tokens[slot, : int(rows.stop_count[slot])].tolist():
                rows.ended[slot] = ENDED_STOP
            elif rows.remaining[slot] <= 0:
                rows.ended[slot] = ENDED_LENGTH

    def _score(self, spans: list[Span], hidden: torch.Tensor) -> None:
        """Score the targets of all prompt rows, `SCORED_BLOCK` rows of logits at a time."""
        buffers = self.buffers
        wanted = [
            int(self.rows.prompt_logprobs[int(buffers.slot[lane])])
            for lane, span in enumerate(spans)
            for _ in range(span.rows)
        ]
        for first in range(0, len(hidden), SCORED_BLOCK):
            logits = self.decoder.logits(hidden[first : first + SCORED_BLOCK])
            for offset in range(len(logits)):
                row = first + offset
                target = int(buffers.targets[row])
                if target < 0:
                    continue
                scores = score(logits[offset], target, max(wanted[row], 0))
                buffers.row_logprob[row] = scores.logprob
                buffers.row_top_tokens[row, : len(scores.top_tokens)] = scores.top_tokens
                buffers.row_top_logprobs[row, : len(scores.top_tokens)] = scores.top_logprobs
