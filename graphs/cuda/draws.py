"""Which rows of a pass are drawn for, and what their results are written to.

Owns the places: W of each lane, of which a prompt has the first, for its last row. Does not own how a token is drawn
(`sampling`) or what becomes of it (`advance`). Surprising rule: logits exist in blocks only; those of all places at
once would be larger than the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..programs.buffers import StepBuffers
from ..programs.rows import NO_TOKEN, NOT_FINITE, StateRows
from .forward import Forward
from .lanes import Lanes
from .sampling import Draws, Sampler, score
from .spans import Packing

DrawnFrom = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Of int64[n] lanes and places, and so many tokens: what their proposals were drawn from, float32[n, tokens]."""


class Drawing:
    """Draws from a decoder's hidden states, for the rows and buffers of a step."""

    def __init__(self, forward: Forward, rows: StateRows, buffers: StepBuffers, *, rejects: bool) -> None:
        self._forward = forward
        self._buffers = buffers
        self._rejects = rejects
        self._sampler = Sampler(rows, buffers, rejects=rejects)

    def draw(
        self,
        lanes: Lanes,
        packing: Packing,
        proposed: torch.Tensor,
        hidden: torch.Tensor,
        *,
        prompts: bool,
        drawn_from: DrawnFrom | None,
    ) -> torch.Tensor:
        """Draw for every place, with its scores: int64[L, W], NO_TOKEN where there is nothing to draw for.

        `proposed` int64[L, W] is -1 where nothing is. Without `prompts`, the rows of the pass are the draws: fewer than
        the places of a ragged graph.
        """
        buffers, (count, width) = self._buffers, proposed.shape
        place = torch.arange(width, device=hidden.device)
        every = torch.arange(count, device=hidden.device)[:, None]
        if prompts:
            row = packing.first[:, None] + torch.where(lanes.prompt[:, None], packing.length[:, None] - 1, place)
            hidden = hidden[row.clamp(min=0, max=len(hidden) - 1).flatten()]
            lane, at = every.expand(-1, width).flatten(), place.repeat(count)
            index = every * width + place
        else:
            lane, at = packing.lane, packing.offset.clamp(max=width - 1)
            index = (packing.first[:, None] + place).clamp(max=len(hidden) - 1)
        ahead = proposed[lane, : width - 1].clamp(min=0)
        draws = Draws(lane, lanes.slot[lane], at, lanes.committed[lane] + at, ahead)
        outputs = (buffers.logprob, buffers.top_tokens, buffers.top_logprobs)
        tokens, ratios, *scores = self._drawn(hidden, draws, proposed[lane, at], drawn_from)
        for output, value in zip(outputs, scores, strict=True):
            _leading(output[:count, :width], value[index])
        buffers.survival[:count, :width].copy_(ratios[index].cumprod(1))
        emits = (buffers.emits[:count] != 0)[:, None] & (place == 0)
        verifies = lanes.running[:, None] & (place < lanes.width[:, None])
        return torch.where(torch.where(lanes.prompt[:, None], emits, verifies), tokens[index], NO_TOKEN)

    def score_prompts(self, hidden: torch.Tensor) -> None:
        """Score the targets of all rows, each one's -1 or a token."""
        buffers = self._buffers
        outputs = (buffers.row_logprob, buffers.row_top_tokens, buffers.row_top_logprobs)
        for part in self._forward.blocks(len(hidden)):
            scores = score(self._forward.logits(hidden[part]), buffers.targets[part].long().clamp(min=0))
            for output, value in zip(outputs, scores, strict=True):
                _leading(output[part], value)

    def _drawn(
        self, hidden: torch.Tensor, draws: Draws, proposed: torch.Tensor, drawn_from: DrawnFrom | None
    ) -> list[torch.Tensor]:
        """Of all draws: tokens, how likely their proposals were to be accepted, and scores."""
        parts = []
        for part in self._forward.blocks(len(hidden)):
            of, logits = draws[part], self._forward.logits(hidden[part])
            finite = logits.isfinite().all(-1)
            logits = torch.where(finite[:, None], logits, 0.0)
            q = None
            if self._rejects and drawn_from is not None:
                q = drawn_from(of.lane, of.at, logits.shape[1])
            token, ratio = self._sampler.sample(logits, of, proposed[part], q)
            scores = score(logits, token)
            parts.append((torch.where(finite, token, NOT_FINITE), torch.where(finite, ratio, 0.0), *scores))
        return [torch.cat(each) for each in zip(*parts, strict=True)]


def _leading(to: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to as many of the last dimension's places as it has."""
    (to[..., : value.shape[-1]] if value.shape[-1:] != to.shape[-1:] else to).copy_(value)
