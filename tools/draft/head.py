"""The draft head in a form that can be trained.

Owns its weights as tensors that take gradients, the parts of its one layer, and its file. Does not own attention
(`unroll`). Surprising rule: this is the same function as the runtime's (`DraftModel`, run by `Decoder`), written again
in parts, since chains of guesses attend in a way that no paged cache has; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import EMBEDDING_NORM, FORMAT, FUSE, HIDDEN_NORM, DraftModel, HeadSource
from flare.graphs.models.rope import rotate
from flare.graphs.programs.decoder import LayerNames, rms_norm

BYTE_GROUP = 32
"""Inputs that share a scale in the runtime's matrices of bytes."""


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """float32, matrices [out, in]; `fc` reads an embedding and then a hidden state."""

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

    def parts(self) -> dict[str, torch.Tensor]:
        """All of them by their names here."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_LAYER = LayerNames("layer")
_NAMES = {
    "fc": FUSE,
    "embedding_norm": EMBEDDING_NORM,
    "hidden_norm": HIDDEN_NORM,
    "output_norm": "output_norm.weight",
    "input_norm": _LAYER.input_norm,
    "mlp_norm": _LAYER.mlp_norm,
} | {
    part: f"{name}.weight"
    for part, name in zip(
        ("q", "k", "v", "o", "gate", "up", "down"),
        (*_LAYER.qkv, *_LAYER.output, *_LAYER.gate_up, *_LAYER.down),
        strict=True,
    )
}
"""The names in a file."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head for a target of this `config`, that proposes from `kept` alone: int64, rising token ids."""

    config: ModelConfig
    weights: DraftWeights
    kept: torch.Tensor

    @classmethod
    def of(cls, draft: DraftModel, config: ModelConfig) -> DraftHead:
        """What the runtime has read for a target of this config."""
        assert isinstance(draft.source, HeadSource)
        tensors = draft.source.tensors
        weights = DraftWeights(**{part: tensors[name].float() for part, name in _NAMES.items()})
        return cls(config, weights, draft.source.kept.long())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a file holds, by name."""
        named = {_NAMES[part]: weight.detach().half().contiguous() for part, weight in self.weights.parts().items()}
        return {**named, "kept": self.kept.int()}

    def save(self, path: Path, facts: Mapping[str, str]) -> None:
        """Write the file that the runtime reads, with `facts` about its training."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(self.tensors(), partial, {"format": FORMAT, **facts})
        partial.replace(path)

    def in_bytes(self) -> DraftHead:
        """The head with its matrices rounded as the native program packs them."""
        rounded = {part: _rounded(weight) for part, weight in self.weights.parts().items()}
        return replace(self, weights=DraftWeights(**rounded))

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream that enters the layer, of embeddings and hidden states, float32[rows, hidden]."""
        eps, weights = self.config.norm_eps, self.weights
        both = (rms_norm(embedded, weights.embedding_norm, eps), rms_norm(hidden, weights.hidden_norm, eps))
        return linear(torch.cat(both, dim=-1), weights.fc)

    def project(self, x: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of rows, [rows, heads or kv_heads, head_dim], rotated."""
        normed = rms_norm(x, self.weights.input_norm, self.config.norm_eps)
        q, k, v = (
            linear(normed, weight).view(len(x), -1, self.config.head_dim)
            for weight in (self.weights.q, self.weights.k, self.weights.v)
        )
        return rotate(q, rotary), rotate(k, rotary), v

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer: the residual stream that leaves it."""
        weights = self.weights
        x = x + linear(attended, weights.o)
        normed = rms_norm(x, weights.mlp_norm, self.config.norm_eps)
        return x + linear(silu(linear(normed, weights.gate)) * linear(normed, weights.up), weights.down)

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        """What the target's output projection, its rows of `kept`, makes logits of."""
        return rms_norm(x, self.weights.output_norm, self.config.norm_eps)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each part of the weights for a target of this config."""
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
    return {part: matrices.get(part, (hidden,)) for part in _NAMES}


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """A matrix in signed bytes with a float16 scale for each group of inputs; a norm as it is."""
    if weight.ndim == 1:
        return weight
    groups = weight.detach().view(len(weight), -1, BYTE_GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = torch.where(scale > 0, groups / scale, torch.zeros(())).round().clamp(-127, 127)
    return (codes * scale).view(weight.shape)
