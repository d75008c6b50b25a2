"""The decoder as plain torch: the definition that every faster program is compared with.

Owns the forward pass over rows of any mix of requests, for the whole Llama family. Does not own sampling or state
rows. Surprising rule: the residual stream, norms, rotation and attention are float32 whatever the weights' type;
`dtype` is the type of the linear layers and of the KV pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

from ..memory.pages import PAGE_TOKENS, KvPages
from ..models.config import ModelConfig
from ..models.draft import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, FUSE, HIDDEN_NORM
from ..models.rope import rotary_table, rotate
from ..models.source import WeightSource


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one request: `rows` of them from `first`, at positions from `start`; `pages` int64[n]."""

    first: int
    rows: int
    start: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer; several checkpoint matrices that read the same input are stacked into one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def load(cls, source: WeightSource, names: Sequence[str], bias: bool, dtype: torch.dtype) -> Projection:
        """Stack the named layers (names without their `.weight`)."""
        weight = torch.cat([source.tensor(f"{name}.weight") for name in names]).to(dtype).contiguous()
        return cls(weight, torch.cat([source.tensor(f"{name}.bias") for name in names]) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, in] to float32[rows, out], computed in the weight's type."""
        out = linear(x.to(self.weight.dtype), self.weight).float()
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The checkpoint's names of one layer's parts."""

    prefix: str

    @property
    def qkv(self) -> tuple[str, str, str]:
        return (self._attention("q_proj"), self._attention("k_proj"), self._attention("v_proj"))

    @property
    def output(self) -> tuple[str]:
        return (self._attention("o_proj"),)

    @property
    def gate_up(self) -> tuple[str, str]:
        return (f"{self.prefix}.mlp.gate_proj", f"{self.prefix}.mlp.up_proj")

    @property
    def down(self) -> tuple[str]:
        return (f"{self.prefix}.mlp.down_proj",)

    @property
    def input_norm(self) -> str:
        return f"{self.prefix}.input_layernorm.weight"

    @property
    def mlp_norm(self) -> str:
        return f"{self.prefix}.post_attention_layernorm.weight"

    @property
    def head_norms(self) -> tuple[str, str]:
        return (self._attention("q_norm") + ".weight", self._attention("k_norm") + ".weight")

    def _attention(self, part: str) -> str:
        return f"{self.prefix}.self_attn.{part}"


def layer_names(layer: int) -> LayerNames:
    """Names of a layer's weights."""
    return LayerNames(f"model.layers.{layer}")


