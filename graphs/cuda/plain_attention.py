"""Attention over pages in plain torch: what works on every card, and what other kernels are compared with.

Owns an online softmax over blocks of pages (Milakov and Gimelshein, 2018). Surprising rule: it computes as many rows
for each lane as any may have, over every page that a request could have, since a graph's number of operations is fixed.
So memory stays bounded, and time grows with what is allowed, not with what is served.
"""

from __future__ import annotations

import torch

from .spans import Spans

BLOCK_ELEMENTS = 1 << 24
"""Keys or scores of a block, in elements: 64 MiB of float32."""
_HIDDEN = -1e30
"""The score of a key that a row does not see: finite, so that a block without any visible key gives no NaN. What it
adds is scaled to nothing by the first key that is seen; each row sees its own."""


class PlainAttention:
    """See `Attention`. float32 throughout."""

    name = "plain torch"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, window: int | None
    ) -> torch.Tensor:
        """See `Attention`."""
        rows, heads, head_dim = queries.shape
        lanes, kv_heads, page_tokens, longest = len(spans.keys), keys.shape[2], keys.shape[1], spans.longest
        first, length = spans.ends[:-1], spans.ends.diff()
        place = torch.arange(longest, device=queries.device)
        padded = queries[(first[:, None] + place).clamp(max=rows - 1)]
        padded = padded.view(lanes, longest, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4) * head_dim**-0.5
        last = (spans.keys - length)[:, None] + place
        each = lanes * page_tokens * max(kv_heads * head_dim, heads * longest)
        out = _attend(padded, keys, values, spans, last, window, max(1, BLOCK_ELEMENTS // each))
        offset = torch.arange(rows, device=queries.device) - first[spans.lane]
        return out.permute(0, 3, 1, 2, 4).flatten(2)[spans.lane, offset.clamp(max=longest - 1)]


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: Spans,
    last: torch.Tensor,
    window: int | None,
    pages: int,
) -> torch.Tensor:
    """float32[lanes, kv_heads, group, rows, head_dim], already scaled, over the pages of each lane, so many at a time;
    each row sees the keys up to its `last` [lanes, rows]."""
    lanes, kv_heads, group, rows, head_dim = queries.shape
    page_tokens = keys.shape[1]
    most = torch.full((lanes, kv_heads, group, rows, 1), _HIDDEN, device=queries.device)
    total, mixed = torch.zeros_like(most), torch.zeros_like(queries)
    for first in range(0, spans.table.shape[1], pages):
        block = spans.table[:, first : first + pages].long()
        column = torch.arange(block.shape[1] * page_tokens, device=queries.device) + first * page_tokens
        seen = column <= last[:, :, None]
        if window is not None:
            seen &= column > last[:, :, None] - window
        k, v = (part[block].flatten(1, 2).float().transpose(1, 2) for part in (keys, values))
        beyond = column >= spans.keys[:, None]  # what others left there may be no number
        v = v.masked_fill(beyond[:, None, :, None], 0.0)
        scores = queries.flatten(2, 3) @ k.transpose(-1, -2)
        scores = scores.view(lanes, kv_heads, group, rows, -1).masked_fill(~seen[:, None, None], _HIDDEN)
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, scale = (scores - higher).exp(), (most - higher).exp()
        total = total * scale + weights.sum(-1, keepdim=True)
        mixed = mixed * scale + (weights.flatten(2, 3) @ v).view(lanes, kv_heads, group, rows, head_dim)
        most = higher
    return mixed / total
