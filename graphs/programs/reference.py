"""The step in plain torch: correct on any machine, and what faster programs are compared with.

Owns the order of a step: forward, projection, scores, draw, advance. Surprising rule: prompt rows are scored in
bounded blocks, since the logits of a whole chunk would be larger than the model.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from ..memory.pages import PAGE_TOKENS, KvPages
from .buffers import StepBuffers
from .decoder import Decoder, Span
from .rows import ENDED_LENGTH, ENDED_STOP, NO_TOKEN, NOT_FINITE, RUNNING, StateRows
from .sampling import sample, score

SCORED_BLOCK = 16


class _Run(NamedTuple):
    """The rows that one lane runs: int32[n] `tokens` at positions from `start`, and whether a token is drawn."""

    lane: int
    tokens: torch.Tensor
    start: int
    draws: bool


class ReferenceStep:
    """A `StepProgram` over a torch decoder."""

    def __init__(self, decoder: Decoder, rows: StateRows, buffers: StepBuffers, kv: KvPages) -> None:
        self.decoder = decoder
        self.rows = rows
        self.buffers = buffers
        self.kv = kv

    @torch.inference_mode()
    def step(self, lanes: int, scored: bool) -> int:
        """See `StepProgram.step`."""
        began = time.perf_counter_ns()
        self.buffers.token[:lanes] = NO_TOKEN
        runs = self._runs(lanes)
        if runs:
            spans, drawn, first = [], {}, 0
            for run in runs:
                slot, rows = int(self.buffers.slot[run.lane]), len(run.tokens)
                pages = self.rows.page_table[slot, : (run.start + rows - 1) // PAGE_TOKENS + 1].long()
                spans.append(Span(first, rows, run.start, pages))
                self.rows.committed[slot] = run.start + rows
                first += rows
                if run.draws:
                    drawn[run.lane] = first - 1
            hidden = self.decoder.forward(torch.cat([run.tokens for run in runs]).long(), spans, self.kv)
            if scored:
                self._score(spans, hidden)
            if drawn:
                self._draw(list(drawn), hidden[list(drawn.values())])
        return time.perf_counter_ns() - began

    def close(self) -> None:
        """Nothing to give back."""

    def _runs(self, lanes: int) -> list[_Run]:
        """What runs: the rows of every prompt lane, and the pending token of every other that has not ended."""
        buffers, rows, runs, packed = self.buffers, self.rows, [], 0
        prompts = set(buffers.prefill_row.tolist())
        for lane in range(lanes):
            slot, length = int(buffers.slot[lane]), int(buffers.rows[lane])
            if lane in prompts:
                tokens = buffers.tokens[packed : packed + length]
                runs.append(_Run(lane, tokens, int(buffers.start[lane]), bool(buffers.emits[lane])))
            elif rows.ended[slot] == RUNNING:
                runs.append(_Run(lane, rows.pending[slot : slot + 1], int(rows.committed[slot]) - 1, True))
            packed += length
        return runs

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
        """Score the targets of all rows, `SCORED_BLOCK` rows of logits at a time; every lane is a prompt."""
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
