"""Attention over pages by torch's own flash attention for sequences of varying lengths.

Owns the two ways to call it. Surprising rule: torch takes a block table only with the kernels of FlashAttention 3,
which are a package of their own; without them the pages of each lane are first copied into one run of keys, which the
kernels that come with torch read.
"""

from __future__ import annotations

import torch
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from .spans import Spans


class BlockTableAttention:
    """See `Attention`. Reads the pages where they are. Raises where the installed torch cannot."""

    name = "flash attention with a block table"

    def __init__(self) -> None:
        activate_flash_attention_impl("FA3")

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, window: int | None
    ) -> torch.Tensor:
        """See `Attention`."""
        out = varlen_attn(
            queries.to(keys.dtype),
            keys,
            values,
            spans.ends,
            None,
            spans.longest,
            spans.reach,
            window_size=_window(window),
            enable_gqa=True,
            seqused_k=spans.keys,
            block_table=spans.table,
        )
        return _alone(out)


class GatheredAttention:
    """See `Attention`. Copies the pages of each lane into one run of keys, as long as the longest request may be."""

    name = "flash attention over gathered pages"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, window: int | None
    ) -> torch.Tensor:
        """See `Attention`."""
        pages = spans.table.flatten().long()
        begins = torch.arange(len(spans.keys) + 1, device=queries.device, dtype=torch.int32) * spans.reach
        out = varlen_attn(
            queries.to(keys.dtype),
            keys[pages].flatten(0, 1),
            values[pages].flatten(0, 1),
            spans.ends,
            begins,
            spans.longest,
            spans.reach,
            window_size=_window(window),
            enable_gqa=True,
            seqused_k=spans.keys,
        )
        return _alone(out)


def _window(window: int | None) -> tuple[int, int]:
    """How many positions before and behind its own a row sees."""
    return (-1 if window is None else window - 1, 0)


def _alone(out: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The output, of which torch gives more only where it is asked."""
    assert isinstance(out, torch.Tensor)
    return out.flatten(1)
