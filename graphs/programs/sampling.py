"""From logits to tokens, in torch: the definition of sampling.

Owns the order of adjustments: banned tokens and logit bias, penalties, temperature, min-p, top-k, top-p, noise. Does
not own the noise or state rows. Surprising rule: nothing is renormalized or drawn from; the token is the argmax of the
adjusted logits plus Gumbel noise, which is an exact draw from their softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .buffers import StepBuffers
from .noise import draw_key, gumbel
from .rows import StateRows


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probability of a chosen token, and the best alternatives: int64[n], float32[n], best first."""

    logprob: float
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor


def sample(logits: torch.Tensor, rows: StateRows, buffers: StepBuffers, lane: int) -> int:
    """Draw the token that follows the row of `lane`, from raw logits float32[vocab], all finite."""
    slot = int(buffers.slot[lane])
    logits = _adjust(logits.clone(), rows, buffers, lane)
    temperature = float(rows.temperature[slot])
    if temperature == 0.0:
        return int(logits.argmax())
    z = logits / temperature
    z = _cut(z, float(rows.min_p[slot]), int(rows.top_k[slot]), float(rows.top_p[slot]))
    key = draw_key(int(rows.seed[slot]), int(rows.committed[slot]))
    return int((z + gumbel(key, torch.arange(len(z)))).argmax())


def score(logits: torch.Tensor, token: int, alternatives: int) -> Scores:
    """Scores of `token` under raw logits, float32[vocab]."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(alternatives, len(logits)))
    return Scores(float(logprobs[token]), top.indices, top.values)


def _adjust(logits: torch.Tensor, rows: StateRows, buffers: StepBuffers, lane: int) -> torch.Tensor:
    """Ban, bias and penalize in place. Penalties have vLLM's meanings: repetition counts prompt and output tokens,
    presence and frequency output tokens alone."""
    slot = int(buffers.slot[lane])
    logits[buffers.banned[lane, : int(buffers.banned_count[lane])].long()] = float("-inf")
    biased = int(rows.bias_count[slot])
    logits[rows.bias_tokens[slot, :biased].long()] += rows.bias_values[slot, :biased]
    seen = int(buffers.seen[lane])
    tokens, counts = buffers.history_tokens[lane, :seen].long(), buffers.history_counts[lane, :seen]
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
