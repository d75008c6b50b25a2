"""The draft on a card: what proposes within a step, and what it is told afterwards.

Owns the proposals of a round, and what is kept of each row between rounds. Does not own what is accepted. Surprising
rule: nothing waits for the draft. In `programs.drafting`, rounds that propose nothing leave what they committed to be
read later; here every program, at its end, has the draft read each token that has become known, and keeps the last
residual of that pass, from which the next round begins to propose. So the passes of a round are as many (the first is
made at the end of the round before), every graph has a fixed number of rows, and the proposals are the same; what it
costs is a pass of the draft, without its output projection, in the rounds that propose nothing.

A head reads the target's residual of a position with the token that follows it, a model that token alone, one position
later; else both are treated alike. Of a prompt, a model also reads the first token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models.draft import DraftModel
from ..programs.buffers import StepBuffers
from ..programs.rows import StateRows
from .forward import Forward
from .lanes import Lanes
from .sampling import propose
from .spans import Packing


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass of the target gave: the `residual` stream float32[R, hidden] of the rows of `packing`, at most
    `longest` of a lane; the `token` int64[L, W] drawn for each place, how many of them were committed (`count`
    int64[L]), and whether more may follow (`goes_on` bool[L])."""

    packing: Packing
    longest: int
    residual: torch.Tensor
    token: torch.Tensor
    count: torch.Tensor
    goes_on: torch.Tensor


class Drafting:
    """A decoder that drafts, over pages of its own, for the rows and buffers of a step."""

    def __init__(
        self, forward: Forward, draft: DraftModel, rows: StateRows, buffers: StepBuffers, *, rejects: bool
    ) -> None:
        device, config = rows.ended.device, forward.config
        self._forward = forward
        self._ahead = 0 if forward.reads_hidden else 1
        self._rows = rows
        self._buffers = buffers
        self._rejects = rejects
        self._kept = torch.arange(config.vocab, device=device) if draft.kept is None else draft.kept.long().to(device)
        self._nobody = len(rows.ended) - 1
        self.carried = torch.zeros(len(rows.ended), config.hidden, device=device)

    def propose(self, lanes: Lanes, steps: int, table: torch.Tensor) -> torch.Tensor:
        """Up to `steps` proposals of each lane, as its width allows, int64[L, steps]; notes their confidence."""
        forward, slot = self._forward, lanes.slot
        residual = self.carried[slot]
        proposals: list[torch.Tensor] = []
        conditional: list[torch.Tensor] = []
        for step in range(steps):
            wanted = lanes.running & (lanes.width - 1 > step)
            if step:
                spans = forward.spans(Packing.one_each(wanted), lanes.start + step - 1 + self._ahead, table, 1)
                residual = forward.residual(proposals[-1], spans, residual)
            token, likely = self._draw(forward.normalized(residual), slot, lanes.committed + step, step)
            proposals.append(token)
            conditional.append(torch.where(wanted, likely, 0.0))
        made, shown = torch.stack(proposals, dim=1), torch.stack(conditional, dim=1)
        self._note(lanes, made, torch.stack((shown, shown.cumprod(1))))
        return made

    def drawn_from(self, lane: torch.Tensor, at: torch.Tensor, vocab: int) -> torch.Tensor:
        """What proposals `at` int64[n] of lanes were drawn from, float32[n, vocab]; anything where there are none."""
        probabilities = self._buffers.draft_probabilities
        kept = probabilities[lane, at.clamp(max=probabilities.shape[1] - 1)]
        return torch.zeros(len(lane), vocab, device=kept.device).index_copy_(1, self._kept, kept)

    def read(self, lanes: Lanes, table: torch.Tensor, of: Pass, prompts: int) -> None:
        """Read what has become known by a pass of the target, up to `prompts` of whose lanes consumed a prompt.

        A decoding lane's rows are followed by what it committed, a prompt's by their targets, and the last row of a
        whole prompt by what was drawn. The last token of a row that has ended is not read: it may have no page.
        """
        buffers, packing, token = self._buffers, of.packing, of.token
        lane = packing.lane
        target = lanes.inputs(buffers.targets, lanes.packed[lane] + packing.offset)
        at = torch.where(lanes.prompt[lane], 0, packing.offset.clamp(max=token.shape[1] - 1))
        follows = torch.where(lanes.prompt[lane] & (target >= 0), target, token[lane, at])
        chunk_goes_on = lanes.inputs(buffers.targets, lanes.packed + lanes.width - 1) >= 0
        known = torch.where(lanes.prompt, lanes.width - 1 + (chunk_goes_on | of.goes_on), of.count - 1 + of.goes_on)
        known = torch.where(lanes.prompt | (of.count > 0), known, 0)
        begun = torch.where(lanes.prompt & (lanes.start == 0), self._ahead, 0)

        rows = Packing.of(known + begun, len(follows) + prompts * self._ahead)
        offset = rows.offset - begun[rows.lane]
        behind = (packing.first[rows.lane] + offset).clamp(min=0, max=len(follows) - 1)
        tokens = torch.where(offset < 0, lanes.inputs(buffers.tokens, lanes.packed[rows.lane]), follows[behind])
        spans = self._forward.spans(rows, lanes.start + self._ahead - begun, table, of.longest + self._ahead)
        out = self._forward.residual(torch.where(rows.live, tokens, 0), spans, of.residual[behind])
        last = (rows.first + rows.length - 1).clamp(min=0, max=len(out) - 1)
        self.carried.index_copy_(0, torch.where(rows.length > 0, lanes.slot, self._nobody), out[last])

    def _draw(
        self, hidden: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Proposal `step` of each lane, and its probability."""
        parts = []
        for part in self._forward.blocks(len(slot)):
            logits = self._forward.logits(hidden[part])
            token, likely, q = propose(
                logits, self._rows, slot[part], position[part], self._kept, rejects=self._rejects
            )
            if q is not None:
                self._buffers.draft_probabilities[part, step].copy_(q)
            parts.append((token, likely))
        tokens, likelihoods = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(likelihoods)

    def _note(self, lanes: Lanes, proposals: torch.Tensor, confidence: torch.Tensor) -> None:
        """Write proposals int64[L, steps], each behind the row of its lane's pending token, and their confidence
        float32[2, L, steps]."""
        buffers, steps = self._buffers, proposals.shape[1]
        row = torch.arange(len(buffers.tokens), device=proposals.device)
        lane = torch.searchsorted(lanes.packed, row, right=True) - 1
        offset = row - lanes.packed[lane]
        made = lanes.running[lane] & (offset > 0) & (offset < lanes.width[lane])
        token = proposals[lane, (offset - 1).clamp(min=0, max=steps - 1)]
        buffers.tokens.copy_(torch.where(made, token, buffers.tokens))
        at = torch.where(lanes.running, lanes.slot, self._nobody)
        buffers.confidence.index_fill_(1, at, 0.0)
        buffers.confidence[:, :, :steps].index_copy_(1, at, confidence)
