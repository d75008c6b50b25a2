"""The paged KV cache: storage alone.

Owns one tensor of keys and one of values. Surprising rule: keys lie transposed, `[head_dim, page_tokens]` within a
page, so that one vector instruction scores many positions; values lie `[page_tokens, head_dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..models.config import ModelConfig

PAGE_TOKENS = 32
"""Positions that a page holds: two 16-lane vectors of keys."""


def page_bytes(config: ModelConfig, dtype: torch.dtype, draft: ModelConfig | None = None) -> int:
    """Bytes of one page over all layers, keys and values, and over those of a `draft`, which has pages of its own."""
    own = 0 if draft is None else page_bytes(draft, dtype)
    return own + 2 * config.layers * config.kv_heads * config.head_dim * PAGE_TOKENS * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvPages:
    """Keys `[layers, pages, kv_heads, head_dim, page_tokens]`, values `[..., page_tokens, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, pages: int, dtype: torch.dtype) -> KvPages:
        """Storage filled with zeros, so that what lies beyond a row's end is finite.

        The zeros are written, not promised: memory that the system cannot give is missed here and not in a request.
        """
        inner = (config.head_dim, PAGE_TOKENS)
        lead = (config.layers, pages, config.kv_heads)
        keys = torch.empty(*lead, *inner, dtype=dtype).zero_()
        return cls(keys, torch.empty(*lead, *inner[::-1], dtype=dtype).zero_())
