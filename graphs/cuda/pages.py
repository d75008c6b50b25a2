"""The paged KV cache on a card: storage alone.

Owns one tensor of keys and one of values, a page of a layer being `[page_tokens, kv_heads, head_dim]`, as attention
with a block table reads it. Does not own which request a page belongs to. Surprising rule: one page more than there are
is kept at the end: rows of a graph that a frame does not use write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CudaPages:
    """Keys and values, `[layers, pages + 1, page_tokens, kv_heads, head_dim]` each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, pages: int, page_tokens: int, dtype: torch.dtype) -> CudaPages:
        """Zeros for so many pages, and the one of nobody."""
        shape = (config.layers, pages + 1, page_tokens, config.kv_heads, config.head_dim)
        return cls(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))

    @property
    def pages(self) -> int:
        """Pages that requests may have."""
        return self.keys.shape[1] - 1

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds."""
        return self.keys.shape[2]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, `[pages + 1, page_tokens, kv_heads, head_dim]`."""
        return self.keys[layer], self.values[layer]