def head_name(config: ModelConfig) -> str:
    """Name of the output projection's matrix, without `.weight`."""
    return EMBEDDING.removesuffix(".weight") if config.tie_embeddings else "lm_head"


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm: torch.Tensor
    qkv: Projection
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection

    @classmethod
    def load(cls, config: ModelConfig, source: WeightSource, layer: int, dtype: torch.dtype) -> Layer:
        """Read layer `layer`."""
        names = layer_names(layer)
        query_norm, key_norm = names.head_norms
        return cls(
            input_norm=source.tensor(names.input_norm),
            qkv=Projection.load(source, names.qkv, config.qkv_bias, dtype),
            head_norms=(source.tensor(query_norm), source.tensor(key_norm)) if config.qk_norm else None,
            output=Projection.load(source, names.output, config.output_bias, dtype),
            mlp_norm=source.tensor(names.mlp_norm),
            gate_up=Projection.load(source, names.gate_up, config.mlp_bias, dtype),
            down=Projection.load(source, names.down, config.mlp_bias, dtype),
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in float32 (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Decoder:
    """The whole model over a paged KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        positions: int,
        dtype: torch.dtype,
        *,
        reads_hidden: bool = False,
    ) -> None:
        """Read all weights; `positions` bounds the rotary table. `reads_hidden`: it is a draft head, and begins with a
        hidden state beside each token (`DraftModel`)."""
        self.config = config
        self.fuse = Projection.load(source, (FUSE.removesuffix(".weight"),), False, dtype) if reads_hidden else None
        self.fused_norms = [source.tensor(name) for name in (EMBEDDING_NORM, HIDDEN_NORM)] if reads_hidden else []
        self.embedding = source.tensor(EMBEDDING).to(dtype)
        self.layers = [Layer.load(config, source, layer, dtype) for layer in range(config.layers)]
        self.final_norm = source.tensor(FINAL_NORM)
        self.head = (
            Projection(self.embedding, None)
            if config.tie_embeddings
            else Projection.load(source, (head_name(config),), False, dtype)
        )
        self.rotary = rotary_table(config, positions)

    def forward(self, tokens: torch.Tensor, spans: Sequence[Span], kv: KvPages) -> torch.Tensor:
        """Run int64[rows] tokens, writing their keys and values to the pages of their spans; spans tile the rows.

        Returns the normalized last hidden state, float32[rows, hidden].
        """
        return self.normalized(self.residual(tokens, spans, kv))

    def normalized(self, residual: torch.Tensor) -> torch.Tensor:
        """What the output projection reads."""
        return rms_norm(residual, self.final_norm, self.config.norm_eps)

    def residual(
        self, tokens: torch.Tensor, spans: Sequence[Span], kv: KvPages, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same before the last norm. `hidden` float32[rows, hidden] is what a draft head reads with the tokens."""
        config = self.config
        x = self.embedding[tokens].float()
        if self.fuse is not None and hidden is not None:
            parts = zip((x, hidden), self.fused_norms, strict=True)
            x = self.fuse(torch.cat([rms_norm(part, norm, config.norm_eps) for part, norm in parts], dim=-1))
        positions = torch.cat([torch.arange(span.start, span.start + span.rows) for span in spans])
        rotary = self.rotary[positions]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, config.norm_eps))
            attended = self._attention(layer, qkv, rotary, spans, kv.keys[index], kv.values[index])
            x = x + layer.output(attended)
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, config.norm_eps)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate) * up)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Output projection: float32[rows, hidden] to float32[rows, vocab]."""
        return self.head(hidden)

    def _attention(
        self,
        layer: Layer,
        qkv: torch.Tensor,
        rotary: torch.Tensor,
        spans: Sequence[Span],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate, store keys and values, and attend; float32[rows, heads * head_dim]."""
        config = self.config
        rows = len(qkv)
        heads = qkv.view(rows, config.heads + 2 * config.kv_heads, config.head_dim)
        q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.head_norms is not None:
            q = rms_norm(q, layer.head_norms[0], config.norm_eps)
            k = rms_norm(k, layer.head_norms[1], config.norm_eps)
        q, k = rotate(q, rotary), rotate(k, rotary)
        out = torch.empty(rows, config.heads * config.head_dim)
        for span in spans:
            here = slice(span.first, span.first + span.rows)
            positions = torch.arange(span.start, span.start + span.rows)
            pages, offsets = span.pages[positions // PAGE_TOKENS], positions % PAGE_TOKENS
            keys[pages, :, :, offsets] = k[here].to(keys.dtype)
            values[pages, :, offsets] = v[here].to(values.dtype)
            out[here] = self._attend(q[here], positions, span.pages, keys, values)
        return out

    def _attend(
        self, q: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of float32[rows, heads, head_dim] over the pages in use; float32[rows, heads * head_dim]."""
        config = self.config
        rows, end = len(q), int(positions[-1]) + 1
        used = pages[: -(-end // PAGE_TOKENS)]
        k = keys[used].float().permute(1, 2, 0, 3).reshape(config.kv_heads, config.head_dim, -1)[..., :end]
        v = values[used].float().permute(1, 0, 2, 3).reshape(config.kv_heads, -1, config.head_dim)[:, :end]
        packed = (
            q.view(rows, config.kv_heads, -1, config.head_dim)
            .permute(1, 2, 0, 3)
            .reshape(config.kv_heads, -1, config.head_dim)
        )
        scores = (packed @ k).view(config.kv_heads, -1, rows, k.shape[-1]) * config.head_dim**-0.5
        columns = torch.arange(k.shape[-1])
        hidden = columns > positions[:, None]
        if config.sliding_window is not None:
            hidden |= columns <= positions[:, None] - config.sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mixed: torch.Tensor = weights.reshape(config.kv_heads, -1, k.shape[-1]) @ v
        return mixed.view(config.kv_heads, -1, rows, config.head_dim).permute(2, 0, 1, 3).reshape(rows, -1)
