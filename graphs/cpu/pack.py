"""Weights in the native program's formats.

Owns quantizing to groups of 32 and the order of codes in memory (native/gemm.hpp). Surprising rule: a matrix that is
stored in four-bit groups stays exactly as it is; every other becomes signed bytes with a float16 scale per group, which
is exact for Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..models.source import WeightSource

GROUP = 32
LANES = 16

Order = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`data` uint8[blocks, bytes] of `groups` groups of 32 inputs; `bias` float32[blocks * 16] or None."""

    data: torch.Tensor
    bias: torch.Tensor | None
    groups: int
    nibble: bool

    @property
    def blocks(self) -> int:
        """Blocks of 16 outputs."""
        return len(self.data)


def pack_linear(source: WeightSource, names: Sequence[str], bias: bool, order: Order | None = None) -> PackedLinear:
    """Stack the named layers' rows, put them in `order`, and pack them."""
    arrange = order or (lambda rows: rows)
    biases = arrange(torch.cat([source.tensor(f"{name}.bias") for name in names])) if bias else None
    stored = [source.int4_group32(f"{name}.weight") for name in names]
    if all(stored):
        q, scale, minimum = (arrange(torch.cat(parts)) for parts in zip(*(s for s in stored if s), strict=True))
        return _pack_nibbles(q, scale, minimum, biases)
    return _pack_bytes(arrange(torch.cat([source.tensor(f"{name}.weight") for name in names])), biases)


def interleaved_halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows of two stacked matrices, 32 of the first and 32 of the second in turn."""
    return rows.view(2, -1, GROUP, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _pack_nibbles(
    q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bias: torch.Tensor | None
) -> PackedLinear:
    steps = _steps(_pad(q))
    codes = steps[:, :, :4] | (steps[:, :, 4:] << 4)
    scales = torch.cat((_lanes(_pad(scale)), _lanes(_pad(minimum))), dim=-1)
    return _assemble(codes, scales, bias, nibble=True)


def _pack_bytes(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    weight = _pad(weight)
    groups = weight.view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1) / 127).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), torch.zeros(()))
    codes = (groups * inverse[..., None]).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return _assemble(_steps(codes.view(weight.shape)), _lanes(scale.float()), bias, nibble=False)


def _pad(rows: torch.Tensor) -> torch.Tensor:
    """Rows up to a multiple of 16, the last ones zero."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES))


def _steps(codes: torch.Tensor) -> torch.Tensor:
    """uint8[out, in] to [blocks, groups, 8 steps, 16 outputs, 4 inputs]."""
    return codes.view(-1, LANES, codes.shape[1] // GROUP, 8, 4).permute(0, 2, 3, 1, 4).contiguous()


def _lanes(per_group: torch.Tensor) -> torch.Tensor:
    """float32[out, groups] to float16[blocks, groups, 16]."""
    return per_group.view(-1, LANES, per_group.shape[1]).transpose(1, 2).half()


def _assemble(codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, nibble: bool) -> PackedLinear:
    blocks, groups = codes.shape[:2]
    flat = torch.cat((codes.reshape(blocks, -1), scales.contiguous().view(torch.uint8).reshape(blocks, -1)), dim=1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 64))
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, -len(bias) % LANES)).contiguous()
    return PackedLinear(_aligned(flat), bias, groups, nibble)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """A copy whose memory begins at a multiple of 64 bytes (torch's allocator sees to that)."""
    copy = torch.empty_like(rows, memory_format=torch.contiguous_format)
    copy.copy_(rows)
    assert copy.data_ptr() % 64 == 0
    return copy
