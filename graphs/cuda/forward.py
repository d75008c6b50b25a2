"""The forward pass of a decoder on a card.

Owns the weights there and one pass over packed rows. Does not own attention or which rows there are. Surprising rule:
it computes what `programs.decoder` defines, in the same types: linear layers and pages in `dtype`, the residual stream,
norms, rotation and softmax in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding, rms_norm, silu

from ..models.config import ModelConfig
from ..models.draft import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, FUSE, HIDDEN_NORM
from ..models.rope import rotary_table
from ..models.source import WeightSource
from ..programs.decoder import Layer, Projection, head_name
from .attention import Attention
from .pages import CudaPages
from .spans import Packing, Spans

LOGITS_ELEMENTS = 1 << 22
"""Logits that exist at a time, about: sampling needs them in a dozen shapes."""


class Forward:
    """A decoder over pages of its own."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        kv: CudaPages,
        *,
        device: torch.device,
        dtype: torch.dtype,
        positions: int,
        attention: Attention,
        reads_hidden: bool = False,
    ) -> None:
        """Read all weights, a layer at a time; see `Decoder`."""
        self.config = config
        self._kv = kv
        self._attention = attention
        fuse = Projection.load(source, (FUSE.removesuffix(".weight"),), False, dtype) if reads_hidden else None
        self._fuse = None if fuse is None else _projection(fuse, device)
        names = (EMBEDDING_NORM, HIDDEN_NORM) if reads_hidden else ()
        self._fused_norms = [source.tensor(name).to(device) for name in names]
        self._embedding = source.tensor(EMBEDDING).to(dtype).to(device)
        self._layers = [_layer(Layer.load(config, source, index, dtype), device) for index in range(config.layers)]
        self._final_norm = source.tensor(FINAL_NORM).to(device)
        if config.tie_embeddings:
            self._head = Projection(self._embedding, None)
        else:
            self._head = _projection(Projection.load(source, (head_name(config),), False, dtype), device)
        cos, sin = rotary_table(config, positions).unbind(1)
        self._rotary = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)

    @property
    def reads_hidden(self) -> bool:
        """Whether it is a draft head."""
        return self._fuse is not None

    def spans(self, packing: Packing, start: torch.Tensor, table: torch.Tensor, longest: int) -> Spans:
        """The packing at its positions in this decoder's pages."""
        kv = self._kv
        return Spans.of(packing, start, table, page_tokens=kv.page_tokens, pages=kv.pages, longest=longest)

    def residual(self, tokens: torch.Tensor, spans: Spans, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run int64[R] tokens, writing their keys and values; float32[R, hidden] before the last norm. `hidden`
        float32[R, hidden] is what a draft head reads with the tokens."""
        config = self.config
        x = embedding(tokens, self._embedding).float()
        if self._fuse is not None and hidden is not None:
            parts = zip((x, hidden), self._fused_norms, strict=True)
            x = self._fuse(torch.cat([self._norm(part, weight) for part, weight in parts], dim=-1))
        cos, sin = self._rotary[spans.position].unbind(1)
        for index, layer in enumerate(self._layers):
            q, k, v = self._heads(layer, layer.qkv(self._norm(x, layer.input_norm)), cos[:, None], sin[:, None])
            keys, values = self._kv.layer(index)
            for pages, new in ((keys, k), (values, v)):
                pages.flatten(0, 1).index_copy_(0, spans.place, new.to(pages.dtype))
            x = x + layer.output(self._attention(q, keys, values, spans, config.sliding_window))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate) * up)
        return x

    def normalized(self, residual: torch.Tensor) -> torch.Tensor:
        """What the output projection reads."""
        return self._norm(residual, self._final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Output projection: float32[rows, hidden] to float32[rows, vocab]."""
        return self._head(hidden)

    def blocks(self, rows: int) -> Iterator[slice]:
        """Cuts `rows` into parts whose logits are not too many."""
        each = max(1, LOGITS_ELEMENTS // self.config.vocab)
        return (slice(first, min(rows, first + each)) for first in range(0, rows, each))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)

    def _heads(self, layer: Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, float32[R, n, head_dim], the former two normalized and rotated: each half of a head
        with the other."""
        config = self.config
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        heads = qkv.view(len(qkv), sum(sizes), config.head_dim)
        q, k, v = torch.split(heads, sizes, dim=1)
        if layer.head_norms is not None:
            q, k = (self._norm(part, norm) for part, norm in zip((q, k), layer.head_norms, strict=True))
            turned = torch.cat((q, k), dim=1)
        else:
            turned = heads[:, : config.heads + config.kv_heads]
        turned = turned * cos + turned.roll(config.head_dim // 2, -1) * sin
        return [*torch.split(turned, sizes[:2], dim=1), v]


def _projection(on_host: Projection, device: torch.device) -> Projection:
    bias = None if on_host.bias is None else on_host.bias.to(device)
    return Projection(on_host.weight.to(device), bias)


def _layer(on_host: Layer, device: torch.device) -> Layer:
    norms = on_host.head_norms
    return Layer(
        input_norm=on_host.input_norm.to(device),
        qkv=_projection(on_host.qkv, device),
        head_norms=None if norms is None else (norms[0].to(device), norms[1].to(device)),
        output=_projection(on_host.output, device),
        mlp_norm=on_host.mlp_norm.to(device),
        gate_up=_projection(on_host.gate_up, device),
        down=_projection(on_host.down, device),
    )
