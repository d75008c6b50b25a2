"""From logits to tokens, many rows at a time.

Owns what `programs.sampling` defines, over tensors of fixed shape: adjustments, cuts, draws, judgements and scores.
Does not own noise or state rows. Surprising rule: what a row does not ask for is computed like all else and has no
effect: no token banned, a bias of nothing, a cut below everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..programs.buffers import StepBuffers
from ..programs.rows import ALTERNATIVES_MAX, StateRows
from .noise import draw_keys, gumbel, uniform

_SEEN = 1 << 20
"""In a count of how often each token was given: it is in the history, or ahead."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What n draws are for, int64[n]: each one's `lane` and state row `slot`, how many proposals are taken as accepted
    before it (`at`), and the token `position` that is drawn; all `proposals` of its lane, int64[n, W - 1]."""

    lane: torch.Tensor
    slot: torch.Tensor
    at: torch.Tensor
    position: torch.Tensor
    proposals: torch.Tensor

    def __getitem__(self, part: slice) -> Draws:
        return Draws(self.lane[part], self.slot[part], self.at[part], self.position[part], self.proposals[part])


class Scores(NamedTuple):
    """Log-probability float32[n] of chosen tokens, and the best alternatives: int64[n, m], float32[n, m]."""

    logprob: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor


class Sampler:
    """Draws for the rows and buffers of a step."""

    def __init__(self, rows: StateRows, buffers: StepBuffers, *, rejects: bool) -> None:
        self._rows = rows
        self._buffers = buffers
        self._rejects = rejects

    def sample(
        self, logits: torch.Tensor, of: Draws, proposed: torch.Tensor, drawn_from: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64[n] drawn from raw logits float32[n, vocab], and how likely each of the tokens `proposed`
        int64[n] (-1: none) was to be accepted. They are judged by rejection, if they are, against what they were
        `drawn_from` float32[n, vocab] (None: they were certain)."""
        rows, slot = self._rows, of.slot
        adjusted = self._adjust(logits.clone(), of)
        greedy = rows.temperature[slot] == 0.0
        z = cut(adjusted / _temperature(rows, slot), rows, slot)
        keys = draw_keys(rows.seed[slot], of.position)
        noise = gumbel(keys, torch.arange(logits.shape[1], device=logits.device))
        token = torch.where(greedy[:, None], adjusted, z + noise).argmax(-1)
        same = (token == proposed).float()
        if not self._rejects:
            return token, same
        known = proposed.clamp(min=0)[:, None]
        p = z.softmax(-1)
        q = torch.zeros_like(p).scatter(1, known, 1.0) if drawn_from is None else drawn_from
        ratio = (p.gather(1, known) / q.gather(1, known))[:, 0].clamp(max=1.0)
        left = (p - q).clamp(min=0.0)
        accepted = (uniform(keys) < ratio) | ~left.any(-1)
        judged = torch.where(accepted, known[:, 0], (left.log() + noise).argmax(-1))
        drawn = greedy | (proposed < 0)
        return torch.where(drawn, token, judged), torch.where(drawn, same, ratio)

    def _adjust(self, logits: torch.Tensor, of: Draws) -> torch.Tensor:
        """Ban, bias and penalize."""
        rows, buffers, lane, slot = self._rows, self._buffers, of.lane, of.slot
        banned = _first(buffers.banned_count[lane], buffers.banned) & (of.at < buffers.banned_rows[lane])[:, None]
        bans = torch.full_like(banned, float("inf"), dtype=torch.float32).masked_fill(banned, float("-inf"))
        logits.scatter_reduce_(1, buffers.banned[lane].long(), bans, "amin")
        bias = rows.bias_values[slot].masked_fill(~_first(rows.bias_count[slot], rows.bias_tokens), 0.0)
        logits.scatter_add_(1, rows.bias_tokens[slot].long(), bias)
        given = torch.zeros_like(logits, dtype=torch.int32)
        seen = _first(buffers.seen[lane], buffers.history_tokens)
        counts = (buffers.history_counts[lane] + _SEEN).masked_fill(~seen, 0)
        given.scatter_add_(1, buffers.history_tokens[lane].long(), counts)
        if of.proposals.shape[1]:
            ahead = _first(of.at, of.proposals).int() * (_SEEN + 1)
            given.scatter_add_(1, of.proposals, ahead)
        repetition, counts = rows.repetition[slot][:, None], given & (_SEEN - 1)
        values = torch.where(logits > 0, logits / repetition, logits * repetition)
        values = values - rows.frequency[slot][:, None] * counts - rows.presence[slot][:, None] * (counts > 0)
        return torch.where(given >= _SEEN, values, logits)


