"""The draft in plain torch: what proposes within a step, and what it is told afterwards.

Owns the proposals of a round and what waits in the state rows for the draft to read. Does not own what is accepted.
Surprising rule: what was verified is read with the next proposals, or when a row has no room for more; the native
program does it in the same order (`graphs/cpu/native/draft.hpp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..memory.pages import PAGE_TOKENS, KvPages
from .buffers import StepBuffers
from .decoder import Decoder, Span
from .rows import WAITING_MAX, StateRows
from .sampling import Proposal, propose


@dataclass(slots=True)
class Lane:
    """One lane of a step: its first position `start`, its place `packed` in the inputs, its `width` in rows, the
    `depth` of the proposals that it makes, and the `proposals` that it verifies."""

    lane: int
    slot: int
    start: int
    packed: int
    width: int
    prompt: torch.Tensor | None = None
    depth: int = 0
    proposals: list[Proposal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of one lane that the draft reads: a head reads each `hidden` with its token."""

    slot: int
    start: int
    tokens: torch.Tensor
    hidden: torch.Tensor | None


class Drafting:
    """A decoder that drafts, with keys and values of its own. `kept`: the tokens of its output rows; None: all."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KvPages,
        rows: StateRows,
        buffers: StepBuffers,
        kept: torch.Tensor | None,
        vocab: int,
    ) -> None:
        self._decoder = decoder
        self._heads = decoder.fuse is not None
        self._kv = kv
        self._rows = rows
        self._buffers = buffers
        self._kept = kept
        self._vocab = vocab

    def propose(self, lanes: Sequence[Lane], *, rejects: bool) -> None:
        """Make each lane's proposals, and note their confidence."""
        proposing, reads = [], []
        for lane in lanes:
            full = int(self._rows.waiting[lane.slot]) + lane.width > WAITING_MAX
            if lane.prompt is not None or not (lane.depth or full):
                continue
            read = self._catch_up(lane)
            if read is None:
                lane.depth, lane.width = 0, 1  # its last round failed
                continue
            reads.append(read)
            if lane.depth:
                proposing.append((lane, len(reads) - 1))
        residuals = self._run(reads)
        chained = [(lane, residuals[index][-1]) for lane, index in proposing]
        step = 0
        while chained:
            for lane, residual in chained:
                self._draw(lane, step, residual, rejects=rejects)
            on = [(lane, residual) for lane, residual in chained if step + 1 < lane.depth]
            reads = [
                _Read(
                    lane.slot,
                    lane.start + step + (0 if self._heads else 1),
                    torch.tensor([lane.proposals[-1].token]),
                    residual[None] if self._heads else None,
                )
                for lane, residual in on
            ]
            chained = [(lane, out[-1]) for (lane, _), out in zip(on, self._run(reads), strict=True)]
            step += 1

    def read_prompt(self, lane: Lane, residual: torch.Tensor) -> None:
        """Read a prompt's chunk, whose residual stream float32[rows, hidden] the target has just given."""
        tokens, rows = lane.prompt, self._rows
        assert tokens is not None
        if not self._heads:
            self._run([_Read(lane.slot, lane.start, tokens, None)])
            rows.drafted[lane.slot] = lane.start + len(tokens)
            return
        waiting = int(rows.waiting[lane.slot])
        hidden = torch.cat((rows.waiting_hidden[lane.slot, :waiting], residual[:-1]))
        self._run([_Read(lane.slot, lane.start - waiting, tokens[1 - waiting :], hidden)])
        rows.drafted[lane.slot] = lane.start + len(tokens) - 1
        rows.waiting[lane.slot] = 0
        self._keep(lane.slot, tokens[-1:], residual[-1:])

    def keep_round(self, lane: Lane, tokens: torch.Tensor, residual: torch.Tensor) -> None:
        """Keep what a round committed: the first rows of the lane, int64[n] and float32[n, hidden]."""
        read = 0
        if not self._heads and lane.depth:  # the pending token and accepted proposals were read as they were proposed
            read = min(len(tokens), lane.depth)
            self._rows.drafted[lane.slot] = lane.start + read
        self._keep(lane.slot, tokens[read:], residual[read:])

    def _keep(self, slot: int, tokens: torch.Tensor, residual: torch.Tensor) -> None:
        rows = self._rows
        first = int(rows.waiting[slot])
        rows.waiting_tokens[slot, first : first + len(tokens)] = tokens.int()
        if self._heads:
            rows.waiting_hidden[slot, first : first + len(tokens)] = residual
        rows.waiting[slot] += len(tokens)

    def _catch_up(self, lane: Lane) -> _Read | None:
        """All that waits of a lane, and the token that it begins to propose from."""
        rows, slot = self._rows, lane.slot
        waiting, start = int(rows.waiting[slot]), int(rows.drafted[slot])
        tokens = torch.cat((rows.waiting_tokens[slot, :waiting], rows.pending[slot : slot + 1]))
        hidden = rows.waiting_hidden[slot, :waiting].clone() if self._heads else None
        if self._heads:
            tokens = tokens[1:]
        elif not lane.depth:
            tokens = tokens[:-1]
        rows.drafted[slot] += waiting
        rows.waiting[slot] = 0
        return _Read(slot, start, tokens, hidden) if len(tokens) else None

    def _run(self, reads: Sequence[_Read]) -> list[torch.Tensor]:
        """The residual streams of all reads, float32[rows, hidden] each."""
        if not any(len(read.tokens) for read in reads):
            return []
        spans, first = [], 0
        for read in reads:
            count = len(read.tokens)
            pages = self._rows.page_table[read.slot, : (read.start + count - 1) // PAGE_TOKENS + 1].long()
            spans.append(Span(first, count, read.start, pages))
            first += count
        hidden = torch.cat([read.hidden for read in reads if read.hidden is not None]) if self._heads else None
        out = self._decoder.residual(torch.cat([read.tokens for read in reads]).long(), spans, self._kv, hidden)
        return [out[span.first : span.first + span.rows] for span in spans]

    def _draw(self, lane: Lane, step: int, residual: torch.Tensor, *, rejects: bool) -> None:
        logits = self._decoder.logits(self._decoder.normalized(residual[None]))[0]
        proposal, likely = propose(logits, self._rows, lane.slot, step, self._kept, self._vocab, rejects=rejects)
        lane.proposals.append(proposal)
        self._buffers.tokens[lane.packed + step + 1] = proposal.token
        if (q := proposal.drawn_from) is not None:
            self._buffers.draft_probabilities[lane.lane, step] = q if self._kept is None else q[self._kept.long()]
        confidence = self._buffers.confidence[:, lane.slot]
        confidence[0, step] = likely
        confidence[1, step] = likely * (confidence[1, step - 1] if step else 1.0)
