"""The draft head in torch: the definition of how proposals are made.

Owns one layer that guesses, from the residual stream of the target at a position and the token after it, the token
after that; and its file. Does not own the target, noise or pages. Surprising rule: a chained guess goes on from what
the head itself gave; as soon as the target's own residual stream is known, those positions are run again with it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch.nn.functional import linear, silu

from ..models.config import ModelConfig
from ..models.rope import rotate
from .decoder import rms_norm

FORMAT = "flare-mtp-1"

_LAYER = "layer.self_attn.{}_proj.weight", "layer.mlp.{}_proj.weight"
NAMES = {
    "fc": "fc.weight",
    "embedding_norm": "embedding_norm.weight",
    "hidden_norm": "hidden_norm.weight",
    "output_norm": "output_norm.weight",
    "input_norm": "layer.input_layernorm.weight",
    "mlp_norm": "layer.post_attention_layernorm.weight",
    **{part: _LAYER[0].format(part) for part in "qkvo"},
    **{part: _LAYER[1].format(part) for part in ("gate", "up", "down")},
}
"""The name in a file of each field of `DraftWeights`."""


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """float32, matrices [out, in]: `fc` [hidden, 2 * hidden] reads the embedding and then the hidden state; the others
    are a Llama layer's and the norms'."""

    fc: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    output_norm: torch.Tensor
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Context(NamedTuple):
    """Keys and values of the positions so far, float32[positions, kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head for a target of this `config`; it proposes from `kept` alone, int64, rising token ids."""

    config: ModelConfig
    weights: DraftWeights
    kept: torch.Tensor

    @classmethod
    def load(cls, path: Path, config: ModelConfig) -> DraftHead:
        """Read a file. Raises ValueError if it is not one, or one for a model of other sizes."""
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise ValueError(f"{path}: not a draft head of the format {FORMAT}")
            weights = DraftWeights(**{part: file.get_tensor(name).float() for part, name in NAMES.items()})
            kept = file.get_tensor("kept").long()
        for part, shape in shapes(config).items():
            if (found := tuple(getattr(weights, part).shape)) != shape:
                raise ValueError(f"{path}: {NAMES[part]} is {found}, for this model it would be {shape}")
        return cls(config, weights, kept)

    def empty(self) -> Context:
        """The context of a request of which the head has read nothing."""
        none = torch.zeros(0, self.config.kv_heads, self.config.head_dim)
        return Context(none, none)

    def run(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: torch.Tensor, past: Context
    ) -> tuple[torch.Tensor, Context]:
        """The positions after `past`: of each the embedding of the token after it and its own hidden state (the
        target's residual stream, or what the position before gave here), float32[rows, hidden], and its row of the
        rotary table. Returns what it gives on, float32[rows, hidden], and the context with them."""
        x = self.enter(embedded, hidden)
        q, k, v = self.project(x, rotary)
        here = Context(torch.cat((past.keys, k)), torch.cat((past.values, v)))
        causal = torch.ones(len(x), len(here.keys), dtype=torch.bool).tril(len(past.keys))
        attended = attend(q, here, causal)
        return self.leave(x, attended), here

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream that enters the layer."""
        eps, weights = self.config.norm_eps, self.weights
        both = (rms_norm(embedded, weights.embedding_norm, eps), rms_norm(hidden, weights.hidden_norm, eps))
        return linear(torch.cat(both, dim=-1), weights.fc)

    def project(self, x: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of rows, [rows, heads or kv_heads, head_dim], rotated."""
        weights, width = self.weights, self.config.head_dim
        normed = rms_norm(x, weights.input_norm, self.config.norm_eps)
        q, k, v = (linear(normed, weight).unflatten(-1, (-1, width)) for weight in (weights.q, weights.k, weights.v))
        return rotate(q, rotary), rotate(k, rotary), v

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: the residual stream that leaves it."""
        weights = self.weights
        x = x + linear(attended, weights.o)
        normed = rms_norm(x, weights.mlp_norm, self.config.norm_eps)
        return x + linear(silu(linear(normed, weights.gate)) * linear(normed, weights.up), weights.down)

    def logits(self, x: torch.Tensor, kept_rows: torch.Tensor) -> torch.Tensor:
        """Logits over `kept`, float32[rows, kept]; `kept_rows` are those rows of the target's output projection."""
        return linear(rms_norm(x, self.weights.output_norm, self.config.norm_eps), kept_rows)


def attend(q: torch.Tensor, context: Context, visible: torch.Tensor) -> torch.Tensor:
    """Grouped attention of float32[rows, heads, head_dim] over the positions that bool[rows, positions] shows; float32
    [rows, heads * head_dim]."""
    rows, heads, width = q.shape
    kv_heads = context.keys.shape[1]
    grouped = q.view(rows, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("rkgd,pkd->kgrp", grouped, context.keys) * width**-0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("kgrp,pkd->rkgd", weights, context.values).reshape(rows, heads * width)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each field of the `DraftWeights` for a target of this config."""
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "fc": (hidden, 2 * hidden),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    return {field.name: matrices.get(field.name, (hidden,)) for field in fields(DraftWeights)}
