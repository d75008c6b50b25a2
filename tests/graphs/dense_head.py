"""What a draft head guesses, computed over a whole sequence at once, without pages, rounds or anything that waits.

Owns the definition that programs are compared with. Surprising rule: only the chain is step by step; each of its
guesses goes on from what the head itself gave, and attends to all real positions and to the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flare.graphs.frames import Sampling
from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import EMBEDDING, HEAD, DraftModel
from flare.graphs.models.rope import rotary_table
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.decoder import Decoder, Span
from flare.graphs.programs.noise import draw_key, gumbel
from tools.draft.head import DraftHead


class Guess(NamedTuple):
    """A proposal, its probability, and by how much it was drawn rather than the next best."""

    token: int
    probability: float
    margin: float


def guesses(
    draft: DraftModel, config: ModelConfig, source: WeightSource, tokens: Sequence[int], depth: int, sampling: Sampling
) -> list[Guess]:
    """What follows `tokens`, the last of which is pending."""
    head, ids = DraftHead.of(draft, config), torch.tensor(tokens)
    embedding, rotary = source.tensor(EMBEDDING), rotary_table(config, len(tokens) + depth)
    x = head.enter(embedding[ids[1:]], _residual(config, source, ids[:-1]))
    keys = values = torch.zeros(0, config.kv_heads, config.head_dim)
    made: list[Guess] = []
    while len(made) < depth:
        at = torch.arange(len(keys), len(keys) + len(x))
        q, k, v = head.project(x, rotary[at])
        keys, values = torch.cat((keys, k)), torch.cat((values, v))
        k, v = (part.repeat_interleave(config.heads // config.kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        later = torch.arange(len(keys)) > at[:, None]
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        given = head.leave(x, attended.flatten(1))[-1:]
        logits = (head.normalized(given) @ source.tensor(HEAD)[head.kept].T)[0] / (sampling.temperature or 1.0)
        noise = gumbel(draw_key(sampling.seed, len(tokens) + len(made)), head.kept) if sampling.temperature else 0.0
        best = (logits + noise).topk(2)
        place = int(best.indices[0])
        made.append(Guess(int(head.kept[place]), float(logits.softmax(-1)[place]), float(-best.values.diff())))
        x = head.enter(embedding[made[-1].token][None], given)
    return made


def _residual(config: ModelConfig, source: WeightSource, ids: torch.Tensor) -> torch.Tensor:
    """The target's residual stream, float32[tokens, hidden]."""
    pages = -(-len(ids) // PAGE_TOKENS)
    decoder = Decoder(config, source, len(ids), torch.float32)
    span = Span(0, len(ids), 0, torch.arange(pages))
    return decoder.residual(ids, [span], KvPages.allocate(config, pages, torch.float32))
