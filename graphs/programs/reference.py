"""The step in plain torch: correct on any machine, and what faster programs are compared with.

Owns the order of a step: proposals, forward, projection, scores, draws, advance. Surprising rule: prompt rows are
scored in bounded blocks, since the logits of a whole chunk would be larger than the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from flare.machines.allocation import allocate

from ..memory.pages import PAGE_TOKENS, KvPages
from .buffers import StepBuffers
from .decoder import Decoder, Span
from .drafting import Drafting, Lane
from .rows import ENDED_LENGTH, ENDED_STOP, NO_TOKEN, NOT_FINITE, RUNNING, StateRows
from .sampling import Proposal, judge, sample, score

SCORED_BLOCK = 16


class ReferenceStep:
    """A `StepProgram` over a torch decoder."""

    def __init__(
        self, decoder: Decoder, rows: StateRows, buffers: StepBuffers, kv: KvPages, drafting: Drafting | None = None
    ) -> None:
        self.decoder = decoder
        self.rows = rows
        self.buffers = buffers
        self.kv = kv
        self._drafting = drafting

    @torch.inference_mode()
    def step(
        self, lanes: int, scored: bool = False, depth: int = 0, target_rows: int = 0, rejects: bool = False
    ) -> int:
        """See `StepProgram.step`."""
        began = time.perf_counter_ns()
        buffers = self.buffers
        buffers.count[:lanes] = buffers.verified[:lanes] = 0
        buffers.token[:lanes, 0] = NO_TOKEN
        running = self._lanes(lanes, depth if self._drafting else 0)
        if self._drafting is not None:
            self._drafting.propose(running, rejects=rejects)
        if target_rows:
            self._allocate(running, target_rows)
        if running:
            residual = self._forward(running)
            hidden = self.decoder.normalized(residual)
            if scored:
                self._score(running, hidden)
            first = 0
            for lane in running:
                here = slice(first, first := first + lane.width)
                self._advance(lane, hidden[here], residual[here], rejects=rejects)
        return time.perf_counter_ns() - began

    def close(self) -> None:
        """Nothing to give back."""

    def _lanes(self, count: int, depth: int) -> list[Lane]:
        """What runs: the rows of every prompt lane, and of every other that has not ended."""
        buffers, rows, lanes, packed = self.buffers, self.rows, [], 0
        prompts = set(buffers.prefill_row.tolist())
        for index in range(count):
            slot, length = int(buffers.slot[index]), int(buffers.rows[index])
            tokens = buffers.tokens[packed : packed + length]
            if index in prompts:
                start = int(buffers.start[index])
                rows.committed[slot] = start + length
                lanes.append(Lane(index, slot, start, packed, length, tokens.long()))
            elif rows.ended[slot] == RUNNING:
                width = min(length, int(rows.remaining[slot]))
                if depth:
                    buffers.confidence[:, slot] = 0.0
                lane = Lane(index, slot, int(rows.committed[slot]) - 1, packed, width, depth=min(depth, width - 1))
                if not depth:
                    lane.proposals = [Proposal(token) for token in tokens[1:width].tolist()]
                lanes.append(lane)
            packed += length
        return lanes

    def _allocate(self, lanes: Sequence[Lane], target_rows: int) -> None:
        """Share out target rows by the joint probability of prefixes (docs/scheduling.md, "Confidence")."""
        open_lanes = sorted((lane for lane in lanes if lane.prompt is None), key=lambda lane: lane.slot)
        joint = [self.buffers.confidence[1, lane.slot, : lane.depth].tolist() for lane in open_lanes]
        widths = allocate(joint, [lane.depth + 1 for lane in open_lanes], target_rows)
        for lane, width in zip(open_lanes, widths, strict=True):
            lane.width = width

    def _forward(self, lanes: Sequence[Lane]) -> torch.Tensor:
        """The residual stream of all rows, float32[rows, hidden]."""
        tokens, spans, first = [], [], 0
        for lane in lanes:
            if lane.prompt is None:
                ahead = [proposal.token for proposal in lane.proposals[: lane.width - 1]]
                tokens.append(torch.tensor([int(self.rows.pending[lane.slot]), *ahead]))
            else:
                tokens.append(lane.prompt)
            pages = self.rows.page_table[lane.slot, : (lane.start + lane.width - 1) // PAGE_TOKENS + 1].long()
            spans.append(Span(first, lane.width, lane.start, pages))
            first += lane.width
        return self.decoder.residual(torch.cat(tokens), spans, self.kv)

    def _advance(self, lane: Lane, hidden: torch.Tensor, residual: torch.Tensor, *, rejects: bool) -> None:
        """Draw for a lane's rows, and advance its state row as far as its proposals were right."""
        buffers, rows, index = self.buffers, self.rows, lane.lane
        if lane.prompt is not None:
            if buffers.emits[index]:
                self._draw(lane, 0, hidden[-1:], [], rejects=False)
                buffers.count[index] = int(buffers.token[index, 0] >= 0)
                self._commit(lane.slot, buffers.token[index, :1].tolist())
            if self._drafting is not None:
                self._drafting.read_prompt(lane, residual)
            return
        pending, ahead = int(rows.pending[lane.slot]), [p.token for p in lane.proposals[: lane.width - 1]]
        for at in range(lane.width):
            self._draw(lane, at, hidden[at : at + 1], ahead[:at], rejects=rejects)
        tokens = buffers.token[index, : lane.width].tolist()
        count = 1
        for token, proposal in zip(tokens, ahead, strict=False):
            if token != proposal or self._stops(lane.slot, token):
                break
            count += 1
        drawn = tokens[:count]
        if NOT_FINITE in drawn:
            buffers.token[index, 0] = NOT_FINITE
            return
        buffers.survival[index, : lane.width] = buffers.survival[index, : lane.width].cumprod(0)
        buffers.count[index], buffers.verified[index] = len(drawn), lane.width
        self._commit(lane.slot, drawn)
        if self._drafting is not None:
            self._drafting.keep_round(lane, torch.tensor([pending, *ahead])[: len(drawn)], residual[: len(drawn)])

    def _draw(self, lane: Lane, at: int, hidden: torch.Tensor, ahead: Sequence[int], *, rejects: bool) -> None:
        """Draw and score the token that follows row `at` of a lane."""
        rows, buffers, index = self.rows, self.buffers, lane.lane
        logits = self.decoder.logits(hidden)[0]
        if not logits.isfinite().all():
            buffers.token[index, at], buffers.survival[index, at] = NOT_FINITE, 0.0
            return
        proposed = lane.prompt is None and at + 1 < lane.width
        if rejects and proposed:
            token, ratio = judge(logits, rows, buffers, index, ahead, lane.proposals[at])
        else:
            token = sample(logits, rows, buffers, index, ahead)
            ratio = float(proposed and token == lane.proposals[at].token)
        buffers.token[index, at], buffers.survival[index, at] = token, ratio
        wanted = int(rows.logprobs[lane.slot])
        if wanted >= 0:
            scores = score(logits, token, wanted)
            buffers.logprob[index, at] = scores.logprob
            buffers.top_tokens[index, at, : len(scores.top_tokens)] = scores.top_tokens
            buffers.top_logprobs[index, at, : len(scores.top_tokens)] = scores.top_logprobs

    def _commit(self, slot: int, tokens: Sequence[int]) -> None:
        rows = self.rows
        for token in tokens:
            if token < 0:
                return
            rows.pending[slot] = token
            rows.committed[slot] += 1
            rows.remaining[slot] -= 1
            if self._stops(slot, token):
                rows.ended[slot] = ENDED_STOP
            elif rows.remaining[slot] <= 0:
                rows.ended[slot] = ENDED_LENGTH

    def _stops(self, slot: int, token: int) -> bool:
        return token in self.rows.stop_tokens[slot, : int(self.rows.stop_count[slot])].tolist()

    def _score(self, lanes: Sequence[Lane], hidden: torch.Tensor) -> None:
        """Score the targets of all rows, `SCORED_BLOCK` rows of logits at a time; every lane is a prompt."""
        buffers = self.buffers
        wanted = [
            int(self.rows.prompt_logprobs[int(buffers.slot[lane.lane])]) for lane in lanes for _ in range(lane.width)
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
