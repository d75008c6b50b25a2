"""From logits to tokens, in torch: the definition of sampling.

Owns the order of adjustments: banned tokens and logit bias, penalties, temperature, min-p, top-k, top-p, noise. Does
not own the noise or state rows. Surprising rule: nothing is renormalized or drawn from; the token is the argmax of the
adjusted logits plus Gumbel noise, which is an exact draw from their softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .buffers import StepBuffers
from .noise import DRAFT_SALT, draw_key, gumbel, uniform
from .rows import StateRows


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probability of a chosen token, and the best alternatives: int64[n], float32[n], best first."""

    logprob: float
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed token, and the probabilities float32[vocab] that it was drawn from (None: it was certain)."""

    token: int
    drawn_from: torch.Tensor | None = None


def sample(logits: torch.Tensor, rows: StateRows, buffers: StepBuffers, lane: int, ahead: Sequence[int] = ()) -> int:
    """Draw the token that follows the row of `lane` and the accepted proposals `ahead`, from raw logits
    float32[vocab], all finite."""
    z = _distribution(logits, rows, buffers, lane, ahead)
    slot = int(buffers.slot[lane])
    if float(rows.temperature[slot]) == 0.0:
        return int(z.argmax())
    key = draw_key(int(rows.seed[slot]), int(rows.committed[slot]) + len(ahead))
    return int((z + gumbel(key, torch.arange(len(z)))).argmax())


def judge(
    logits: torch.Tensor, rows: StateRows, buffers: StepBuffers, lane: int, ahead: Sequence[int], proposal: Proposal
) -> tuple[int, float]:
    """The proposal with probability min(1, p/q), else a draw from what it leaves of p (Leviathan et al., 2023); and
    that probability. Greedy rows take the target's own token."""
    z = _distribution(logits, rows, buffers, lane, ahead)
    slot = int(buffers.slot[lane])
    if float(rows.temperature[slot]) == 0.0:
        token = int(z.argmax())
        return token, float(token == proposal.token)
    p = z.softmax(-1)
    q = torch.zeros_like(p).index_fill(0, torch.tensor([proposal.token]), 1.0)
    q = q if proposal.drawn_from is None else proposal.drawn_from
    key = draw_key(int(rows.seed[slot]), int(rows.committed[slot]) + len(ahead))
    ratio = min(1.0, float(p[proposal.token] / q[proposal.token]))
    if uniform(key) < ratio:
        return proposal.token, ratio
    left = (p - q).clamp(min=0.0)
    if not left.any():
        return proposal.token, ratio
    return int((left.log() + gumbel(key, torch.arange(len(left)))).argmax()), ratio


def propose(
    logits: torch.Tensor, rows: StateRows, slot: int, step: int, kept: torch.Tensor | None, vocab: int, *, rejects: bool
) -> tuple[Proposal, float]:
    """Draw proposal `step` (from 0) of a row from a draft's logits float32[kept]; and its probability.

    It is drawn with the very noise of the target's own draw, which makes both agree as often as they can without
    knowing one another. Or with noise of its own, where it is to be accepted by its probability; then the probability
    given is that of the likeliest, since how many are verified must not depend on which were drawn.
    """
    tokens = torch.arange(len(logits)) if kept is None else kept.long()
    temperature = float(rows.temperature[slot])
    z = logits / (temperature or 1.0)
    likely = z.softmax(-1)
    drawn_from = None
    if temperature == 0.0:
        place = int(logits.argmax())
    else:
        z = _cut(z, float(rows.min_p[slot]), int(rows.top_k[slot]), float(rows.top_p[slot]))
        seed = int(rows.seed[slot]) ^ (DRAFT_SALT if rejects else 0)
        place = int((z + gumbel(draw_key(seed, int(rows.committed[slot]) + step), tokens)).argmax())
        if rejects:
            drawn_from = torch.zeros(vocab).index_copy(0, tokens, z.softmax(-1))
    confidence = likely[place] if drawn_from is None else likely.max()
    return Proposal(int(tokens[place]), drawn_from), min(1.0, float(confidence.nan_to_num()))


def _distribution(
    logits: torch.Tensor, rows: StateRows, buffers: StepBuffers, lane: int, ahead: Sequence[int]
) -> torch.Tensor:
    """Adjusted logits over the temperature, without what the cuts exclude."""
    slot = int(buffers.slot[lane])
    adjusted = _adjust(logits.clone(), rows, buffers, lane, ahead)
    temperature = float(rows.temperature[slot])
    if temperature == 0.0:
        return adjusted
    z = adjusted / temperature
    return _cut(z, float(rows.min_p[slot]), int(rows.top_k[slot]), float(rows.top_p[slot]))


def score(logits: torch.Tensor, token: int, alternatives: int) -> Scores:
    """Scores of `token` under raw logits, float32[vocab]."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(alternatives, len(logits)))
    return Scores(float(logprobs[token]), top.indices, top.values)


def _adjust(
    logits: torch.Tensor, rows: StateRows, buffers: StepBuffers, lane: int, ahead: Sequence[int]
) -> torch.Tensor:
    """Ban, bias and penalize in place. Penalties have vLLM's meanings: repetition counts prompt and output tokens,
    presence and frequency output tokens alone; proposals `ahead` count as output."""
    slot = int(buffers.slot[lane])
    if len(ahead) < int(buffers.banned_rows[lane]):
        logits[buffers.banned[lane, : int(buffers.banned_count[lane])].long()] = float("-inf")
    biased = int(rows.bias_count[slot])
    logits[rows.bias_tokens[slot, :biased].long()] += rows.bias_values[slot, :biased]
    seen = int(buffers.seen[lane])
    tokens, counts = buffers.history_tokens[lane, :seen].long(), buffers.history_counts[lane, :seen]
    if ahead:
        times = torch.zeros(len(logits), dtype=torch.int32).index_copy(0, tokens, counts)
        times = times.index_add(0, torch.tensor(ahead), torch.ones(len(ahead), dtype=torch.int32))
        tokens = torch.tensor(sorted({*tokens.tolist(), *ahead}))
        counts = times[tokens]
    values, repetition = logits[tokens], float(rows.repetition[slot])
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[tokens] = values - rows.frequency[slot] * counts - rows.presence[slot] * (counts > 0)
    return logits


def _cut(z: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """Set to -inf what min-p, top-k and top-p exclude; equal values stay or go together."""
    if min_p > 0.0:
        z = z.masked_fill(z.softmax(-1) < min_p * z.softmax(-1).max(), float("-inf"))
    if 0 < top_k < len(z):
        z = z.masked_fill(z < z.topk(top_k).values[-1], float("-inf"))
    if top_p < 1.0:
        values, probabilities = z.sort(descending=True).values, z.softmax(-1).sort(descending=True).values
        before = probabilities.cumsum(-1) - probabilities
        kept = int((before < top_p).sum().clamp(min=1))
        z = z.masked_fill(z < values[kept - 1], float("-inf"))
    return z