def propose(
    logits: torch.Tensor,
    rows: StateRows,
    slot: torch.Tensor,
    position: torch.Tensor,
    kept: torch.Tensor,
    *,
    rejects: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Proposals int64[n] for token `position` of each row, from a draft's logits float32[n, kept] of the tokens `kept`
    int64; their probability; and with `rejects` what they were drawn from, float32[n, kept]. See
    `programs.sampling.propose`."""
    temperature, greedy = _temperature(rows, slot), rows.temperature[slot] == 0.0
    scaled = logits / temperature
    z = cut(scaled, rows, slot)
    noise = gumbel(draw_keys(rows.seed[slot], position, drafts=rejects), kept)
    place = torch.where(greedy[:, None], logits, z + noise).argmax(-1)
    likely = scaled.softmax(-1)
    sure = likely.amax(-1) if rejects else likely.gather(1, place[:, None])[:, 0]
    return kept[place], sure.nan_to_num().clamp(max=1.0), z.softmax(-1) if rejects else None


def cut(z: torch.Tensor, rows: StateRows, slot: torch.Tensor) -> torch.Tensor:
    """Set to -inf what min-p, top-k and top-p exclude, in this order; equal values stay or go together.

    Each of them keeps the largest values; so one sort serves all three, and each is a threshold.
    """
    lowest = float("-inf")
    values = z.sort(dim=-1, descending=True).values
    min_p, top_k, top_p = rows.min_p[slot][:, None], rows.top_k[slot].long()[:, None], rows.top_p[slot][:, None]
    p = values.softmax(-1)
    likely = (p >= min_p * p[:, :1]).sum(-1, keepdim=True).clamp(min=1)
    threshold = torch.where(min_p > 0.0, values.gather(1, likely - 1), lowest)
    values = values.masked_fill(values < threshold, lowest)
    last = values.gather(1, (top_k - 1).clamp(min=0, max=z.shape[1] - 1))
    threshold = torch.maximum(threshold, torch.where((top_k > 0) & (top_k < z.shape[1]), last, lowest))
    values = values.masked_fill(values < threshold, lowest)
    p = values.softmax(-1)
    kept = (p.cumsum(-1) - p < top_p).sum(-1, keepdim=True).clamp(min=1)
    threshold = torch.maximum(threshold, torch.where(top_p < 1.0, values.gather(1, kept - 1), lowest))
    return z.masked_fill(z < threshold, lowest)


def score(logits: torch.Tensor, tokens: torch.Tensor) -> Scores:
    """Scores of int64[n] tokens under raw logits, float32[n, vocab]."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(ALTERNATIVES_MAX, logits.shape[1]), dim=-1)
    return Scores(logprobs.gather(1, tokens[:, None])[:, 0], top.indices, top.values)


def _temperature(rows: StateRows, slot: torch.Tensor) -> torch.Tensor:
    """float32[n, 1]; 1 for greedy rows."""
    temperature = rows.temperature[slot][:, None]
    return torch.where(temperature == 0.0, 1.0, temperature)


def _first(count: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """bool[n, m]: which of the m entries of a row are below its count [n]."""
    return torch.arange(of.shape[1], device=of.device) < count[:, None]
